"""Checkpoints for tests with a real model: tiny random ones, and the embedded default."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from llm.model_manager import prepare
from tests.integration.engines import FORKSERVER
from tests.integration.tiny_models import causal_lm

TinyModel = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other spinning, where the cores are shared, take 8 ms for an operation of 30 us."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """name -> folder, made at the first call"""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = causal_lm(name, tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def default_model() -> Path:
    return prepare(None, Path(__file__).parents[2] / "model_cache", lambda _: None)


@pytest.fixture(scope="session", autouse=True)
def forkserver_ends() -> Iterator[None]:
    """Engines share it, as in the service."""
    yield
    FORKSERVER.close()
