"""Models that come and go in one memory budget: real classifiers in real processes."""

import asyncio
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from llm.exceptions import Draining, InvalidRequest, ModelUnavailable
from llm.llm import LLMEngine
from llm.observer import NullObserver
from llm.sequence import SamplingParams
from llm.submission import GenerationRequest
from multi_model.engine import Surroundings, build_worker, estimated_bytes
from multi_model.manager import ModelManager
from multi_model.messages import TextInput
from multi_model.residency import Limits, ModelState
from multi_model.store import Catalogue, Entry
from multi_model.workers.process import ProcessConfig, ProcessWorker
from tests.integration.engines import FORKSERVER, config, no_logs
from tests.integration.tiny_models import causal_lm, text_classifier

NAMES = ("a", "b", "c")
MIB = 1 << 20


def entry(name: str, **fields: object) -> Entry:
    return Entry.model_validate(
        {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, name)),
            "name": name,
            "type": "text-classification",
            "framework": "transformers",
            **fields,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint for each name, of another answer each."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES):
        text_classifier(folder / name, seed=seed)
    return folder


@pytest.fixture(autouse=True)
def same_handles() -> Iterator[None]:
    """Whatever a test does, no handle is left; the forkserver's own are there before."""
    FORKSERVER.begin()
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # the forkserver's, where this was its first use


@asynccontextmanager
async def managing(folder: Path, *entries: Entry, budget: int = 1 << 40, **limits: object) -> AsyncIterator[ModelManager]:
    processes = ProcessConfig(FORKSERVER, no_logs, lambda: 1, load_timeout=60.0, batch_timeout=20.0)
    surroundings = Surroundings(
        processes,
        lambda source, dtype: LLMEngine(config(Path(source), dtype=dtype), NullObserver(), FORKSERVER, set_up_logging=no_logs),
        device="cpu",
        catalogue_folder=folder,
        model_cache=folder,
        kv_cache_bytes=16 * MIB,
        max_pixels=1,
    )
    manager = ModelManager(
        Limits(budget, **limits),  # type: ignore[arg-type]
        build=lambda entry: build_worker(entry, surroundings),
        estimate=lambda entry: estimated_bytes(entry, surroundings),
        overhead=lambda: 0,
    )
    manager.use(Catalogue(entries))
    try:
        yield manager
    finally:
        await manager.close()
        assert not [child for child in psutil.Process().children(recursive=True) if child.pid in _pids(manager)]


def _pids(manager: ModelManager) -> list[int]:
    workers = [slot.worker for slot in manager._slots.values() if isinstance(slot.worker, ProcessWorker)]
    return [replica.pid for worker in workers for replica in worker._replicas if replica.pid is not None]


async def ask(manager: ModelManager, entry: Entry, text: str = "hello", seconds: float = 30.0) -> list[float]:
    answer, _ = await manager.predict(entry, TextInput((text,), False, False), seconds)
    return [round(probability, 4) for probability in answer.probabilities[0]]


async def until(holds: Callable[[], object]) -> None:
    """What has no event to wait for: the end of an unload."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_two_of_three_stay_the_least_recently_used_goes_and_hits_refresh(folder: Path) -> None:
    a, b, c = entries = [entry(name) for name in NAMES]
    async with managing(folder, *entries, max_models=2) as manager:
        first = [await ask(manager, one) for one in entries]
        assert len({round(row[0], 4) for row in first}) == 3
        assert manager.loaded() == [b.id, c.id]
        assert await ask(manager, b) == first[1]  # a hit
        assert manager.loaded() == [c.id, b.id]
        assert await ask(manager, a) == first[0]
        assert manager.loaded() == [b.id, a.id]
        assert [manager.status(one).loads for one in entries] == [2, 1, 1]
        assert [manager.status(one).evictions for one in entries] == [1, 0, 1]


async def test_many_ask_for_a_cold_model_and_it_is_loaded_once(folder: Path) -> None:
    a, b = entry("a"), entry("b")
    async with managing(folder, a, b) as manager:
        leaver = asyncio.create_task(ask(manager, a))
        asking = [asyncio.create_task(ask(manager, one)) for one in [a, b] * 8]
        await asyncio.sleep(0)
        leaver.cancel()
        rows = await asyncio.gather(*asking)
        assert rows == [rows[0], rows[1]] * 8
        assert rows[0] == await ask(manager, a)
        assert [manager.status(one).loads for one in (a, b)] == [1, 1]


async def test_alternating_requests_over_a_budget_for_one_are_all_answered(folder: Path) -> None:
    a, b = entry("a"), entry("b")
    async with managing(folder, a, b, max_models=1, patience=0.2) as manager:
        expected = {one.id: await ask(manager, one) for one in (a, b)}

        async def client(i: int) -> None:
            for j in range(5):
                one = (a, b)[(i + j) % 2]
                assert await ask(manager, one) == expected[one.id]

        await asyncio.gather(*(client(i) for i in range(8)))
        assert sum(manager.status(one).loads for one in (a, b)) < 40


async def test_a_model_in_use_is_waited_for_and_at_its_deadline_the_request_is_refused(folder: Path) -> None:
    a, b = entry("a"), entry("b")
    async with managing(folder, a, b, max_models=1, patience=0.1) as manager:
        async with manager.lease(a, 30):
            with pytest.raises(ModelUnavailable, match="there was no room for it in time"):
                await ask(manager, b, seconds=0.3)
            assert manager.status(a).state is ModelState.READY
            waiting = asyncio.create_task(ask(manager, b))
            await asyncio.sleep(0.3)
            assert not waiting.done()
        await waiting
        assert manager.loaded() == [b.id]


async def test_what_can_not_be_loaded_harms_nobody_else(folder: Path, tmp_path: Path) -> None:
    broken = text_classifier(tmp_path / "broken")
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    bad = entry("bad", source=str(broken))
    absent = entry("absent", source="package:no_such_package")
    big = entry("big", source=str(folder / "b"), memory=4096 * MIB)
    good = entry("a")
    async with managing(folder, bad, absent, big, good, budget=1024 * MIB, max_models=1, cool_down=0.5) as manager:
        before = await ask(manager, good)
        for _ in range(20):
            with pytest.raises(ModelUnavailable, match="bad is not available: bad can't be loaded") as refused:
                await ask(manager, bad)
        assert refused.value.retry_after == 1
        assert manager.status(bad).state is ModelState.FAILED
        assert "can't be loaded" in manager.status(bad).reason
        with pytest.raises(ModelUnavailable, match="the package no_such_package is not installed"):
            await ask(manager, absent)
        with pytest.raises(ModelUnavailable, match="it needs 4096 MiB, and the memory budget has 1024 MiB"):
            await ask(manager, big)
        assert await ask(manager, good) == before
        weights.write_bytes(whole)
        await asyncio.sleep(0.6)  # the cool-down
        await ask(manager, bad)
        assert manager.status(bad).state is ModelState.READY


async def test_a_process_that_is_killed_under_a_request_costs_nobody_an_answer(folder: Path) -> None:
    a = entry("a")
    async with managing(folder, a) as manager:
        expected = await ask(manager, a)
        for held in (True, False):  # the requests are in its hands when it dies, or come when it has just died
            [pid] = _pids(manager)
            if held:
                os.kill(pid, signal.SIGSTOP)
            asking = [asyncio.create_task(ask(manager, a)) for _ in range(4)]
            await asyncio.sleep(0.05 if held else 0)
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.gather(*asking) == [expected] * 4
            assert await ask(manager, a) == expected
        assert manager.status(a).loads == 3


async def test_time_to_live_pins_and_wishes(folder: Path) -> None:
    a, b = entry("a", ttl=0.2), entry("b", ttl=0.2, pinned=True)
    async with managing(folder, a, b) as manager:
        await asyncio.gather(ask(manager, a), ask(manager, b))
        await until(lambda: manager.status(a).state is ModelState.UNLOADED)
        assert manager.loaded() == [b.id]
        manager.unload(b)
        await until(lambda: not manager.loaded())


async def test_another_catalogue_leaves_what_is_loaded_and_drops_what_is_gone(folder: Path) -> None:
    a, b = entry("a"), entry("b")
    async with managing(folder, a, b) as manager:
        await asyncio.gather(ask(manager, a), ask(manager, b))
        manager.use(Catalogue((a.model_copy(update={"description": "another"}),)))
        await until(lambda: b.id not in manager.loaded())
        assert manager.loaded() == [a.id]
        assert manager.find("a").description == "another"
        assert manager.status(a).loads == 1


async def test_closing_refuses_who_waits_and_ends_all(folder: Path) -> None:
    a, b = entry("a"), entry("b")
    async with managing(folder, a, b, max_models=1) as manager:
        await ask(manager, a)
        async with manager.lease(a, 30):
            waiting = asyncio.create_task(ask(manager, b))
            await until(lambda: manager._tickets)
            await manager.close()
            with pytest.raises(Draining):
                await waiting
        with pytest.raises(Draining):
            await ask(manager, a)


async def test_callers_that_leave_at_any_moment_leave_no_lease_behind(folder: Path) -> None:
    a, b = entry("a"), entry("b")
    rng = random.Random(5)  # noqa: S311
    async with managing(folder, a, b, max_models=1, patience=0.05) as manager:

        async def leaver(i: int) -> None:
            asking = asyncio.create_task(ask(manager, (a, b)[i % 2]))
            await asyncio.sleep(rng.uniform(0, 0.3))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        await asyncio.gather(*(leaver(i) for i in range(100)))
        assert await ask(manager, a) == await ask(manager, a)
        assert await ask(manager, b) == await ask(manager, b)
        assert [manager.status(one).in_use for one in (a, b)] == [0, 0]
        assert not manager._tickets


async def test_language_models_beside_classifiers_and_no_stream_is_cut(folder: Path) -> None:
    causal_lm("llama", folder / "tiny-llama")
    writer, a, b = entry("tiny-llama", framework="quartet", dtype="float32"), entry("a"), entry("b")
    request = GenerationRequest("r", ("The quick",), SamplingParams(max_tokens=200, ignore_eos=True))
    async with managing(folder, writer, a, b, max_models=1, patience=0.05) as manager:
        [expected], _ = await manager.predict(writer, request, 60)
        rows = [await ask(manager, one) for one in (a, b)]
        submission = await manager.submit(writer, request, 60)
        with submission:
            waiting = [asyncio.create_task(ask(manager, one)) for one in (a, b)]
            [streamed] = await submission.collect()
        assert await asyncio.gather(*waiting) == rows
        assert streamed.text == expected.text
        assert manager.status(writer).in_use == 0
        with pytest.raises(InvalidRequest, match="a is no language model"):
            await manager.submit(a, request, 60)
        assert manager.status(writer).loads == 2
