"""What an idle service costs: CPU time, and how often its threads wake up.

    python -m bench.idle [--seconds 60] [-- SETTING ...]

Prints a table with a row for each process, then the wake-ups of the engine's thread and of the worker: voluntary context
switches, which a thread that waits without polling doesn't make.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from bench.serving import Server, serving

_SETTLE_SECONDS = 3


@dataclass(frozen=True, slots=True)
class Thread:
    pid: int
    tid: int
    name: str
    switches: int  # voluntary context switches so far


def threads(pid: int) -> list[Thread]:
    """Linux: /proc has a folder for each thread."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        told = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        found.append(Thread(pid, int(task.name), told["Name"].strip(), int(told["voluntary_ctxt_switches"])))
    return found


def tree(server: Server) -> list[psutil.Process]:
    return [server.process, *server.process.children(recursive=True)]


def role(process: psutil.Process, server: Server, worker: int) -> str:
    return "API" if process.pid == server.process.pid else "worker" if process.pid == worker else "forkserver"


def measure(server: Server, seconds: float) -> None:
    server.wait_ready()
    server.post("/basic_generate", {"prompt": "Hello", "max_tokens": 8})
    worker = server.worker_pid()
    time.sleep(_SETTLE_SECONDS)
    processes = tree(server)
    used = [sum(process.cpu_times()[:2]) for process in processes]
    before = {thread.tid: thread for process in processes for thread in threads(process.pid)}
    began = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    print(f"| process | CPU over {elapsed:.0f} s | resident | threads | wake-ups |\n|---|---|---|---|---|")
    for process, was in zip(processes, used, strict=True):
        cpu = sum(process.cpu_times()[:2]) - was
        now = threads(process.pid)
        woken = sum(thread.switches - before[thread.tid].switches for thread in now if thread.tid in before)
        size = process.memory_info().rss / 2**20
        name = role(process, server, worker)
        print(f"| {name} | {100 * cpu / elapsed:.2f}% | {size:.0f} MB | {len(now)} | {woken} |")
    for process in processes:
        for thread in threads(process.pid):
            woken = thread.switches - before[thread.tid].switches if thread.tid in before else 0
            if woken or thread.name.startswith("llm-engine"):
                print(f"thread {thread.name} of the {role(process, server, worker)}: {woken} wake-ups")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("settings", nargs="*", help="settings of the server, after --")
    chosen = parser.parse_args()
    with serving(*chosen.settings) as server:
        measure(server, chosen.seconds)


if __name__ == "__main__":
    main()
