"""Requests and responses of the native routes, and the only translation of a request into `SamplingParams`.

Read strictly: an unknown field, a boolean for a number, 1.0 for an integer, NaN or half a surrogate pair is refused by
name. null is as if the field were absent.
"""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from llm import sequence as limits
from llm.delivery import Completion
from llm.exceptions import InvalidRequest
from llm.messages import LEAST_LOGPROB, TokenLogprob
from llm.sequence import PARAMETER_NAMES, SamplingParams
from llm.submission import Generation

MAX_PROMPTS = 4096  # what the setting --max-prompts can reach
MAX_TOKEN_IDS = 1_048_576
_INT32 = 2**31 - 1
_TOKEN_ID = re.compile(r"-?(0|[1-9][0-9]{0,11})")


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    return text


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_encodable)]
ShortText = Annotated[Text, Field(min_length=1, max_length=limits.MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=_INT32)]
_SHORT_TEXT_SCHEMA = {"type": "string", "minLength": 1, "maxLength": limits.MAX_STOP_CHARACTERS}
Stops = Annotated[
    list[ShortText],
    Field(max_length=limits.MAX_STOPS),
    BeforeValidator(_listed),
    WithJsonSchema(
        {"anyOf": [_SHORT_TEXT_SCHEMA, {"type": "array", "items": _SHORT_TEXT_SCHEMA, "maxItems": limits.MAX_STOPS}]}
    ),
]


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Sampling(StrictModel):
    """What every generating route takes beside its prompt. The ranges are those of `SamplingParams`, shown here for the
    API's description; a test holds the two together."""

    model: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="A model's id or name; absent: the service's own"
    )
    details: bool | None = Field(None, description="Tell beside each text how it came about. Default false")
    return_full_text: bool | None = Field(None, description="Put the prompt before the generated text. Default false")
    max_tokens: int | None = Field(None, ge=1, le=_INT32, description="Tokens to generate at most. Default 50")
    min_tokens: int | None = Field(None, ge=0, le=_INT32, description="No end before this many tokens. Default 0")
    temperature: float | None = Field(None, ge=0, le=100, description="0, the default, is greedy and ignores the filters")
    top_p: float | None = Field(
        None, ge=0, le=1, description="Smallest set of tokens of this probability; 0 is greedy. Default 1"
    )
    top_k: int | None = Field(None, ge=-1, le=_INT32, description="The k most likely tokens; 0, the default, and -1: all")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Tokens at least this likely, relative to the likeliest. Default 0"
    )
    typical_p: float | None = Field(None, gt=0, le=1, description="Locally typical sampling's mass. Default 1: off")
    repetition_penalty: float | None = Field(None, gt=0, le=100, description="Over prompt and output; 1, the default, is none")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Over the output, once per token. Default 0")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Over the output, per occurrence. Default 0")
    seed: int | None = Field(
        None,
        ge=0,
        le=limits.SEED_LIMIT - 1,
        description="Repeats an answer; prompt i draws with seed + i. Absent: drawn, and told in `details`",
    )
    stop: Stops | None = Field(None, description="Generation ends before any of these texts")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MAX_STOPS)] | None = Field(
        None, description="Generation ends at any of these tokens"
    )
    include_stop_str_in_output: bool | None = Field(None, description="Keep what ended the text. Default false")
    ignore_eos: bool | None = Field(None, description="Go on past the model's end token. Default false")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default true")
    add_special_tokens: bool | None = Field(None, description="Begin the prompt as the tokenizer does, with BOS. Default true")
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=limits.MAX_BIASES)] | None = (
        Field(None, description="Token id, as a string, to what is added to its logit", examples=[{"42": -100}])
    )
    bad_words: Annotated[list[ShortText], Field(max_length=limits.MAX_BAD_WORDS)] | None = Field(
        None, description="Texts that are never generated"
    )
    logprobs: int | None = Field(
        None, ge=0, le=limits.MAX_LOGPROBS, description="Alternatives told beside each token, in `details`"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=limits.MAX_LOGPROBS, description="The same of the prompt's tokens, in `details`"
    )
    n: int | None = Field(None, ge=1, le=1, description="Only 1 here: one text for each prompt")
    priority: int | None = Field(None, ge=-_INT32 - 1, le=_INT32, description="Smaller goes first. Default 0")
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, le=_INT32, description="Keep this many of the prompt's tokens, from its end; `details` says if it was cut"
    )
    timeout: float | None = Field(
        None, gt=0, le=86400, description="Seconds until the request is given up. Absent: the server's own ceiling, if any"
    )

    def sampling_params(self, timeout_ceiling: float | None) -> SamplingParams:
        """timeout_ceiling: seconds, the server's own. Raises InvalidRequest naming the field."""
        given: dict[str, Any] = {
            name: value for name in PARAMETER_NAMES if (value := getattr(self, name)) is not None and name != "logit_bias"
        }
        given.update((name, tuple(value)) for name, value in given.items() if isinstance(value, list))
        if self.logit_bias is not None:
            given["logit_bias"] = tuple((_token_id(key), bias) for key, bias in self.logit_bias.items())
        if timeout_ceiling is not None and given.setdefault("timeout", timeout_ceiling) > timeout_ceiling:
            raise InvalidRequest("timeout", f"timeout must be at most {timeout_ceiling:g} s on this server")
        return SamplingParams(**given)


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        name = f"logit_bias[{key[:40]}]"
        raise InvalidRequest(name, f"{name} must be a token id, written as a whole number")
    return int(key)


class PromptRequest(Sampling):
    """One prompt, one text."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "The capital of France is", "max_tokens": 20},
                {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.8, "top_p": 0.95, "seed": 7, "details": True},
            ]
        }
    )
    prompt: Text = Field(description="The text to go on from")


class PromptsRequest(Sampling):
    """Several prompts, as many texts."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompts": ["The capital of France is", "2 + 2 ="], "max_tokens": 20}]}
    )
    prompts: Annotated[list[Text], Field(max_length=MAX_PROMPTS)] = Field(description="Answered in this order")


class TokenizeRequest(StrictModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "The capital of France is"}]})
    prompt: Text
    add_special_tokens: bool | None = Field(None, description="Begin as the tokenizer does, with BOS. Default true")


class DetokenizeRequest(StrictModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2030, 17]}]})
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)]
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default true")


class Logprob(BaseModel):
    token_id: int
    logprob: float = Field(description="Of the log-softmax of the model's raw logits; -9999 for minus infinity")


class ChosenLogprob(Logprob):
    top: list[Logprob] = Field(description="The likeliest tokens there, best first")


class Detail(BaseModel):
    """How one text came about. The last three are there only when asked for."""

    finish_reason: str = Field(description="`stop`, or `length` when max_tokens was reached")
    stop_reason: str | int | None = Field(description="The stop string or stop token that ended it")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = Field(description="Prompt tokens found in the prefix cache")
    seed: int = Field(description="Repeats this text")
    truncated: bool | None = Field(None, description="With truncate_prompt_tokens: whether the prompt was cut")
    logprobs: list[ChosenLogprob] | None = Field(None, description="One entry per generated token")
    prompt_logprobs: list[ChosenLogprob | None] | None = Field(None, description="One entry per prompt token, the first null")


class GeneratedText(BaseModel):
    generated_text: str = Field(examples=[" Paris."])
    details: list[Detail] | None = Field(None, description="With `details: true`: one entry")


class GeneratedTexts(BaseModel):
    generated_texts: list[str] = Field(examples=[[" Paris.", " 4"]])
    details: list[Detail] | None = Field(None, description="With `details: true`: one entry per text")


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class Prompt(BaseModel):
    prompt: str


def detail_of(generation: Generation, params: SamplingParams) -> dict[str, Any]:
    """`Detail` as a plain dictionary. The generation is complete."""
    completion = generation.completion
    if completion is None:
        raise ValueError("the generation has not ended")
    detail: dict[str, Any] = {
        "finish_reason": completion.finish_reason.value,
        "stop_reason": completion.stop_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "cached_tokens": completion.cached_tokens,
        "seed": completion.seed,
    }
    if params.truncate_prompt_tokens is not None:
        detail["truncated"] = completion.truncated
    if params.logprobs is not None:
        detail["logprobs"] = [_logprob(entry) for entry in generation.logprobs]
    if params.prompt_logprobs is not None:
        detail["prompt_logprobs"] = _prompt_logprobs(completion)
    return detail


def _prompt_logprobs(completion: Completion) -> list[dict[str, Any] | None]:
    return [None, *(_logprob(entry) for entry in completion.prompt_logprobs or ())]


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": max(value, LEAST_LOGPROB)} for token, value in entry.top]
    return {"token_id": entry.token_id, "logprob": max(entry.logprob, LEAST_LOGPROB), "top": top}
