"""What the engine itself costs per step: everything but the model's forward and sampling.

    python -m bench.engine_overhead [--repeats 5] [--queued 1000] [-- SETTING ...]

Sixteen sequences decode, first with an empty queue, then with a thousand requests waiting, in turn. "Own time" is a step's
whole time less what the worker says forward and sampling took: scheduling, both messages, decoding of text, delivery.
"Cycle" is the time from one step's end to the next one's, so it holds the inbox and the metrics, too. The callers run in the
same process, as they do in the service.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import logs
import settings
from llm.forkserver import Forkserver
from llm.llm import LLMEngine
from llm.observer import NullObserver
from llm.sequence import SamplingParams
from llm.submission import GenerationRequest, Submission

SEQUENCES = 16
_TOKENS = 160  # per sequence
_STEPS = 100  # measured, after all sixteen decode


@dataclass(frozen=True, slots=True)
class Step:
    """Times in milliseconds."""

    whole: float
    forward: float
    cycle: float

    @property
    def own(self) -> float:
        return self.whole - self.forward


@dataclass
class Recorder(NullObserver):
    """Keeps the steps in which sixteen sequences got one token each; `full` is told when there are enough."""

    steps: list[Step] = field(default_factory=list)
    full: Callable[[], None] = lambda: None
    _ended: float = 0.0

    def step(self, *, scheduled: int, tokens: int, seconds: float, forward_seconds: float) -> None:
        now = time.monotonic()
        cycle, self._ended = now - self._ended, now
        if scheduled == tokens == SEQUENCES and len(self.steps) < _STEPS:
            self.steps.append(Step(1e3 * seconds, 1e3 * forward_seconds, 1e3 * cycle))
            if len(self.steps) == _STEPS:
                self.full()


async def measure(engine: LLMEngine, recorder: Recorder, queued: int) -> list[Step]:
    """The steps of sixteen running sequences while `queued` others wait."""
    loop, full = asyncio.get_running_loop(), asyncio.Event()
    recorder.full = lambda: _tell(loop, full)
    with ExitStack() as stack:
        running = [stack.enter_context(await submit(engine, i)) for i in range(SEQUENCES)]
        waiting = [stack.enter_context(await submit(engine, SEQUENCES + i)) for i in range(queued)]
        readers = [asyncio.ensure_future(submission.outputs[0].collect()) for submission in running]
        recorder.steps = []
        await full.wait()
        if engine.state().waiting < len(waiting):
            raise RuntimeError(f"{engine.state().waiting} wait, not {len(waiting)}")
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return recorder.steps


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


async def submit(engine: LLMEngine, i: int) -> Submission:
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    return await engine.submit(GenerationRequest(f"request {i}", (f"Number {i} is a number that",), params))


async def run(chosen: Sequence[str], repeats: int, queued: int) -> dict[int, list[list[Step]]]:
    """Steps by how many waited, a list for each repeat."""
    size = ["--max-num-seqs", str(SEQUENCES), "--max-queue", str(queued + SEQUENCES)]
    recorder, forkserver = Recorder(), Forkserver()
    engine = LLMEngine(
        settings.parse([*size, *chosen]).engine(),
        recorder,
        forkserver,
        set_up_logging=partial(logs.configure, "warning", "text", "worker"),
    )
    engine.start()
    try:
        await engine.started()
        await measure(engine, recorder, 0)
        measured: dict[int, list[list[Step]]] = {0: [], queued: []}
        for _ in range(repeats):
            for waiting, steps in measured.items():
                steps.append(await measure(engine, recorder, waiting))
        return measured
    finally:
        await engine.close()
        forkserver.close()


def median(repeats: list[list[Step]], what: Callable[[Step], float]) -> float:
    """The median over the repeats of each one's median step."""
    return statistics.median(statistics.median(map(what, steps)) for steps in repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("settings", nargs="*", help="settings of the engine, after --")
    chosen = parser.parse_args()
    measured = asyncio.run(run(chosen.settings, chosen.repeats, chosen.queued))
    print(f"{SEQUENCES} sequences, {_STEPS} steps, median of {chosen.repeats}, milliseconds\n")
    print(
        "| waiting | own time | own time, worst of 20 | forward and sampling | whole step | cycle |\n|---|---|---|---|---|---|"
    )
    for waiting, repeats in measured.items():
        worst = statistics.median(statistics.quantiles([step.own for step in steps], n=20)[-1] for steps in repeats)
        own, forward, whole, cycle = (
            median(repeats, what) for what in (lambda s: s.own, lambda s: s.forward, lambda s: s.whole, lambda s: s.cycle)
        )
        print(f"| {waiting:,} | {own:.2f} | {worst:.2f} | {forward:.1f} | {whole:.1f} | {cycle:.1f} |")
    ratio = median(measured[chosen.queued], lambda s: s.whole) / median(measured[0], lambda s: s.whole)
    print(f"\nA step with {chosen.queued:,} waiting takes {100 * (ratio - 1):+.1f}%.")


if __name__ == "__main__":
    main()
