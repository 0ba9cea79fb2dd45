"""What an idle service costs: CPU time, and how often its threads wake up.

    python -m bench.idle [--seconds 60] [-- SETTING ...]

Prints a table with a row for each process, then the threads that woke up at all, by their voluntary context switches: a
thread that waits without polling makes none. The event loop is the API's main thread, which uvicorn wakes ten times a second;
nothing of the engine, and nothing in the worker, should be named.
"""

import argparse
import re
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from bench.serving import Server, serving

_SETTLE_SECONDS = 3


def switches(processes: list[psutil.Process]) -> dict[tuple[int, int], int]:
    """Voluntary context switches so far, by process and thread id. Linux: /proc has a folder for each thread."""
    found = {}
    for process in processes:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            [count] = re.findall(r"^voluntary_ctxt_switches:\t(\d+)", (task / "status").read_text(), flags=re.MULTILINE)
            found[process.pid, int(task.name)] = int(count)
    return found


def tree(server: Server) -> list[psutil.Process]:
    return [server.process, *server.process.children(recursive=True)]


def role(process: psutil.Process, server: Server, worker: int) -> str:
    if process.pid in {server.process.pid, worker}:
        return "API" if process.pid == server.process.pid else "worker"
    return "resource tracker" if "resource_tracker" in " ".join(process.cmdline()) else "forkserver"


def measure(server: Server, seconds: float) -> None:
    server.wait_ready()
    server.post("/basic_generate", {"prompt": "Hello", "max_tokens": 8})
    worker = server.worker_pid()
    time.sleep(_SETTLE_SECONDS)
    processes = tree(server)
    used = [sum(process.cpu_times()[:2]) for process in processes]
    before = switches(processes)
    began = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    now = [sum(process.cpu_times()[:2]) for process in processes]
    woken = {ids: count - before[ids] for ids, count in switches(processes).items() if ids in before}
    print("| process | CPU | resident | threads | wake-ups |\n|---|---|---|---|---|")
    for process, cpu in zip(processes, (b - a for a, b in zip(used, now, strict=True)), strict=True):
        own = [count for (pid, _), count in woken.items() if pid == process.pid]
        size = process.memory_info().rss / 2**20
        name = role(process, server, worker)
        print(f"| {name} | {100 * cpu / elapsed:.2f}% | {size:.0f} MB | {len(own)} | {sum(own)} |")
    print(f"\nOver {elapsed:.0f} s. Threads that woke up:")
    for (pid, tid), count in woken.items():
        if count:
            name = role(psutil.Process(pid), server, worker)
            print(f"- {name}, {'main thread' if pid == tid else f'thread {tid}'}: {count} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("settings", nargs="*", help="settings of the server, after --")
    chosen = parser.parse_args()
    with serving(*chosen.settings) as server:
        measure(server, chosen.seconds)


if __name__ == "__main__":
    main()
