"""One tiny model and one server on it, for all tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server_for_tests import Server, serving
from tests.integration.tiny_models import causal_lm


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_lm("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def shared_server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny, tmp_path_factory.mktemp("server"), "--dtype", "float32", "--max-queue", "600") as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared one; each test must leave it alive: same answer, nothing running, no block held, the same worker."""
    pid = shared_server.health()["worker_pid"]
    before = shared_server.text("alive", max_tokens=12)
    yield shared_server
    shared_server.wait_idle()
    assert shared_server.text("alive", max_tokens=12) == before
    assert shared_server.health()["worker_pid"] == pid
