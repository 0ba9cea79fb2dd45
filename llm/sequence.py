"""One sequence: what was asked of it (`SamplingParams`) and how far it has come (`Sequence`)."""

import enum
import math
from dataclasses import dataclass, field, fields
from typing import Any

from llm.exceptions import InvalidRequest

SEED_LIMIT = 2**63
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a caller may ask of one sequence. Validates itself; every range is stated once, here.

    The order in which a step applies them is fixed, whatever else is in the batch: logit_bias and bans, min_tokens,
    penalties, temperature, top_k, top_p, min_p, typical_p, then the draw (`llm/sampler.py`).

    Raises InvalidRequest naming the parameter. Text is checked for what can't be encoded (lone surrogates).
    """

    max_tokens: int | None = 50  # None: as many as the context and the cache hold
    min_tokens: int = 0
    temperature: float = 0.0  # 0 is greedy and ignores the filters
    top_p: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 and -1 are off
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output only
    frequency_penalty: float = 0.0  # over the output only
    seed: int | None = None  # None: drawn when the sequence is made
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None  # alternatives beside each chosen token
    prompt_logprobs: int | None = None
    n: int = 1
    priority: int = 0  # smaller goes first
    truncate_prompt_tokens: int | None = None  # keep this many from the right
    timeout: float | None = None  # seconds from arrival

    def __post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            _check_integer(name, getattr(self, name), low, high)
        for name, lowest, highest, open_low in _NUMBERS:
            _check_number(name, getattr(self, name), lowest, highest, open_low)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens", f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
            )
        _check_texts("stop", self.stop, MAX_STOPS)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        if len(self.stop_token_ids) > MAX_STOPS:
            raise InvalidRequest(
                "stop_token_ids", f"stop_token_ids has {len(self.stop_token_ids)} entries, at most {MAX_STOPS}"
            )
        for i, token in enumerate(self.stop_token_ids):
            _check_integer(f"stop_token_ids[{i}]", token, 0, None)
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest("logit_bias", f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_BIASES}")
        for token, bias in self.logit_bias:
            _check_integer(f"logit_bias[{token}]", token, 0, None)
            _check_number(f"logit_bias[{token}]", bias, -100.0, 100.0, False)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest for a token id that the model can't emit."""
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                raise InvalidRequest(
                    f"logit_bias[{token}]", f"logit_bias names token {token}; the vocabulary has {vocab_size} tokens"
                )
        for i, token in enumerate(self.stop_token_ids):
            if token >= vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids[{i}]", f"stop_token_ids names token {token}; the vocabulary has {vocab_size} tokens"
                )


MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 256
MAX_BIASES = 1024
MAX_CHOICES = 128

# name, smallest, largest (None: no bound)
_INTEGERS: tuple[tuple[str, int | None, int | None], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("top_k", -1, 2**31 - 1),
    ("seed", 0, SEED_LIMIT - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_CHOICES),
    ("priority", -(2**31), 2**31 - 1),
    ("truncate_prompt_tokens", 1, 2**31 - 1),
)
# name, smallest, largest, whether the smallest itself is refused
_NUMBERS: tuple[tuple[str, float | None, float | None, bool], ...] = (
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, False),
    ("typical_p", 0.0, 1.0, True),
    ("repetition_penalty", 0.0, 100.0, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("timeout", 0.0, 86400.0, True),
)
_OPTIONAL = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "timeout"})


def _check_integer(name: str, value: Any, low: int | None, high: int | None) -> None:
    if value is None and name in _OPTIONAL:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, f"{name} must be an integer")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidRequest(name, f"{name} must be {_range(low, high)}")


def _check_number(name: str, value: Any, low: float | None, high: float | None, open_low: bool) -> None:
    if value is None and name in _OPTIONAL:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(name, f"{name} must be a finite number")
    too_low = low is not None and (value <= low if open_low else value < low)
    if too_low or (high is not None and value > high):
        raise InvalidRequest(name, f"{name} must be {_range(low, high, open_low)}")


def _range(low: float | None, high: float | None, open_low: bool = False) -> str:
    bounds = [f"{'more than' if open_low else 'at least'} {low:g}"] if low is not None else []
    if high is not None:
        bounds.append(f"at most {high:g}")
    return " and ".join(bounds)


def _check_texts(name: str, texts: tuple[str, ...], most: int) -> None:
    if len(texts) > most:
        raise InvalidRequest(name, f"{name} has {len(texts)} entries, at most {most}")
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"{name}[{i}]", f"{name}[{i}] must be a string that is not empty")
        if len(text) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"{name}[{i}]", f"{name}[{i}] has {len(text)} characters, at most {MAX_STOP_CHARACTERS}")
        check_encodable(f"{name}[{i}]", text)


def check_encodable(name: str, text: str) -> None:
    """Raises InvalidRequest for half a surrogate pair: such a text has no UTF-8 form."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise InvalidRequest(name, f"{name} holds half of a surrogate pair, which is no character")


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"
    ABORT = "abort"  # the caller left
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens (prompt and output), and how many of them have their keys and values in the cache.

    `num_computed_tokens` is at most `len(token_ids)`; a step makes them catch up. A chunked prefill, a prefix hit, a
    preemption and a dead worker are all the same: fewer are computed now.
    """

    seq_id: int
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_tokens: int  # params.max_tokens, made definite
    arrival: float  # monotonic seconds
    request_id: str = ""  # for the logs
    deadline: float = math.inf
    forked_from: "Sequence | None" = None  # wait for its prompt, then share its blocks
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # prefix hit at first admission
    num_preemptions: int = 0
    deaths: int = 0  # workers that died with it in the batch, none of which got past `death_point`
    death_point: int = 0  # computed tokens that would clear it
    first_scheduled: float | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def prompt_computed(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def order(self) -> tuple[int, float, int]:
        """Smaller runs first and is preempted last."""
        return (self.params.priority, self.arrival, self.seq_id)


PARAMETER_NAMES = frozenset(f.name for f in fields(SamplingParams))
