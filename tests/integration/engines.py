"""Engines for tests: real ones, on real workers, that share one forkserver as those of the service do."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from llm.config import EngineConfig
from llm.engine_state import EngineStatus
from llm.forkserver import Forkserver
from llm.llm import LLMEngine
from llm.model_executor import MODEL_WORKER
from llm.observer import NullObserver
from llm.sequence import SamplingParams
from llm.submission import Generation, GenerationRequest, Submission

FORKSERVER = Forkserver()


def no_logs() -> None:
    """Workers of tests log to nowhere."""


def config(folder: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": str(folder),
        "model_cache": folder.parent,
        "dtype": "float32",
        "device": "cpu",
        "threads": 2,
        "tokenizer_threads": 2,
        "max_num_seqs": 4,
        "max_queue": 64,
        "max_model_len": None,
        "max_num_batched_tokens": 64,
        "kv_cache_bytes": None,
        "kv_cache_limit": 16 << 20,
        "batch_invariant": True,
        "step_timeout": 5.0,
        "load_timeout": 120.0,
        "max_restarts": 5,
    }
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def running(
    folder: Path, observer: NullObserver | None = None, *, entry: str = MODEL_WORKER, **changes: object
) -> AsyncIterator[LLMEngine]:
    observer = observer or NullObserver()
    engine = LLMEngine(config(folder, **changes), observer, FORKSERVER, set_up_logging=no_logs, worker_entry=entry)
    engine.start()
    try:
        await engine.started()
        yield engine
        state = engine.state()
        if state.status in {EngineStatus.READY, EngineStatus.RECOVERING}:
            assert (state.running, state.waiting, state.used_blocks) == (0, 0, 0)
    finally:
        began = time.monotonic()
        await engine.close()
        assert time.monotonic() - began < 2


async def submit(engine: LLMEngine, prompt: str, params: SamplingParams, request_id: str = "r") -> Submission:
    return await engine.submit(GenerationRequest(request_id, (prompt,), params))


async def answer(engine: LLMEngine, prompt: str, params: SamplingParams, request_id: str = "r") -> Generation:
    with await submit(engine, prompt, params, request_id) as submission:
        return await submission.outputs[0].collect()


async def together(engine: LLMEngine, requests: Sequence[tuple[str, SamplingParams]]) -> list[Generation]:
    return await asyncio.gather(*(answer(engine, prompt, params) for prompt, params in requests))


def same(answers: Sequence[Generation], expected: Sequence[Generation]) -> bool:
    return [a.token_ids for a in answers] == [e.token_ids for e in expected] and [a.text for a in answers] == [
        e.text for e in expected
    ]
