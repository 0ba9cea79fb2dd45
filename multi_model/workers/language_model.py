"""A language model: an LLMEngine, batched and streaming, with a worker process of its own."""

import asyncio
from typing import Any

from llm.engine_state import EngineStatus
from llm.exceptions import ModelUnavailable, QuartetError
from llm.llm import LLMEngine
from llm.submission import Generation, GenerationRequest, Submission
from multi_model.memory import footprint


class LanguageModelWorker:
    """A `multi_model.workers.base.Worker`. own: the service's own engine, whose life isn't the manager's business."""

    labels: tuple[str, ...] = ()

    def __init__(self, name: str, engine: LLMEngine, *, own: bool) -> None:
        self._name, self._engine, self._own = name, engine, own

    async def load(self) -> None:
        if not self._own:
            self._engine.start()
        try:
            await self._engine.started()
        except QuartetError as error:
            await self.unload()
            raise ModelUnavailable(self._name, error.message) from error
        state = self._engine.state()
        if state.status is EngineStatus.DEAD:
            raise ModelUnavailable(self._name, state.reason)

    async def died(self) -> None:
        await self._engine.over()

    async def measure(self) -> int:
        """Its cache counts in full, written or not."""
        state = self._engine.state()
        pids = [] if state.worker_pid is None else [state.worker_pid]
        taken = (await asyncio.to_thread(footprint, pids)).total
        return taken + (state.ready.kv_cache_bytes if state.ready else 0)

    async def predict(self, request: Any) -> list[Generation]:
        with await self.submit(request) as submission:
            return await submission.collect()

    async def submit(self, request: GenerationRequest) -> Submission:
        """As `LLMEngine.submit`."""
        return await self._engine.submit(request)

    async def unload(self) -> None:
        if not self._own:
            await self._engine.close()
