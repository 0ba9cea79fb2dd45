"""What crosses to the process that runs vLLM and back, and how our sampling parameters become vLLM's.

Engine -> vLLM: VllmSpec (once, at start), then VllmRequest and VllmAbort.
vLLM -> engine: Ready or LoadFailed, then VllmTokens and VllmFailed.
"""

from dataclasses import dataclass
from typing import Any

from llm.exceptions import InvalidRequest
from llm.messages import TokenLogprob
from llm.sequence import FinishReason, SamplingParams, Sequence

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # vLLM raises what is lower in silence, and refuses what is higher

# Of SamplingParams, what vLLM is not told: the parameter has its effect before or after vLLM.
OURS = frozenset(
    {
        "n",  # a sequence each, with a seed of its own
        "timeout",
        "truncate_prompt_tokens",
        "add_special_tokens",
        "stop",  # our decoder makes the text, as it does for our own engine
        "include_stop_str_in_output",
        "skip_special_tokens",
        "priority",  # goes beside the parameters
        "typical_p",  # refused
    }
)


@dataclass(frozen=True, slots=True)
class VllmSpec:
    folder: str  # absolute
    dtype: str
    max_model_len: int | None  # None: the model's own
    max_num_seqs: int
    gpu_memory_fraction: float
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class VllmRequest:
    seq_id: int
    token_ids: tuple[int, ...]
    parameters: dict[str, Any]  # keywords of vllm.SamplingParams
    priority: int


@dataclass(frozen=True, slots=True)
class VllmAbort:
    seq_id: int


@dataclass(frozen=True, slots=True)
class VllmTokens:
    """What is new of one sequence."""

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    finish: FinishReason | None
    stop_token: int | None  # the one of stop_token_ids that ended it


@dataclass(frozen=True, slots=True)
class VllmFailed:
    seq_id: int
    reason: str


def check_supported(params: SamplingParams) -> None:
    """Raises InvalidRequest for what vLLM can't do, or would do otherwise than asked."""
    if params.typical_p != 1:
        raise InvalidRequest("typical_p", "typical_p is not supported by vLLM")
    if not params.greedy and not LOWEST_TEMPERATURE <= params.temperature <= HIGHEST_TEMPERATURE:
        raise InvalidRequest(
            "temperature", f"vLLM takes a temperature of 0, or from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
        )


def vllm_parameters(sequence: Sequence) -> dict[str, Any]:
    """Keywords of vllm.SamplingParams; the one place that maps them."""
    params = sequence.params
    drawn = {} if params.greedy else {"top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p}
    return {
        "temperature": 0.0 if params.greedy else params.temperature,
        **drawn,
        "max_tokens": sequence.max_tokens,
        "min_tokens": params.min_tokens,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": sequence.seed,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logit_bias": dict(params.logit_bias) or None,
        "bad_words": list(params.bad_words),
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "detokenize": False,
    }
