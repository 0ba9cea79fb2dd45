"""Streams as clients read them: framing, headers, keep-alive, failure, departure."""

import asyncio
import json
from dataclasses import replace

import pytest

from llm.delivery import Delta
from llm.exceptions import DeadlineExceeded, Draining, EngineDead, SequenceFailed
from settings import HttpConfig
from streaming import frame
from tests.unit.conftest import HTTP
from tests.unit.engine_for_tests import ScriptedEngine
from tests.unit.http_for_tests import Client

ASKED = {"prompt": "one two"}


def events(body: bytes) -> list[tuple[str, dict[str, object]]]:
    """By the SSE grammar; fails on anything but events and comments."""
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        lines = block.split("\n")
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else "message"
        [line] = lines
        found.append((name, json.loads(line.removeprefix("data: "))))
    return found


async def test_a_stream_is_the_seeds_frames_and_nothing_else(client: Client) -> None:
    answer = await client.post("/generate_stream", ASKED)
    assert answer.status == 200
    apart = [
        b'data: {"token": " one", "sequence_id": "sequence-0"}\n\n',
        b'data: {"token": " two", "sequence_id": "sequence-0"}\n\n',
    ]
    merged = b'data: {"token": " one two", "sequence_id": "sequence-0"}\n\n'
    assert answer.body in {b"".join(apart), merged}


async def test_proxies_are_told_not_to_hold_it_back(client: Client) -> None:
    headers = (await client.post("/generate_stream", ASKED)).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers
    assert headers["x-request-id"]


@pytest.mark.parametrize("path_and_field", [("/basic_generate", "generated_text")])
@pytest.mark.parametrize("full", [False, True])
async def test_the_stream_joined_is_the_text(client: Client, path_and_field: tuple[str, str], full: bool) -> None:
    path, field = path_and_field
    asked = {**ASKED, "return_full_text": full}
    whole = (await client.post(path, asked)).json[field]
    streamed = events((await client.post("/generate_stream", asked)).body)
    assert "".join(str(data["token"]) for _, data in streamed) == whole
    assert whole == ("one two one two" if full else " one two")


async def test_text_like_line_ends_stays_in_its_frame(client: Client, engine: ScriptedEngine) -> None:
    engine.hold = True
    text = "a\nb\r\nc\u2028d\u2029e\u0085f\u000bg\u000ch\u001ci\u001dj\u001ek 🫠"
    async with client.open("/generate_stream", ASKED) as connection:
        await engine.taken.wait()
        engine.running[0].finish(text)
    body = b"".join(connection.pieces)
    assert events(body)[0][1]["token"] == text
    assert [line for line in body.decode().splitlines() if line] == [line for line in body.decode().split("\n") if line]
    assert "🫠".encode() in body


async def test_details_come_last_and_only_when_asked(client: Client) -> None:
    asked = {**ASKED, "details": True, "logprobs": 1, "prompt_logprobs": 0, "truncate_prompt_tokens": 5}
    streamed = events((await client.post("/generate_stream", asked)).body)
    assert [name for name, _ in streamed[:-1]] == ["message"] * (len(streamed) - 1)
    name, detail = streamed[-1]
    assert name == "done"
    assert detail == (await client.post("/basic_generate", asked)).json["details"][0]
    assert detail["finish_reason"] == "length"
    assert detail["truncated"] is False
    assert detail["logprobs"] == [{"token_id": 1, "logprob": -0.5, "top": [{"token_id": 1, "logprob": -0.5}]}] * 2
    assert detail["prompt_logprobs"] == [None, {"token_id": 5, "logprob": -1.5, "top": []}]


async def test_minus_infinity_is_written_as_a_number(client: Client, engine: ScriptedEngine) -> None:
    engine.hold = True
    async with client.open("/generate_stream", {**ASKED, "details": True, "logprobs": 2}) as connection:
        await engine.taken.wait()
        engine.running[0].finish("a")
    [*_, (_, detail)] = events(b"".join(connection.pieces))
    assert "-9999" in json.dumps(detail["logprobs"])
    assert "Infinity" not in json.dumps(detail)


async def test_empty_pieces_are_not_sent(client: Client, engine: ScriptedEngine) -> None:
    engine.hold = True
    async with client.open("/generate_stream", ASKED) as connection:
        await engine.taken.wait()
        engine.running[0].send(Delta("", [1]))
        engine.running[0].finish()
    assert b"".join(connection.pieces) == b""
    assert connection.status == 200


async def test_the_first_event_leaves_with_the_first_token(client: Client, engine: ScriptedEngine) -> None:
    engine.hold = True
    async with client.open("/generate_stream", ASKED) as connection:
        await engine.taken.wait()
        assert connection.status is None
        engine.running[0].send(Delta("a", [1]))
        assert b'"a"' in await connection.piece()
        engine.running[0].finish()


async def test_a_failure_before_the_first_token_is_a_status(client: Client, engine: ScriptedEngine) -> None:
    engine.hold = True
    async with client.open("/generate_stream", ASKED) as connection:
        await engine.taken.wait()
        engine.running[0].fail(DeadlineExceeded(0.3))
    assert connection.status == 408
    assert connection.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineDead("too often"), "engine_dead"), (Draining(), "draining"), (SequenceFailed(), "internal_error")],
)
async def test_a_failure_later_is_an_error_event_and_no_end(
    client: Client, engine: ScriptedEngine, error: EngineDead, code: str
) -> None:
    engine.hold = True
    async with client.open("/generate_stream", {**ASKED, "details": True}, {"x-request-id": "mine"}) as connection:
        await engine.taken.wait()
        engine.running[0].send(Delta("a", [1]))
        await connection.piece()
        engine.running[0].fail(error)
    [(name, data)] = events(b"".join(connection.pieces))
    told = data["error"]
    assert isinstance(told, dict)
    assert (name, told["code"], told["request_id"]) == ("error", code, "mine")


class TestWaiting:
    @pytest.fixture
    def http(self) -> HttpConfig:
        return replace(HTTP, keep_alive_seconds=0.05)

    async def test_a_waiting_stream_gets_comments_and_no_event(self, client: Client, engine: ScriptedEngine) -> None:
        engine.hold = True
        async with client.open("/generate_stream", ASKED) as connection:
            for _ in range(2):
                comment = await connection.piece()
                assert comment.startswith(b":")
                assert comment.endswith(b"\n\n")
            engine.running[0].finish("a")
        assert [data["token"] for _, data in events(b"".join(connection.pieces))] == ["a"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/generate_stream", ASKED), ("/basic_generate", ASKED), ("/generate", {"prompts": ["a", "b"]})],
)
async def test_a_client_that_leaves_frees_its_sequences(
    client: Client, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture, path: str, asked: dict[str, object]
) -> None:
    engine.hold = True
    caplog.set_level("INFO")
    async with client.open(path, asked) as connection:
        await engine.taken.wait()
        assert not engine.aborted.is_set()
        connection.leave()
    assert engine.aborted.is_set()
    [line] = [record for record in caplog.records if record.name == "quartet.access"]
    assert vars(line)["status"] == 499


async def test_a_client_that_leaves_amid_a_stream_frees_it_too(
    client: Client, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.hold = True
    caplog.set_level("INFO")
    async with client.open("/generate_stream", ASKED) as connection:
        await engine.taken.wait()
        engine.running[0].send(Delta("a", [1]))
        await connection.piece()
        connection.leave()
    assert engine.aborted.is_set()
    [line] = [record for record in caplog.records if record.name == "quartet.access"]
    assert vars(line)["status"] == 499


async def test_the_first_failure_of_several_ends_the_others(client: Client, engine: ScriptedEngine) -> None:
    engine.hold = True
    async with client.open("/generate", {"prompts": ["a", "b", "c"]}) as connection:
        await engine.taken.wait()
        engine.running[1].fail(SequenceFailed())
    assert connection.status == 500
    assert engine.aborted.is_set()


async def test_no_task_is_left_behind(client: Client) -> None:
    before = asyncio.all_tasks()
    await client.post("/generate_stream", ASKED)
    await client.post("/generate", {"prompts": ["a", "b"]})
    assert asyncio.all_tasks() == before


async def test_answers_keep_the_order_asked(client: Client, engine: ScriptedEngine) -> None:
    engine.hold = True
    async with client.open("/generate", {"prompts": ["a", "b", "c"], "return_full_text": True}) as connection:
        await engine.taken.wait()
        for i in (2, 0, 1):
            engine.running[i].finish(str(i))
    assert json.loads(b"".join(connection.pieces)) == {"generated_texts": ["a0", "b1", "c2"]}


async def test_no_prompts_no_texts_no_engine(client: Client, engine: ScriptedEngine) -> None:
    for path in ("/generate", "/generate_vllm"):
        assert (await client.post(path, {"prompts": []})).json == {"generated_texts": []}
    assert engine.requests == []


async def test_the_services_own_model_answers_to_its_name(client: Client) -> None:
    assert (await client.post("/basic_generate", {**ASKED, "model": "Scripted-1M"})).status == 200
    other = await client.post("/generate_stream", {**ASKED, "model": "gpt"})
    assert (other.status, other.error["code"], other.error["param"]) == (404, "model_not_found", "model")


async def test_vllm_is_refused_where_it_is_not(client: Client) -> None:
    answer = await client.post("/generate_vllm", {"prompts": ["a"]})
    assert (answer.status, answer.error["code"]) == (503, "vllm_unavailable")


async def test_tokens_there_and_back(client: Client) -> None:
    there = (await client.post("/tokenize", {"prompt": "hé"})).json
    assert there == {"tokens": [1, 104, 195, 169], "count": 4, "max_model_len": 2048}
    assert (await client.post("/tokenize", {"prompt": "hé", "add_special_tokens": False})).json["count"] == 3
    assert (await client.post("/detokenize", {"tokens": there["tokens"]})).json == {"prompt": "hé"}


async def test_version_says_what_serves(client: Client) -> None:
    told = (await client.get("/version")).json
    assert (told["model"], told["torch"], told["attention_backend"]) == ("Scripted-1M", "2.14.0", "torch")
    assert (told["device"], told["dtype"], told["batch_invariant"]) == ("cpu", "float32", True)


def test_a_frame_refuses_what_json_can_not_say() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        frame({"token": float("nan")})
