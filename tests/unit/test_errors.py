"""Every error has its status, its code and a body that can always be sent."""

import logging
from collections.abc import Iterator

import pytest
from fastapi import FastAPI

import errors
from llm import exceptions as domain
from llm.engine_state import EngineStatus
from tests.unit.engine_for_tests import ScriptedEngine
from tests.unit.http_for_tests import Client

# API.md's table: what it says, beside each class.
ROWS: dict[type[domain.QuartetError], tuple[domain.QuartetError, int, str]] = {
    domain.ClientError: (domain.ClientError("the body is bad"), 422, "invalid_request"),
    domain.InvalidRequest: (domain.InvalidRequest("seed", "seed is bad"), 422, "invalid_request"),
    domain.ContextLengthExceeded: (domain.ContextLengthExceeded(90, 20, 100), 400, "context_length_exceeded"),
    domain.CacheTooSmall: (domain.CacheTooSmall(90, 20, 100), 400, "context_length_exceeded"),
    domain.ModelNotFound: (domain.ModelNotFound("x", ["y"]), 404, "model_not_found"),
    domain.DeadlineExceeded: (domain.DeadlineExceeded(0.5), 408, "timeout"),
    domain.QueueFull: (domain.QueueFull(3, 1, 2), 429, "queue_full"),
    domain.RequestTooLarge: (domain.RequestTooLarge(10), 413, "request_too_large"),
    domain.ServerError: (domain.ServerError("secret"), 500, "internal_error"),
    domain.Loading: (domain.Loading("reading the weights"), 503, "loading"),
    domain.Draining: (domain.Draining(), 503, "draining"),
    domain.EngineDead: (domain.EngineDead("it died too often"), 503, "engine_dead"),
    domain.VllmUnavailable: (domain.VllmUnavailable("no GPU"), 503, "vllm_unavailable"),
    domain.ModelUnavailable: (domain.ModelUnavailable("spam", "it broke", retry_after=2), 503, "model_unavailable"),
    domain.SequenceFailed: (domain.SequenceFailed(), 500, "internal_error"),
    domain.ModelRefused: (domain.ModelRefused("secret"), 500, "internal_error"),
    domain.WorkerDied: (domain.WorkerDied("secret"), 500, "internal_error"),
}


def _subclasses(kind: type[domain.QuartetError]) -> Iterator[type[domain.QuartetError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def test_every_error_of_the_tree_has_a_row() -> None:
    assert set(_subclasses(domain.QuartetError)) == set(ROWS)


@pytest.mark.parametrize("kind", list(ROWS), ids=lambda kind: kind.__name__)
async def test_a_refusal_is_a_status_and_one_body_whatever_the_route(
    client: Client, engine: ScriptedEngine, kind: type[domain.QuartetError]
) -> None:
    error, status, code = ROWS[kind]
    engine.refusal = error
    for path, body in (
        ("/basic_generate", {"prompt": "a"}),
        ("/generate", {"prompts": ["a"]}),
        ("/generate_stream", {"prompt": "a"}),
    ):
        answer = await client.post(path, body, {"x-request-id": "id-1"})
        assert answer.status == status
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"] == "id-1"
        assert set(answer.error) == {"code", "message", "param", "request_id"}
        assert (answer.error["code"], answer.error["param"], answer.error["request_id"]) == (code, error.param, "id-1")
        assert answer.error["message"]
        assert "secret" not in answer.body.decode()


@pytest.mark.parametrize("error", [domain.QueueFull(3, 1, 2), domain.Loading("x"), domain.Draining()])
async def test_where_waiting_helps_the_answer_says_how_long(
    client: Client, engine: ScriptedEngine, error: domain.QuartetError
) -> None:
    engine.refusal = error
    answer = await client.post("/generate_stream", {"prompt": "a"})
    assert int(answer.headers["retry-after"]) >= 1


async def test_numbers_of_a_refusal_reach_the_client(client: Client, engine: ScriptedEngine) -> None:
    engine.refusal = domain.ContextLengthExceeded(2090, 20, 2048, param="prompts[1]")
    answer = await client.post("/generate", {"prompts": ["a", "b"]})
    assert answer.error["param"] == "prompts[1]"
    for number in ("2090", "20", "2048"):
        assert number in answer.error["message"]


async def test_a_bug_is_a_500_without_internals_and_with_the_log(
    client: Client, app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    @app.get("/bug")
    async def bug() -> None:
        raise KeyError("secret")

    with caplog.at_level(logging.ERROR):
        answer = await client.get("/bug")
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert answer.error["request_id"] == answer.headers["x-request-id"]
    assert "secret" not in answer.body.decode()
    assert "secret" in caplog.text


async def test_unknown_paths_and_methods_have_the_same_body(client: Client) -> None:
    missing = await client.get("/nowhere")
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    wrong = await client.get("/generate")
    assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")


async def test_an_error_quotes_little_and_only_what_can_be_sent(client: Client) -> None:
    long = await client.post("/basic_generate", {"prompt": "a", "x" * 100_000: 1})
    assert (long.status, len(long.body) < 4000) == (422, True)
    odd = await client.post("/basic_generate", b'{"prompt": "a", "\\ud83d": 1}')
    assert odd.status == 422
    odd = await client.post("/basic_generate", b'{"prompt": "a", "logit_bias": {"\\ud83d": 1}}')
    assert (odd.status, odd.error["param"].startswith("logit_bias")) == (422, True)
    odd = await client.post("/basic_generate", b'{"\\ud83d": 1, "\\ud83d": 2}')
    assert odd.status == 422


@pytest.mark.parametrize(
    ("status", "health", "ready"),
    [
        (EngineStatus.LOADING, 200, 503),
        (EngineStatus.READY, 200, 200),
        (EngineStatus.RECOVERING, 200, 503),
        (EngineStatus.DRAINING, 200, 503),
        (EngineStatus.DEAD, 500, 503),
    ],
)
async def test_health_and_readiness_tell_the_truth(
    client: Client, engine: ScriptedEngine, status: EngineStatus, health: int, ready: int
) -> None:
    engine.become(status, "the reason why")
    alive = await client.get("/health")
    assert (alive.status, alive.json["status"]) == (health, status.value)
    assert alive.json["reason"] == "the reason why"
    able = await client.get("/ready")
    assert able.status == ready
    if status in (EngineStatus.LOADING, EngineStatus.RECOVERING, EngineStatus.DEAD):
        assert "the reason why" in able.error["message"]


def test_what_the_domain_does_not_know_is_an_internal_error() -> None:
    assert errors.status_of(RuntimeError("secret")) == 500
    assert "secret" not in str(errors.body_of(RuntimeError("secret")))
