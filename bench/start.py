"""How long a start takes, to the first answer, and how long a dead worker is missed.

    python -m bench.start [--repeats 3] [--kills 5] [-- SETTING ...]

"Cold" starts with an empty model cache, so that the model is converted; "again" with the cache that the cold one left. File
caches of the system are left as they are. A restart is timed twice: as the service says it (from the new worker's start until
it is ready), and as a client sees it, by a stream that runs while the worker is killed: its longest gap.
"""

import argparse
import itertools
import os
import signal
import statistics
import tempfile
import time
import urllib.request

from bench.serving import Server, serving

_REQUEST = b'{"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": true}'


def first_answer(server: Server) -> tuple[float, float]:
    """Seconds from the start to ready, and to the first answer."""
    ready = server.wait_ready()
    server.post("/basic_generate", {"prompt": "The capital of France is", "max_tokens": 1})
    return ready, time.monotonic() - server.started


def longest_gap_over_a_kill(server: Server) -> float:
    """Seconds between two pieces of a stream, at most. The worker is killed after twenty of them."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/generate_stream", _REQUEST, headers)  # noqa: S310 - our own address
    times: list[float] = []
    with urllib.request.urlopen(request, timeout=120) as stream:  # noqa: S310
        for line in stream:
            if line.startswith(b"event: error"):
                raise RuntimeError("the stream failed")
            if line.startswith(b"data:"):
                times.append(time.monotonic())
                if len(times) == 20:
                    os.kill(server.worker_pid(), signal.SIGKILL)
    return max(b - a for a, b in itertools.pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("settings", nargs="*", help="settings of the server, after --")
    chosen = parser.parse_args()
    starts: dict[str, list[tuple[float, float]]] = {"cold": [], "again": []}
    gaps: list[float] = []
    for repeat in range(chosen.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for kind, measured in starts.items():
                with serving("--model-cache", cache, *chosen.settings) as server:
                    measured.append(first_answer(server))
                    if kind == "again" and repeat == chosen.repeats - 1:
                        gaps = [longest_gap_over_a_kill(server) for _ in range(chosen.kills)]
                        load = server.get("/version")["load_seconds"]
    print("| | median | all |\n|---|---|---|")
    for kind, measured in starts.items():
        for i, what in enumerate(("ready", "first answer")):
            seconds = [pair[i] for pair in measured]
            print(f"| {kind}: {what} | {statistics.median(seconds):.1f} s | {' '.join(f'{s:.1f}' for s in seconds)} |")
    print(
        f"| a killed worker: longest gap in a stream | {statistics.median(gaps):.2f} s | {' '.join(f'{s:.2f}' for s in gaps)} |"
    )
    print(f"| of it, the new worker's own start | {load:.2f} s | the last one |")


if __name__ == "__main__":
    main()
