"""From the engine's thread to the callers' event loops: one post per loop and step, and no queue that can grow.

    engine thread                          an event loop
    Delivery.add(sink, delta)  merges   ->
    Delivery.post()            wakes    -> _Outbox.flush -> OutputSink merges -> await sink.get()

What a loop hasn't fetched, or a reader hasn't read, merges with what follows: a slow reader costs the memory of its own
text, and a loop that stands still has one callback waiting, however many steps pass.
"""

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from llm.exceptions import QuartetError
from llm.messages import TokenLogprob
from llm.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Completion:
    """How a sequence ended, in all."""

    finish_reason: FinishReason
    stop_reason: int | str | None  # the stop string or stop token, if one ended it
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    truncated: bool  # the prompt was cut, as asked
    prompt_logprobs: tuple[TokenLogprob, ...] | None

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        finish: FinishReason,
        stop_reason: int | str | None,
        *,
        truncated: bool,
        prompt_logprobs: Iterable[TokenLogprob],
    ) -> "Completion":
        return cls(
            finish_reason=finish,
            stop_reason=stop_reason,
            prompt_tokens=sequence.num_prompt_tokens,
            completion_tokens=sequence.num_output_tokens,
            cached_tokens=sequence.num_cached_tokens or 0,
            seed=sequence.seed,
            truncated=truncated,
            prompt_logprobs=tuple(prompt_logprobs) if sequence.params.prompt_logprobs is not None else None,
        )


@dataclass(slots=True)
class Delta:
    """What is new of one sequence. The last one has a completion or an error."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    completion: Completion | None = None
    error: QuartetError | None = None

    def merge(self, later: "Delta") -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.completion = later.completion or self.completion
        self.error = later.error or self.error


class OutputSink:
    """One sequence's way to its one reader. Made on the reader's loop; filled by a `Delivery` only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._delta: Delta | None = None
        self._error: QuartetError | None = None
        self._arrived = asyncio.Event()

    async def get(self) -> Delta:
        """Everything since the last call, merged; waits while there is nothing. A call that is cancelled loses nothing.

        Raises the sequence's error once what came before it has been read, and again at every later call.
        """
        while self._delta is None:
            if self._error is not None:
                raise self._error
            await self._arrived.wait()
            self._arrived.clear()
        delta, self._delta = self._delta, None
        return delta

    def accept(self, delta: Delta) -> None:
        """On the loop's own thread."""
        self._error, delta.error = self._error or delta.error, None
        if self._delta is not None:
            self._delta.merge(delta)
        elif delta.text or delta.token_ids or delta.completion is not None:
            self._delta = delta
        self._arrived.set()


class Delivery:
    """Collects a step's deltas and posts them. `add` hands the delta over: it may grow by later ones.

    Any thread may call; the deltas of one sink arrive in the order they were added.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outboxes: dict[asyncio.AbstractEventLoop, _Outbox] = {}

    def add(self, sink: OutputSink, delta: Delta) -> None:
        with self._lock:
            outbox = self._outboxes.get(sink.loop)
            if outbox is None:
                outbox = self._outboxes[sink.loop] = _Outbox(self._lock)
            outbox.add(sink, delta)

    def post(self) -> None:
        """Wakes every loop that has something to fetch; one that is closed is dropped with what it would have got."""
        with self._lock:
            for loop, outbox in list(self._outboxes.items()):
                if not outbox.wake(loop):
                    del self._outboxes[loop]


class _Outbox:
    """What one loop has not fetched yet. The lock is the delivery's."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._deltas: dict[OutputSink, Delta] = {}
        self._posted = False

    def add(self, sink: OutputSink, delta: Delta) -> None:
        known = self._deltas.get(sink)
        if known is None:
            self._deltas[sink] = delta
        else:
            known.merge(delta)

    def wake(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Has the loop fetch what there is. False when the loop is closed."""
        if loop.is_closed():
            return False
        if self._posted or not self._deltas:
            return True
        try:
            loop.call_soon_threadsafe(self.flush)
        except RuntimeError:  # closed since we asked
            return False
        self._posted = True
        return True

    def flush(self) -> None:
        """On the loop's own thread."""
        with self._lock:
            deltas, self._deltas = self._deltas, {}
            self._posted = False
        for sink, delta in deltas.items():
            sink.accept(delta)
