"""Faults of other servers, put to ours: stops, sampling, prompts and bad input, over HTTP."""

import json
import random
from typing import Any

import pytest

from tests.e2e.server_for_tests import Json, Server, joined

GREEDY: Json = {"max_tokens": 40, "ignore_eos": True}


def ids(server: Server, text: str) -> list[int]:
    tokens: list[int] = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return tokens


def refusal(server: Server, body: Json | bytes, path: str = "/basic_generate") -> tuple[int, str, str | None]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.client.post(path, content=content, headers={"content-type": "application/json"})
    error = json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} in an answer"))["error"]
    assert error["request_id"] == answer.headers["x-request-id"]
    return answer.status_code, error["code"], error["param"]


def test_text_is_what_decoding_in_context_gives(server: Server) -> None:
    for text in ("\n", "    ", " a"):
        token = ids(server, text)[0]
        body: Json = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "logit_bias": {str(token): 100}}
        piece = server.post("/detokenize", {"tokens": [token]}).json()["prompt"]
        assert server.text(**body) == piece * 5
        with server.stream(**body) as events:
            assert joined(events) == piece * 5
        assert server.text(return_full_text=True, **body) == "x" + piece * 5


def test_what_looks_like_a_line_end_does_not_break_the_frame(server: Server) -> None:
    for character in ("\n", "\r", "\u2028", "\u2029", "\u0085", "\u000b"):
        bias = {str(token): 100 for token in ids(server, character)}
        body: Json = {"prompt": "x", "max_tokens": 6, "ignore_eos": True, "temperature": 1, "seed": 3, "logit_bias": bias}
        raw = server.client.post("/generate_stream", json=body)
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert raw.headers["x-accel-buffering"] == "no"
        assert raw.headers["cache-control"] == "no-cache"
        by_grammar = [line for line in raw.content.decode().split("\n") if line.startswith("data: ")]
        by_python = [line for line in raw.content.decode().splitlines() if line.startswith("data: ")]
        assert by_grammar == by_python
        assert "".join(json.loads(line[6:])["token"] for line in by_grammar) == server.text(**body)


def test_a_stop_string_ends_the_text_wherever_it_falls(server: Server) -> None:
    text = server.text("The quick", **GREEDY)
    rng = random.Random(1)  # noqa: S311
    for _ in range(50):
        at = rng.randrange(len(text) - 2)
        stop = text[at : at + rng.randrange(2, 25)]
        expected = text[: text.index(stop)]
        answer = server.post("/generate", {"prompts": ["The quick"], "stop": [stop], "details": True, **GREEDY}).json()
        assert answer["generated_texts"] == [expected]
        details = answer["details"][0]
        assert (details["finish_reason"], details["stop_reason"]) == ("stop", stop)
        with server.stream("The quick", stop=stop, **GREEDY) as events:
            assert joined(events) == expected


def test_the_stop_that_completes_first_wins_in_any_order(server: Server) -> None:
    text = server.text("The quick", **GREEDY)
    late, early, long = text[30:34], text[10:14], text[8:20]
    for stops in ([late, early], [early, late], [late, early, long], [long, early]):
        firsts = {stop: text.index(stop) + len(stop) for stop in stops}
        winner = min(firsts, key=lambda stop: (firsts[stop], -len(stop)))
        assert server.text("The quick", stop=stops, **GREEDY) == text[: text.index(winner)]


def test_seeds(server: Server) -> None:
    body: Json = {"prompt": "The colour of", "max_tokens": 24, "temperature": 1.2}
    alone = server.text(seed=7, **body)
    many = server.post("/generate", {"prompts": ["The colour of"] * 4, "seed": 7, "max_tokens": 24, "temperature": 1.2}).json()
    assert many["generated_texts"][0] == alone
    assert len(set(many["generated_texts"])) > 1
    assert many["generated_texts"][1] == server.text(seed=8, **body)
    assert server.text(seed=2**63 - 1, **body) == server.text(seed=2**63 - 1, **body)
    for bad in (-1, 2**64, 1.5, True):
        assert refusal(server, body | {"seed": bad}) == (422, "invalid_request", "seed")


def test_penalties_count_what_they_say(server: Server) -> None:
    token = ids(server, "q")[0]
    body: Json = {"prompt": "q" * 60, "max_tokens": 1, "ignore_eos": True, "logit_bias": {str(token): 100}}
    assert server.text(frequency_penalty=2, presence_penalty=2, **body) == "q"
    first = ids(server, server.text("x", max_tokens=1, ignore_eos=True))[0]
    banned = server.text("x", max_tokens=50, ignore_eos=True, logit_bias={str(first): -100})
    assert first not in ids(server, banned) or server.post("/detokenize", {"tokens": [first]}).json()["prompt"] not in banned


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"', "true"])
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "timeout"],
)
def test_no_number_but_a_finite_one(server: Server, name: str, value: str) -> None:
    status, code, param = refusal(server, f'{{"prompt": "hi", "{name}": {value}}}'.encode())
    assert (status, code) == (422, "invalid_request")
    assert param in {name, None} if value in {"NaN", "Infinity", "-Infinity"} else param == name


@pytest.mark.parametrize("key", ["999999999", "-1", "320", "1.5", "abc", ""])
def test_a_bias_for_no_token(server: Server, key: str) -> None:
    status, code, param = refusal(server, {"prompt": "x", "logit_bias": {key: 5}})
    assert (status, code) == (422, "invalid_request")
    assert param is not None
    assert param.startswith("logit_bias")


def test_edges_of_the_filters(server: Server) -> None:
    body: Json = {"prompt": "The quick", "max_tokens": 12}
    greedy = server.text(**body)
    one: list[Json] = [{"top_p": 0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1}]
    for parameters in one:
        assert server.text(temperature=1, seed=1, **body, **parameters) == greedy
    all_of_them: list[Json] = [{"top_k": 0}, {"top_k": -1}, {"top_k": 10**9}, {"top_p": 1}]
    for parameters in all_of_them:
        assert server.text(temperature=1, seed=1, **body, **parameters) == server.text(temperature=1, seed=1, **body)
    for name, bad in (("top_p", 1.0001), ("top_p", -0.1)):
        assert refusal(server, {"prompt": "x", name: bad}) == (422, "invalid_request", name)


def test_empty_prompts(server: Server) -> None:
    assert refusal(server, {"prompt": ""}) == (422, "invalid_request", "prompt")
    assert refusal(server, {"prompt": ""}, "/generate_stream") == (422, "invalid_request", "prompt")
    assert refusal(server, {"prompts": ["a", ""]}, "/generate") == (422, "invalid_request", "prompts[1]")
    assert server.post("/generate", {"prompts": []}).json() == {"generated_texts": []}
    assert server.text(" ", max_tokens=1) is not None


def test_too_long_is_refused_and_never_cut(server: Server) -> None:
    prompt = "0 1 2 3 " * 600
    for path, body in (("/basic_generate", {"prompt": prompt}), ("/generate_stream", {"prompt": prompt})):
        assert refusal(server, body, path) == (400, "context_length_exceeded", "prompt")
    assert refusal(server, {"prompts": ["a", prompt]}, "/generate") == (400, "context_length_exceeded", "prompts[1]")
    near = "q" * 1014
    assert len(ids(server, near)) == 1014
    assert refusal(server, {"prompt": near, "max_tokens": 11}) == (400, "context_length_exceeded", "prompt")
    assert server.text(near, max_tokens=10) is not None
    cut: Json = {"prompts": [prompt], "truncate_prompt_tokens": 64, "max_tokens": 2, "details": True}
    details = server.post("/generate", cut).json()["details"][0]
    assert (details["prompt_tokens"], details["truncated"]) == (64, True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "\\ud83d"}', "prompt"),
        (b'{"prompt": "a", "stop": "\\ud83d"}', "stop"),
        (b'{"prompt": "a", "model": "\\ude42"}', "model"),
        (b'{"prompt": "\xff"}', None),
        (b"[" * 200_000, None),
        (b'{"prompt": "a", "max_tokens": ' + b"1" * 1_000_000 + b"}", None),
        (b"", None),
        (b"[]", None),
        (b'{"prompt": 1}', "prompt"),
        (b'{"prompt": "a", "temprature": 0.2}', "temprature"),
        (b'{"prompt": "a", "n": 2}', "n"),
        (b'{"prompt": "a", "best_of": 2}', "best_of"),
        (b'{"prompt": "a", "stop": ""}', "stop"),
        (b'{"prompt": "a", "stop": ["x", ""]}', "stop[1]"),
        (b'{"prompt": "a", "stop": [1]}', "stop[0]"),
        (b'{"prompt": "a", "stop_token_ids": [-1]}', "stop_token_ids[0]"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 1000000000000}', "max_tokens"),
        (b'{"prompt": "a", "logprobs": 100000}', "logprobs"),
        (b'{"prompt": "a", "prompt_logprobs": -1}', "prompt_logprobs"),
        (b'{"prompt": "a", "repetition_penalty": 0}', "repetition_penalty"),
        (b'{"prompt": "a", "min_tokens": 60}', "min_tokens"),
    ],
)
def test_bad_input_is_named(server: Server, body: bytes, param: str | None) -> None:
    status, code, named = refusal(server, body)
    assert (status, code) == (422, "invalid_request")
    assert named is not None or param is None
    if param is not None and named is not None:
        assert named.split("[")[0] == param.split("[")[0]


def test_nulls_are_absent_and_a_valid_pair_is_a_character(server: Server) -> None:
    nulls: dict[str, Any] = dict.fromkeys(("seed", "stop", "logprobs", "timeout", "truncate_prompt_tokens", "model"))
    assert server.text("a", max_tokens=4, **nulls) == server.text("a", max_tokens=4)
    raw = server.client.post(
        "/basic_generate",
        content=b'{"prompt": "\\ud83d\\ude42", "max_tokens": 2}',
        headers={"content-type": "application/json"},
    )
    assert raw.status_code == 200


def test_an_unknown_model_is_not_found(server: Server) -> None:
    assert refusal(server, {"prompt": "a", "model": "other"}) == (404, "model_not_found", "model")
