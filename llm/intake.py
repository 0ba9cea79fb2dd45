"""From a request to sequences: tokenization, every refusal that needs the model's limits, seeds, and the bound on how
many are taken."""

import asyncio
import itertools
import math
import secrets
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass

from llm.exceptions import CacheTooSmall, ContextLengthExceeded, InvalidRequest, QueueFull
from llm.messages import Ready
from llm.sequence import SEED_LIMIT, SamplingParams, Sequence, check_encodable
from llm.submission import GenerationRequest
from llm.tokenization import IncrementalDecoder, Tokenization

LONGEST_WAIT = 60  # seconds that a refused caller is told to wait at most


@dataclass(slots=True)
class Prepared:
    """A sequence that has not been queued, and what turns its tokens into text."""

    sequence: Sequence
    decoder: IncrementalDecoder
    truncated: bool


class AdmissionBound:
    """How many sequences are in hand: running, waiting or being tokenized. Any thread."""

    def __init__(self, limit: int, concurrency: int) -> None:
        self._limit = limit
        self._concurrency = concurrency
        self._held = 0
        self._lock = threading.Lock()
        self._seconds = 1.0  # moving average of a sequence's time from its submission to its end
        self._when_empty: list[Callable[[], object]] = []

    @property
    def held(self) -> int:
        return self._held

    def take(self, count: int) -> None:
        """All of them or none. Raises QueueFull."""
        with self._lock:
            free = self._limit - self._held
            if count > free:
                wait = math.ceil(self._seconds * max(1, self._held - self._concurrency) / self._concurrency)
                raise QueueFull(count, free, retry_after=min(max(wait, 1), LONGEST_WAIT))
            self._held += count

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Takes all of them or none (QueueFull), for a submission under way: one that fails gives them back."""
        self.take(count)
        try:
            yield
        # A caller that leaves meanwhile is a CancelledError; whatever it is, it is raised again.
        except BaseException:
            self.give_back(count)
            raise

    def give_back(self, count: int, seconds: float | None = None) -> None:
        with self._lock:
            self._held -= count
            if seconds is not None:
                self._seconds += 0.1 * (seconds - self._seconds)
            waiting, self._when_empty = (self._when_empty, []) if self._held == 0 else ([], self._when_empty)
        for callback in waiting:
            callback()

    async def empty(self, seconds: float) -> bool:
        """True as soon as nothing is held; False where something still is after that time."""
        loop, empty = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if self._held == 0:
                return True
            self._when_empty.append(lambda: loop.call_soon_threadsafe(empty.set))
        try:
            async with asyncio.timeout(seconds):
                await empty.wait()
        except TimeoutError:
            return False
        return True


class Intake:
    """What a loaded model takes. Any number of threads may call `prepare` at once."""

    def __init__(self, tokenization: Tokenization, ready: Ready) -> None:
        self.tokenization = tokenization
        self._context = ready.max_model_len
        self._capacity = ready.num_blocks * ready.block_size
        self._vocab_size = ready.vocab_size
        self._ids = itertools.count(1)

    def prepare(self, request: GenerationRequest, arrival: float) -> list[Prepared]:
        """All sequences of a request, prompt by prompt, choice by choice. Costs CPU time: not for an event loop.

        Raises InvalidRequest, ContextLengthExceeded or CacheTooSmall; then nothing has been queued.
        """
        params = request.params
        params.check_vocabulary(self._vocab_size)
        bad_words = self.tokenization.bad_word_ids(params.bad_words)
        prepared: list[Prepared] = []
        for i, prompt in enumerate(request.prompts):
            name = request.prompt_name(i)
            token_ids = self._token_ids(prompt, params, name)
            keep = params.truncate_prompt_tokens
            truncated = keep is not None and keep < len(token_ids)
            if truncated:
                token_ids = token_ids[-(keep or 0) :]
            max_tokens = self._max_tokens(len(token_ids), params, name)
            origin: Sequence | None = None
            for _ in range(params.n):
                sequence = Sequence(
                    seq_id=next(self._ids),
                    token_ids=list(token_ids),
                    num_prompt_tokens=len(token_ids),
                    params=params,
                    seed=_seed(params, len(prepared)),
                    max_tokens=max_tokens,
                    arrival=arrival,
                    request_id=request.request_id,
                    deadline=arrival + params.timeout if params.timeout is not None else math.inf,
                    forked_from=origin,
                    bad_word_ids=bad_words,
                )
                origin = origin or sequence
                prepared.append(Prepared(sequence, IncrementalDecoder(self.tokenization, token_ids, params), truncated))
        return prepared

    def tokens(self, text: str, *, add_special_tokens: bool, name: str = "prompt") -> list[int]:
        """Raises InvalidRequest for a text without a UTF-8 form."""
        check_encodable(name, text)
        return self.tokenization.encode(text, add_special_tokens=add_special_tokens)

    def text(self, token_ids: Many[int], *, skip_special_tokens: bool) -> str:
        self._check_ids(token_ids, "tokens")
        return self.tokenization.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _token_ids(self, prompt: str | tuple[int, ...], params: SamplingParams, name: str) -> list[int]:
        if isinstance(prompt, str):
            if params.truncate_prompt_tokens is None:
                self._refuse_unread(prompt, params, name)
            token_ids = self.tokens(prompt, add_special_tokens=params.add_special_tokens, name=name)
        else:
            self._check_ids(prompt, name)
            token_ids = list(prompt)
        if not token_ids:
            raise InvalidRequest(name, f"{name} has no tokens, and this model has no token to start from")
        return token_ids

    def _refuse_unread(self, prompt: str, params: SamplingParams, name: str) -> None:
        """A text far beyond any possible length isn't worth tokenizing."""
        fewest = self.tokenization.fewest_tokens(prompt)
        if fewest >= self._context:
            raise ContextLengthExceeded(fewest, params.max_tokens or 1, self._context, param=name, counted=False)

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams, name: str) -> int:
        wanted = params.max_tokens
        least = 1 if wanted is None else wanted
        if prompt_tokens + least > self._context:
            raise ContextLengthExceeded(prompt_tokens, least, self._context, param=name)
        if prompt_tokens + least > self._capacity:
            raise CacheTooSmall(prompt_tokens, least, self._capacity, param=name)
        return min(self._context, self._capacity) - prompt_tokens if wanted is None else wanted

    def _check_ids(self, token_ids: Many[int], name: str) -> None:
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(f"{name}[{i}]", f"{name}[{i}] is {token_id}; the vocabulary has {self._vocab_size} tokens")


def _seed(params: SamplingParams, i: int) -> int:
    return secrets.randbelow(SEED_LIMIT) if params.seed is None else (params.seed + i) % SEED_LIMIT
