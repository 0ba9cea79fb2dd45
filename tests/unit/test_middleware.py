"""Around every request: its id, its log line, its metrics, and the bound on its body."""

import asyncio
import json
import logging
import uuid
from dataclasses import replace

import pytest
from fastapi import FastAPI

from bodies import MAX_CONTAINERS, MAX_VALUES, parse_json
from settings import HttpConfig
from tests.unit.conftest import HTTP
from tests.unit.engine_for_tests import ScriptedEngine
from tests.unit.http_for_tests import JSON, Client, Connection

PATH = "/basic_generate"


@pytest.mark.parametrize("sent", ["abc-123", "x" * 128, "!~"])
async def test_a_sane_id_comes_back(client: Client, sent: str) -> None:
    for path in ("/health", "/nowhere", "/generate"):
        assert (await client.get(path, {"x-request-id": sent})).headers["x-request-id"] == sent
    assert (await client.post("/generate_stream", {"prompt": "a"}, {"x-request-id": sent})).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 129, "a b", "a\tb", "é", "a\x7f"])
async def test_another_is_replaced(client: Client, sent: str) -> None:
    got = (await client.get("/health", {"x-request-id": sent})).headers["x-request-id"]
    assert uuid.UUID(got)


async def test_the_id_reaches_the_engine_and_its_requests_log(
    client: Client, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await asyncio.gather(*(client.post(PATH, {"prompt": "a"}, {"x-request-id": f"id-{i}"}) for i in range(5)))
    assert {request.request_id for request in engine.requests} == {f"id-{i}" for i in range(5)}


async def test_one_line_for_each_request_without_its_text(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await client.post(PATH, {"prompt": "a secret"})
    await client.post(PATH, {"prompt": "a secret", "top_p": 3})
    await client.get("/health")
    lines = [vars(record) for record in caplog.records if record.name == "quartet.access"]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [("POST", PATH, 200), ("POST", PATH, 422)]
    assert all(line["duration_ms"] >= 0 for line in lines)
    assert "secret" not in caplog.text


class TestLoggedPrompts:
    @pytest.fixture
    def http(self) -> HttpConfig:
        return replace(HTTP, log_prompts=True)

    async def test_prompts_are_logged_where_that_is_set(self, client: Client, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        await client.post(PATH, {"prompt": "a secret"})
        assert "a secret" in caplog.text


async def test_requests_are_counted_by_route_not_by_path(client: Client) -> None:
    await client.post(PATH, {"prompt": "a"})
    await client.post(PATH, {"prompt": 1})
    for i in range(20):
        await client.get(f"/nowhere/{i}")
    text = (await client.get("/metrics")).body.decode()
    assert f'quartet_http_requests_total{{method="POST",route="{PATH}",status="200"}} 1.0' in text
    assert f'quartet_http_requests_total{{method="POST",route="{PATH}",status="422"}} 1.0' in text
    assert 'quartet_http_requests_total{method="GET",route="unknown",status="404"} 20.0' in text
    assert "nowhere" not in text
    assert "quartet_http_requests_in_flight 1.0" in text  # this one


class TestBodyLimit:
    @pytest.fixture
    def http(self) -> HttpConfig:
        return replace(HTTP, max_body_bytes=1000)

    async def test_a_length_beyond_it_is_refused_unread(self, app: FastAPI) -> None:
        connection = Connection(app, "POST", PATH, [b"x"] * 5, {**JSON, "content-length": "10737418240"})
        answer = await connection.run()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert answer.headers["connection"] == "close"
        assert len(connection.unread) == 5

    async def test_a_body_without_length_is_counted_while_it_comes(self, app: FastAPI) -> None:
        connection = Connection(app, "POST", PATH, [b"x" * 400] * 50, {**JSON, "transfer-encoding": "chunked"})
        answer = await connection.run()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert len(connection.unread) == 47

    async def test_at_the_limit_it_is_read(self, app: FastAPI, client: Client) -> None:
        body = b'{"prompt": "a"}'.ljust(1000)
        assert (await client.post(PATH, body)).status == 200
        assert (await client.post(PATH, body + b" ")).status == 413
        halves = Connection(app, "POST", PATH, [body[:7], body[7:]], {**JSON, "transfer-encoding": "chunked"})
        assert (await halves.run()).status == 200

    async def test_a_client_that_leaves_while_sending_is_let_go(
        self, app: FastAPI, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        connection = Connection(app, "POST", PATH, [], {**JSON, "content-length": "100"})
        async with connection:
            connection.leave()
        assert connection.status is None
        assert engine.requests == []
        assert [vars(record)["status"] for record in caplog.records if record.name == "quartet.access"] == [499]


async def test_a_body_that_stops_coming_is_not_waited_for(app: FastAPI, engine: ScriptedEngine) -> None:
    app.user_middleware[1].kwargs["patience"] = 0.05
    answer = await Connection(app, "POST", PATH, [], {**JSON, "content-length": "100"}).run()
    assert (answer.status, answer.error["code"]) == (422, "invalid_request")
    assert engine.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"prompt": "a"} x',
        b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b"[" * 200_000,
        b'{"prompt": "a", "seed": ' + b"1" * 1_000_000 + b"}",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}',
        b"null",
        b"[]",
        b'"text"',
        b"NaN",
        b'"' + b'\\"' * 1_000_000,
    ],
    ids=lambda body: repr(body[:20]),
)
async def test_a_body_that_is_no_request_is_refused_and_never_a_500(app: FastAPI, engine: ScriptedEngine, body: bytes) -> None:
    answer = await Client(app).post(PATH, body)
    assert (answer.status, answer.error["code"]) == (422, "invalid_request")
    assert engine.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * MAX_CONTAINERS + b"[]]",
        b"[" + b"1," * (MAX_VALUES + 1) + b"1]",
        b"[" + b'"",' * (MAX_VALUES + 1) + b"1]",
    ],
    ids=["containers", "values", "texts"],
)
def test_a_body_of_absurd_shape_is_refused_before_it_is_read(body: bytes) -> None:
    with pytest.raises(json.JSONDecodeError, match="more than"):
        parse_json(body)


async def test_brackets_and_commas_in_a_text_are_text(client: Client, engine: ScriptedEngine) -> None:
    text = '[{"a":1},{"b":[2,3]}]' * 50_000
    assert (await client.post(PATH, {"prompt": text})).status == 200
    assert engine.requests[0].prompts == (text,)


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/vnd.api+json"])
async def test_json_is_taken_by_any_of_its_names(client: Client, kind: str) -> None:
    assert (await client.post(PATH, {"prompt": "a"}, {"content-type": kind})).status == 200


async def test_what_says_it_is_no_json_is_refused_with_the_remedy(client: Client) -> None:
    answer = await client.post(PATH, {"prompt": "a"}, {"content-type": "application/x-www-form-urlencoded"})
    assert (answer.status, answer.error["param"]) == (422, "content-type")
    assert "application/json" in answer.error["message"]


async def test_a_valid_surrogate_pair_is_a_character(client: Client, engine: ScriptedEngine) -> None:
    assert (await client.post(PATH, b'{"prompt": "\\ud83d\\ude42"}')).status == 200
    assert engine.requests[0].prompts == ("🙂",)


async def test_probes_may_use_head(app: FastAPI) -> None:
    for path in ("/health", "/ready"):
        assert (await Connection(app, "HEAD", path).run()).status == 200
