"""What is built from what, once, and closed in reverse."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import logs
from llm.engine_state import EngineState
from llm.forkserver import Forkserver
from llm.llm import LLMEngine
from llm.submission import GenerationRequest, Submission
from llm.vllm_engine import VllmEngine
from metrics import ServiceMetrics
from multi_model.service import Models
from settings import HttpConfig, Settings


class Generator(Protocol):
    """Whatever answers generation requests."""

    async def submit(self, request: GenerationRequest) -> Submission:
        """Raises a ClientError or ServerError for a request that is not taken."""

    async def drain(self, grace: float) -> bool:
        """Takes no more requests. True when all that were taken have ended, within `grace` seconds."""

    async def close(self) -> None:
        """What still runs ends with Draining. A second call does nothing."""


class Engine(Generator, Protocol):
    """What the HTTP side needs of `llm.llm.LLMEngine`, whose docstrings say the rest."""

    def start(self) -> None: ...

    async def started(self) -> None: ...

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def state(self) -> EngineState: ...


@dataclass(frozen=True, slots=True)
class Services:
    http: HttpConfig
    metrics: ServiceMetrics
    engine: Engine
    vllm: Generator
    models: Models
    forkserver: Forkserver

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.models.read_catalogue()
        self.engine.start()
        booking = asyncio.create_task(self.models.hold_own())
        try:
            yield
        finally:
            booking.cancel()
            await self.close()

    async def drain(self, grace: float) -> bool:
        """As a Generator's, of all of them."""
        parts = (self.engine, self.vllm, self.models.manager)
        return all(await asyncio.gather(*(part.drain(grace) for part in parts)))

    async def close(self) -> None:
        await asyncio.gather(self.models.manager.close(), self.engine.close(), self.vllm.close())
        await asyncio.to_thread(self.forkserver.close)


def build(settings: Settings) -> Services:
    metrics = ServiceMetrics()
    log = settings.log()
    forkserver = Forkserver()
    set_up_logging = partial(logs.configure, log.level, log.format, "worker")
    engine = LLMEngine(settings.engine(), metrics, forkserver, set_up_logging=set_up_logging)
    models = Models(settings.models(), settings.engine(), engine, forkserver, set_up_logging)
    vllm = VllmEngine(settings.vllm(), lambda: engine.state().folder)
    return Services(http=settings.http(), metrics=metrics, engine=engine, vllm=vllm, models=models, forkserver=forkserver)
