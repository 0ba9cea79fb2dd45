"""What holds for every test: marks by folder, hypothesis without chance, and nothing left behind."""

import os
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.leftovers import MARK, Leftovers

_GPU = Path(__file__).parent / "gpu"
_LEFTOVERS = pytest.StashKey[Leftovers]()

hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = str(uuid.uuid4())
    config.stash[_LEFTOVERS] = Leftovers(os.environ[MARK])
    config.pluginmanager.register(WiderFixtures(config.stash[_LEFTOVERS]))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_GPU):
            item.add_marker(pytest.mark.gpu)


class WiderFixtures:
    """A plugin by itself: a conftest's hooks don't see fixtures of the session's scope."""

    def __init__(self, leftovers: Leftovers) -> None:
        self._leftovers = leftovers

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if not _is_wider(fixturedef):
            return (yield)
        with self._leftovers.wider_setup():
            return (yield)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if _is_wider(fixturedef) and fixturedef.cached_result is not None:
            self._leftovers.wider_teardown()


def _is_wider(fixturedef: pytest.FixtureDef[Any]) -> bool:
    """A fixture of ours, not a plugin's, that outlives a test."""
    return bool(fixturedef.baseid) and fixturedef.scope != "function" and fixturedef.argname != "nothing_left_at_the_end"


@pytest.fixture(scope="session", autouse=True)
def nothing_left_at_the_end(pytestconfig: pytest.Config) -> Iterator[None]:
    yield
    assert pytestconfig.stash[_LEFTOVERS].of_session() == []


@pytest.fixture(autouse=True)
def nothing_left_behind(pytestconfig: pytest.Config, nothing_left_at_the_end: None) -> Iterator[None]:
    yield
    assert pytestconfig.stash[_LEFTOVERS].of_test() == []
