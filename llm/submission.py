"""What a caller asks of an engine, and what it holds while it is answered: the same for our engine and for vLLM."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from llm.delivery import Completion, Delta, OutputSink
from llm.messages import TokenLogprob
from llm.sequence import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """All prompts share the parameters; sequence i of the request draws with seed + i."""

    request_id: str
    prompts: tuple[str | tuple[int, ...], ...]
    params: SamplingParams
    many: bool = False  # the caller sent a list: errors then name prompts[i]
    names: tuple[str, str] = ("prompt", "prompts")  # what the caller called one, and a list

    def prompt_name(self, i: int) -> str:
        one, several = self.names
        return f"{several}[{i}]" if self.many else one


@dataclass(slots=True)
class Generation:
    """One sequence's whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    completion: Completion | None = None


class Output:
    """One sequence's answer as it comes: iterate for its deltas, or `collect` it. The last delta has the completion.

    Raises the sequence's QuartetError where it fails.
    """

    def __init__(self, sequence_id: str, sink: OutputSink) -> None:
        self.sequence_id = sequence_id
        self._sink = sink
        self._complete = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._complete:
            raise StopAsyncIteration
        delta = await self._sink.get()
        self._complete = delta.completion is not None
        return delta

    async def collect(self) -> Generation:
        whole = Delta()
        async for delta in self:
            whole.merge(delta)
        return Generation(whole.text, whole.token_ids, whole.logprobs, whole.completion)


class Submission:
    """The outputs of one request, prompt by prompt and choice by choice. Leaving its context aborts what still runs."""

    def __init__(self, outputs: tuple[Output, ...], abort: Callable[[], None]) -> None:
        self.outputs = outputs
        self.abort = abort  # any thread, any number of times; nothing happens where all has ended

    async def collect(self) -> list[Generation]:
        """Every output in full, in order. Raises what the first raises that fails."""
        tasks = [asyncio.ensure_future(output.collect()) for output in self.outputs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()
