"""What the native routes take and refuse, field by field."""

import json
from typing import Any

import pytest
from fastapi import FastAPI

from dtos import PromptRequest, PromptsRequest, Sampling
from llm.exceptions import InvalidRequest
from llm.sequence import PARAMETER_NAMES, SamplingParams
from tests.unit.engine_for_tests import ScriptedEngine
from tests.unit.http_for_tests import Client

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "timeout",
)
INTEGERS = (
    "max_tokens",
    "min_tokens",
    "top_k",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "n",
    "priority",
    "truncate_prompt_tokens",
)


def asked(**fields: Any) -> PromptRequest:
    return PromptRequest.model_validate({"prompt": "x", **fields})


@pytest.mark.parametrize("field", NUMBERS)
async def test_a_number_that_is_none_is_refused_by_name_in_strict_json(client: Client, field: str) -> None:
    for written in ("NaN", "Infinity", "-Infinity", "1e999", '"nan"', "true", "[]"):
        answer = await client.post("/basic_generate", f'{{"prompt": "hi", "{field}": {written}}}'.encode())
        assert (answer.status, answer.error["code"], answer.error["param"]) == (422, "invalid_request", field), written


@pytest.mark.parametrize("field", INTEGERS)
async def test_an_integer_is_an_integer(client: Client, field: str) -> None:
    for written in ("1.0", "true", '"1"', "NaN", "10" * 30, "1e3"):
        answer = await client.post("/basic_generate", f'{{"prompt": "hi", "{field}": {written}}}'.encode())
        assert (answer.status, answer.error["param"]) == (422, field), written


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stop", "", "stop[0]"),
        ("stop", ["x", ""], "stop[1]"),
        ("stop", [1], "stop[0]"),
        ("stop", ["x"] * 10_000, "stop"),
        ("stop", "x" * 1_000_000, "stop[0]"),
        ("stop", {"a": 1}, "stop"),
        ("stop_token_ids", [-1], "stop_token_ids[0]"),
        ("stop_token_ids", [True], "stop_token_ids[0]"),
        ("stop_token_ids", list(range(1000)), "stop_token_ids"),
        ("bad_words", ["a", ""], "bad_words[1]"),
        ("bad_words", ["a"] * 100_000, "bad_words"),
        ("logit_bias", {str(i): 1 for i in range(100_000)}, "logit_bias"),
        ("logit_bias", {"5": 101}, "logit_bias[5]"),
        ("logit_bias", {"5": -101}, "logit_bias[5]"),
        ("logit_bias", {"5": None}, "logit_bias[5]"),
        ("logit_bias", {"5": True}, "logit_bias[5]"),
        ("logit_bias", {"-1": 1}, "logit_bias[-1]"),
        ("logit_bias", {"1.5": 1}, "logit_bias[1.5]"),
        ("logit_bias", {"05": 1}, "logit_bias[05]"),
        ("logit_bias", {"abc": 1}, "logit_bias[abc]"),
        ("logit_bias", {"": 1}, "logit_bias[]"),
        ("logit_bias", [1], "logit_bias"),
        ("n", 2, "n"),
        ("n", 1_000_000, "n"),
        ("best_of", 2, "best_of"),
        ("temprature", 0.2, "temprature"),
        ("max_tokens", 10**12, "max_tokens"),
        ("max_tokens", 0, "max_tokens"),
        ("temperature", 999999, "temperature"),
        ("top_p", 1.0001, "top_p"),
        ("top_p", -0.1, "top_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("prompt_logprobs", -1, "prompt_logprobs"),
        ("logprobs", 21, "logprobs"),
        ("seed", -1, "seed"),
        ("seed", 2**63, "seed"),
        ("prompt", None, "prompt"),
        ("prompt", ["a"], "prompt"),
        ("prompt", "\ud83d", "prompt"),
        ("stop", ["\ude42"], "stop[0]"),
        ("bad_words", ["\ude42"], "bad_words[0]"),
        ("model", "\ud83d", "model"),
        ("model", "m" * 1000, "model"),
        ("details", 1, "details"),
    ],
)
async def test_what_is_wrong_is_named_before_anything_is_queued(
    client: Client, engine: ScriptedEngine, field: str, value: Any, param: str
) -> None:
    for path in ("/basic_generate", "/generate_stream"):
        answer = await client.post(path, {"prompt": "hi", field: value})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (422, "invalid_request", param)
        assert answer.headers["content-type"] == "application/json"
        assert len(answer.body) < 4000
    assert engine.requests == []


async def test_min_tokens_beyond_max_tokens_is_refused(client: Client) -> None:
    answer = await client.post("/basic_generate", {"prompt": "hi", "min_tokens": 9, "max_tokens": 8})
    assert (answer.status, answer.error["param"]) == (422, "min_tokens")


@pytest.mark.parametrize("prompts", [None, "a", [1], ["a", None], ["a", ["b"]], ["a", "\ud83d"], ["x"] * 9, ["x"] * 100_000])
async def test_prompts_are_a_bounded_list_of_texts(client: Client, engine: ScriptedEngine, prompts: Any) -> None:
    answer = await client.post("/generate", {"prompts": prompts})
    assert answer.status == 422
    assert answer.error["param"].startswith("prompts")
    assert engine.requests == []


async def test_null_is_as_if_absent(client: Client, engine: ScriptedEngine) -> None:
    fields = dict.fromkeys(Sampling.model_fields)
    answer = await client.post("/basic_generate", {"prompt": "hi", **fields})
    assert answer.status == 200
    assert engine.requests[0].params == SamplingParams()


EFFECTS: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": 2**63 - 1,
    "stop": ["a", "b"],
    "stop_token_ids": [4, 5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "add_special_tokens": False,
    "logit_bias": {"5": -100, "6": 1.5},
    "bad_words": ["no"],
    "logprobs": 0,
    "prompt_logprobs": 3,
    "n": 1,
    "priority": -3,
    "truncate_prompt_tokens": 64,
    "timeout": 1.5,
}


def test_every_parameter_reaches_the_engine_or_is_no_parameter() -> None:
    assert set(EFFECTS) == PARAMETER_NAMES
    params = asked(**EFFECTS).sampling_params(None)
    for name, value in EFFECTS.items():
        got = getattr(params, name)
        assert (dict(got) if name == "logit_bias" else list(got) if isinstance(got, tuple) else got) == (
            {int(key): bias for key, bias in value.items()} if name == "logit_bias" else value
        )


def test_a_stop_may_be_one_text_and_no_stop_is_none() -> None:
    assert asked(stop="ab").sampling_params(None).stop == ("ab",)
    assert asked(stop=[]).sampling_params(None).stop == ()


def test_the_servers_ceiling_is_every_requests_timeout() -> None:
    assert asked().sampling_params(30.0).timeout == 30.0
    assert asked(timeout=5.0).sampling_params(30.0).timeout == 5.0
    with pytest.raises(InvalidRequest, match="at most 30 s") as refused:
        asked(timeout=31.0).sampling_params(30.0)
    assert refused.value.param == "timeout"


def _bounds() -> list[tuple[str, float, float]]:
    """Of every number: name, a value at a bound, one just beyond it."""
    found: list[tuple[str, float, float]] = []
    for name, schema in PromptRequest.model_json_schema()["properties"].items():
        number = next((part for part in schema.get("anyOf", []) if part["type"] in ("number", "integer")), None)
        if number is None or name == "n":
            continue
        step = 1 if number["type"] == "integer" else 1e-6
        if "minimum" in number:
            found.append((name, number["minimum"], number["minimum"] - step))
        if "exclusiveMinimum" in number:
            found.append((name, number["exclusiveMinimum"] + step, number["exclusiveMinimum"]))
        found.append((name, number["maximum"], number["maximum"] + step))
    return found


@pytest.mark.parametrize(("name", "inside", "outside"), _bounds())
def test_the_bounds_in_the_description_are_those_of_the_parameters(name: str, inside: float, outside: float) -> None:
    others = {"max_tokens": None} if name == "min_tokens" else {}
    SamplingParams(**{name: inside, **others})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: outside, **others})  # type: ignore[arg-type]
    assert refused.value.param == name


def test_fields_and_limits_are_in_the_description(app: FastAPI) -> None:
    description = app.openapi()
    for model in (PromptRequest, PromptsRequest):
        schema = description["components"]["schemas"][model.__name__]
        assert schema["additionalProperties"] is False
        assert schema["examples"]
        for name in set(PARAMETER_NAMES) | {"model", "details", "return_full_text"}:
            assert schema["properties"][name]["description"], name
    text = json.dumps(description)
    assert '"maxItems": 64' in text
    assert '"maxProperties": 1024' in text
    assert '"maxLength": 1024' in text


async def test_every_route_is_described_with_its_own_refusals(client: Client) -> None:
    description = (await client.get("/openapi.json")).json
    assert set(description["paths"]) == {
        "/basic_generate",
        "/generate",
        "/generate_stream",
        "/generate_vllm",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/version",
        "/metrics",
        "/predict",
        "/predict/image",
        "/models",
        "/models/reload",
        "/models/{model}",
        "/models/{model}/load",
        "/models/{model}/unload",
        "/models/{model}/pin",
    }
    assert "HTTPValidationError" not in description["components"]["schemas"]
    refusal = description["paths"]["/generate_stream"]["post"]["responses"]["422"]["content"]["application/json"]
    assert refusal["schema"]["$ref"].endswith("/ErrorBody")
    assert "text/event-stream" in description["paths"]["/generate_stream"]["post"]["responses"]["200"]["content"]
    assert (await client.get("/docs")).status == 200


async def test_the_examples_in_the_description_work(client: Client, app: FastAPI) -> None:
    schemas = app.openapi()["components"]["schemas"]
    for path, name in (("/basic_generate", "PromptRequest"), ("/generate", "PromptsRequest"), ("/tokenize", "TokenizeRequest")):
        for example in schemas[name]["examples"]:
            assert (await client.post(path, example)).status == 200
