"""The app around a scripted engine."""

import pytest
from fastapi import FastAPI

from app import create_app
from containers import Services
from llm.exceptions import VllmUnavailable
from llm.forkserver import Forkserver
from metrics import ServiceMetrics
from multi_model.service import Models
from settings import HttpConfig, parse
from tests.unit.engine_for_tests import ScriptedEngine
from tests.unit.http_for_tests import Client

HTTP = HttpConfig(
    host="127.0.0.1",
    port=0,
    model_alias=None,
    max_connections=4,
    max_body_bytes=1 << 22,
    max_prompts=8,
    request_timeout=None,
    keep_alive_seconds=15.0,
    drain_seconds=30.0,
    log_prompts=False,
)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def http() -> HttpConfig:
    return HTTP


@pytest.fixture
def vllm() -> ScriptedEngine:
    return ScriptedEngine(refusal=VllmUnavailable("there is no GPU"))


@pytest.fixture
def services(engine: ScriptedEngine, vllm: ScriptedEngine, http: HttpConfig) -> Services:
    forkserver = Forkserver()
    chosen = parse([])
    models = Models(chosen.models(), chosen.engine(), engine, forkserver, lambda: None)  # type: ignore[arg-type]
    models.read_catalogue()
    return Services(http=http, metrics=ServiceMetrics(), engine=engine, vllm=vllm, models=models, forkserver=forkserver)


@pytest.fixture
def app(services: Services) -> FastAPI:
    return create_app(services)


@pytest.fixture
def client(app: FastAPI) -> Client:
    return Client(app)
