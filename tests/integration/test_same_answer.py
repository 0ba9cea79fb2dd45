"""Same request, same answer: in float32 on a tiny model, and in the serving dtype on the default one; greedy and by a seed; in
a crowd, after a preemption, and after a worker or the forkserver was killed at a chosen moment."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from llm.llm import LLMEngine
from llm.model_executor import MODEL_WORKER
from llm.observer import NullObserver
from llm.sequence import SamplingParams
from llm.submission import Generation
from tests.integration.conftest import TinyModel
from tests.integration.engines import FORKSERVER, answer, running, same, together

pytestmark = pytest.mark.asyncio(loop_scope="module")

_TOKENS = 24
_TEXT = "the quick brown fox jumps over the lazy dog and back again, as foxes do on days like these " * 2
_BLOCKS = 14  # 16 of the requests below need more
_BLOCK_BYTES = {"tiny": 16 * 2 * 2 * 2 * 16 * 4, "default": 16 * 2 * 30 * 3 * 64 * 2}  # 16 tokens' keys and values
PARAMS = {
    "greedy": SamplingParams(max_tokens=_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=_TOKENS, ignore_eos=True, temperature=0.9, top_p=0.95, seed=11),
}
CROWD = [(f"{i} {_TEXT[: 3 + 11 * i]}", params) for i in range(8) for params in PARAMS.values()]


@dataclass
class Watch(NullObserver):
    """Counts steps and preemptions; calls `strike` after a chosen step."""

    steps: int = 0
    preemptions: int = 0
    after: int | None = None
    strike: Callable[[], None] = field(default=lambda: None)

    def step(self, *, scheduled: int, tokens: int, seconds: float, forward_seconds: float) -> None:
        self.steps += 1
        if self.steps == self.after:
            self.strike()

    def preempted(self) -> None:
        self.preemptions += 1


@dataclass
class Served:
    engine: LLMEngine
    watch: Watch

    async def struck(self, prompt: str, params: SamplingParams, after: int, strike: Callable[[], None]) -> Generation:
        """strike: called after that many steps."""
        self.watch.steps, self.watch.after, self.watch.strike = 0, after, strike
        return await answer(self.engine, prompt, params)

    def kill_worker(self) -> None:
        pid = self.engine.state().worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def kill_both(self) -> None:
        FORKSERVER.kill()
        self.kill_worker()


@asynccontextmanager
async def serving(name: str, tiny_model: TinyModel, default_model: Path, **changes: object) -> AsyncIterator[Served]:
    folder, dtype = (tiny_model("llama"), "float32") if name == "tiny" else (default_model, "auto")
    watch = Watch()
    usual: dict[str, object] = {"dtype": dtype, "max_num_seqs": 16, "max_num_batched_tokens": 32, "step_timeout": 60.0}
    async with running(folder, watch, entry=MODEL_WORKER, **(usual | changes)) as engine:
        yield Served(engine, watch)


@pytest.fixture(scope="module", params=["tiny", "default"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(name: str, tiny_model: TinyModel, default_model: Path) -> AsyncIterator[Served]:
    """Where workers are killed."""
    async with serving(name, tiny_model, default_model) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calm(name: str, tiny_model: TinyModel, default_model: Path) -> AsyncIterator[Served]:
    """Where none is."""
    async with serving(name, tiny_model, default_model) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(calm: Served) -> list[Generation]:
    return [await answer(calm.engine, prompt, params) for prompt, params in CROWD]


async def test_in_a_crowd_of_sixteen(served: Served, alone: list[Generation]) -> None:
    assert same(await together(served.engine, CROWD), alone)


async def test_after_preemptions(name: str, alone: list[Generation], tiny_model: TinyModel, default_model: Path) -> None:
    size = _BLOCKS * _BLOCK_BYTES[name]
    async with serving(name, tiny_model, default_model, kv_cache_bytes=size) as small:
        assert same(await together(small.engine, CROWD), alone)
        assert small.watch.preemptions > 0


@pytest.mark.parametrize("kind", PARAMS)
async def test_after_a_kill_in_prefill_in_mid_decode_and_at_the_last_token(calm: Served, served: Served, kind: str) -> None:
    """Each prompt begins with another digit, so that nothing of it is in a prefix cache."""
    params = PARAMS[kind]
    kills = [(moment, served.kill_worker) for moment in ("prefill", "decode", "last")]
    kills.append(("decode", served.kill_both))
    for i, (moment, strike) in enumerate(kills):
        prompt = f"{i}{kind}{_TEXT}"
        calm.watch.steps = 0
        expected = await answer(calm.engine, prompt, params)
        steps = calm.watch.steps
        assert steps > _TOKENS  # the prompt came in chunks
        after = {"prefill": 1, "decode": steps - _TOKENS // 2, "last": steps - 1}[moment]
        restarts = served.engine.state().restarts
        assert same([await served.struck(prompt, params, after, strike)], [expected]), f"{moment}, {strike.__name__}"
        assert served.engine.state().restarts == restarts + 1
