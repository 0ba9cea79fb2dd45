"""Everything that crosses the process boundary: small frozen dataclasses, in both directions.

Engine -> worker: WorkerSpec (once, at start), StepRequest, Shutdown.
Worker -> engine: Progress (while loading), Ready or LoadFailed, then a StepResult for each StepRequest, or WorkerFailure.

A sequence's tokens and parameters are sent once, when it is admitted; then only what changed. The worker appends the
tokens that it samples itself, so they need no way back. Each message carries the worker's generation: what a dead
worker left behind is dropped.
"""

from dataclasses import dataclass
from typing import Any

from llm.sequence import SamplingParams

LEAST_LOGPROB = -9999.0  # stands for anything below, minus infinity included: JSON has no infinities


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the first load measured on this machine. A restarted worker gets it and measures nothing again; the next start
    finds it in the model cache."""

    attention_backend: str
    row_tiles: tuple[int, ...]  # matrix products are cut into these numbers of rows; empty: as they come
    thread_counts: tuple[int, ...]  # of threads that a step may use, the largest first
    batch_invariant: bool  # rows were bit-equal alone and in a crowd
    difference: float  # norm of the logits' difference from the model's plain forward, over their norm
    tolerance: float


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    generation: int
    folder: str  # a checkpoint in the Hugging Face layout, prepared by the model manager
    num_tokens: int  # ids that the tokenizer knows; the model's logits may have more rows
    dtype: str  # "float32", "bfloat16", "float16"
    device: str  # "cpu", "cuda", "cuda:1"
    threads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None  # None: the model's own
    kv_cache_bytes: int | None  # None: the smaller of max_num_seqs contexts and kv_cache_limit
    kv_cache_limit: int
    batch_invariant: bool
    probe: ProbeReport | None  # None: first load, measure
    probe_records: str | None  # a folder for what is measured; None: it isn't kept


@dataclass(frozen=True, slots=True)
class Progress:
    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    generation: int
    pid: int
    num_blocks: int  # usable ones, numbered 1 .. num_blocks; block 0 takes the padding's writes
    block_size: int  # tokens
    kv_cache_bytes: int
    max_model_len: int
    vocab_size: int  # rows of the logits that are tokens
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    threads: int
    architecture: str
    probe: ProbeReport
    torch_version: str
    transformers_version: str
    seconds: float  # from the start of the process


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model can't be served; trying again won't help."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the worker doesn't know (any more): everything about it."""

    seq_id: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache
    block_table: tuple[int, ...]
    params: SamplingParams
    seed: int
    bad_word_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Compute the next `num_tokens` known tokens; sample when that reaches the last one."""

    seq_id: int
    num_tokens: int
    new_blocks: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[type["SequenceStep"], tuple[Any, ...]]:
        """There is one for each sequence in each step: this takes a third of the time that dataclasses take to be pickled."""
        return SequenceStep, (self.seq_id, self.num_tokens, self.new_blocks)


@dataclass(frozen=True, slots=True)
class StepRequest:
    generation: int
    step: int
    new: tuple[NewSequence, ...]
    scheduled: tuple[SequenceStep, ...]
    forget: tuple[int, ...]  # sequences that finished, left or were preempted


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of the raw logits' log-softmax. `top`: the most likely tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one scheduled sequence got out of a step. A chunk that doesn't reach the last known token samples nothing."""

    seq_id: int
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of prompt tokens computed in this step; the first token has none
    error: str | None = None  # this row alone failed

    def __reduce__(self) -> tuple[type["RowResult"], tuple[Any, ...]]:
        """As for SequenceStep."""
        return RowResult, (self.seq_id, self.token_id, self.logprob, self.prompt_logprobs, self.error)


@dataclass(frozen=True, slots=True)
class StepResult:
    generation: int
    step: int
    rows: tuple[RowResult, ...]  # in the order scheduled
    seconds: float  # forward and sampling


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """The step raised; the worker ends itself after this."""

    generation: int
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    generation: int


ToWorker = StepRequest | Shutdown
FromWorker = Progress | Ready | LoadFailed | StepResult | WorkerFailure
