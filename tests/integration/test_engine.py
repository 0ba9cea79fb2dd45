"""The engine with a real worker: same request, same answer, whatever happens to the worker; and nothing left behind."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from llm.engine_state import EngineStatus
from llm.exceptions import (
    CacheTooSmall,
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    Loading,
    ModelRefused,
    QueueFull,
    SequenceFailed,
)
from llm.forkserver import Forkserver
from llm.llm import LLMEngine
from llm.observer import NullObserver
from llm.sequence import SamplingParams
from llm.submission import Generation, GenerationRequest
from tests.integration import faulty_worker
from tests.integration.conftest import TinyModel
from tests.integration.engines import FORKSERVER, answer, config, no_logs, running, same, submit, together

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # 16 tokens, 2 layers, keys and values, 2 heads of 16 float32
PROMPTS = ("The quick", "0123456789 brown fox", "émigré 日本語", "dog. " * 30)
SAMPLED = SamplingParams(max_tokens=60, temperature=1.0, seed=7, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)


class Preemptions(NullObserver):
    count = 0

    def preempted(self) -> None:
        self.count += 1


REFUSED: list[tuple[str, SamplingParams, type[ClientError], str]] = [
    ("a", SamplingParams(max_tokens=1024), ContextLengthExceeded, "prompt"),
    ("word " * 3000, SamplingParams(max_tokens=1), ContextLengthExceeded, "prompt"),
    ("a" * 100, SamplingParams(max_tokens=300), CacheTooSmall, "prompt"),
    ("", SamplingParams(), InvalidRequest, "prompt"),
    ("\ud83d", SamplingParams(), InvalidRequest, "prompt"),
    ("a", SamplingParams(logit_bias=((320, 1.0),)), InvalidRequest, "logit_bias[320]"),
    ("a", SamplingParams(stop_token_ids=(999,)), InvalidRequest, "stop_token_ids[0]"),
]
REQUESTS = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED)]


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[LLMEngine]:
    async with running(folder, max_queue=600) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faulty(folder: Path) -> AsyncIterator[LLMEngine]:
    async with running(folder, entry=faulty_worker.ENTRY, max_restarts=3) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(engine: LLMEngine) -> list[Generation]:
    """Each request's answer, alone."""
    return [await answer(engine, prompt, params) for prompt, params in REQUESTS]


async def test_alone_in_a_crowd_and_out_of_a_warm_prefix_cache(engine: LLMEngine, undisturbed: list[Generation]) -> None:
    assert same(await together(engine, REQUESTS), undisturbed)
    assert same(await together(engine, list(reversed(REQUESTS))), list(reversed(undisturbed)))


async def test_with_a_cache_that_preempts_and_refuses_what_could_never_fit(folder: Path, undisturbed: list[Generation]) -> None:
    preemptions = Preemptions()
    async with running(folder, preemptions, max_num_seqs=8, kv_cache_bytes=24 * BLOCK_BYTES) as engine:
        assert same(await together(engine, REQUESTS), undisturbed)
        assert preemptions.count > 0
        for prompt, params, error, param in REFUSED:
            with pytest.raises(error) as refused:
                await submit(engine, prompt, params)
            assert refused.value.param == param


async def test_seeds_differ_repeat_and_are_told(engine: LLMEngine) -> None:
    free = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    first, second = await together(engine, [("a", free), ("a", free)])
    assert first.token_ids != second.token_ids
    assert first.completion is not None
    again = await answer(
        engine, "a", SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, seed=first.completion.seed)
    )
    assert again.token_ids == first.token_ids
    request = GenerationRequest("r", ("a",), SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, seed=5, n=3))
    with await engine.submit(request) as submission:
        choices = [await output.collect() for output in submission.outputs]
    singles = [
        await answer(engine, "a", SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, seed=5 + i)) for i in range(3)
    ]
    assert same(choices, singles)


async def test_a_worker_is_killed_again_and_again_and_nobody_notices(engine: LLMEngine, undisturbed: list[Generation]) -> None:
    """In prefill, in mid-decode, at the last token: wherever twenty kills happen to fall."""
    rng = random.Random(3)  # noqa: S311
    for _ in range(20):
        requests = asyncio.gather(*(answer(engine, prompt, params) for prompt, params in REQUESTS))
        await asyncio.sleep(rng.uniform(0, 0.6))
        pid, restarts = engine.state().worker_pid, engine.state().restarts
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert same(await requests, undisturbed)
        assert same([await answer(engine, *REQUESTS[0])], undisturbed[:1])
        assert engine.state().restarts == restarts + 1
    ready = engine.state().ready
    assert ready is not None
    sys.stdout.write(f"20 kills, 0 failed; a worker's load took {ready.seconds:.2f} s\n")


async def test_a_worker_that_stands_still_is_replaced(engine: LLMEngine, undisturbed: list[Generation]) -> None:
    requests = asyncio.gather(*(answer(engine, prompt, params) for prompt, params in REQUESTS))
    await asyncio.sleep(0.1)
    pid = engine.state().worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert same(await requests, undisturbed)
    assert engine.state().worker_pid != pid


async def test_forkserver_and_worker_are_killed(engine: LLMEngine, undisturbed: list[Generation]) -> None:
    requests = asyncio.gather(*(answer(engine, prompt, params) for prompt, params in REQUESTS))
    pid = engine.state().worker_pid
    assert pid is not None
    FORKSERVER.kill()
    os.kill(pid, signal.SIGKILL)
    assert same(await requests, undisturbed)
    assert same(await together(engine, REQUESTS[:2]), undisturbed[:2])


@pytest.mark.parametrize("poison", [faulty_worker.DEADLY, faulty_worker.RAISING])
async def test_a_poisonous_request_fails_alone(faulty: LLMEngine, undisturbed: list[Generation], poison: str) -> None:
    mates = asyncio.gather(*(answer(faulty, prompt, params) for prompt, params in REQUESTS[:3]))
    with pytest.raises(SequenceFailed):
        await answer(faulty, "x", GREEDY, poison)
    assert same(await mates, undisturbed[:3])
    assert same([await answer(faulty, *REQUESTS[0])], undisturbed[:1])


async def test_four_poisonous_requests_do_not_end_the_service(faulty: LLMEngine, undisturbed: list[Generation]) -> None:
    outcomes = await asyncio.gather(
        *(answer(faulty, f"x{i}", GREEDY, faulty_worker.DEADLY) for i in range(4)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [SequenceFailed] * 4
    assert same([await answer(faulty, *REQUESTS[0])], undisturbed[:1])


async def test_an_engine_whose_worker_can_not_be_replaced_says_so(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    async with running(folder, max_restarts=1) as engine:
        pending = asyncio.gather(*(answer(engine, p, GREEDY) for p in PROMPTS), return_exceptions=True)
        await asyncio.sleep(0)
        (folder / "model.safetensors").unlink()
        pid = engine.state().worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert [type(outcome) for outcome in await pending] == [EngineDead] * len(PROMPTS)
        assert engine.state().status is EngineStatus.DEAD
        with pytest.raises(EngineDead):
            await answer(engine, "x", GREEDY)


async def test_who_leaves_frees_slot_and_blocks(engine: LLMEngine, undisturbed: list[Generation]) -> None:
    rng = random.Random(5)  # noqa: S311
    handles = len(os.listdir("/proc/self/fd"))
    tasks = len(asyncio.all_tasks())

    async def leave(i: int) -> None:
        with await submit(engine, f"number {i}", SamplingParams(max_tokens=500, ignore_eos=True)) as submission:
            if rng.random() < 0.5:
                await anext(aiter(submission.outputs[0]))
            else:
                await asyncio.sleep(rng.uniform(0, 0.05))

    for _ in range(10):
        await asyncio.gather(*(leave(i) for i in range(50)))
    assert same([await answer(engine, *REQUESTS[0])], undisturbed[:1])
    assert len(os.listdir("/proc/self/fd")) == handles
    assert len(asyncio.all_tasks()) == tasks


async def test_the_queue_is_bounded_and_a_deadline_holds_in_it(folder: Path) -> None:
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    async with running(folder, max_num_seqs=1, max_queue=2) as engine:
        with await submit(engine, "a", long) as first:
            with pytest.raises(QueueFull) as full:
                await engine.submit(GenerationRequest("r", ("b", "c", "d"), long))
            assert full.value.retry_after is not None
            assert full.value.retry_after >= 1
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await answer(engine, "late", SamplingParams(max_tokens=5, timeout=0.2))
            assert time.monotonic() - began < 1
            await anext(aiter(first.outputs[0]))
        assert (await answer(engine, "b", SamplingParams(max_tokens=3, ignore_eos=True))).completion is not None


async def test_prompts_are_cut_only_when_asked(engine: LLMEngine) -> None:
    cut = SamplingParams(max_tokens=5, truncate_prompt_tokens=64)
    got = await answer(engine, "0 1 2 3 4 5 6 7 8 9 " * 200, cut)
    assert got.completion is not None
    assert (got.completion.prompt_tokens, got.completion.truncated) == (64, True)


async def test_prompt_logprobs_have_their_places_also_after_chunks(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=2)
    got = await answer(engine, "dog. " * 30, params)
    assert got.completion is not None
    assert got.completion.prompt_logprobs is not None
    assert len(got.completion.prompt_logprobs) == got.completion.prompt_tokens - 1
    ids = await engine.tokenize("dog. " * 30, add_special_tokens=True)
    assert [one.token_id for one in got.completion.prompt_logprobs] == ids[1:]
    assert len(got.logprobs) == 2


async def test_stop_strings_end_at_their_step(engine: LLMEngine, undisturbed: list[Generation]) -> None:
    whole = undisturbed[0].text
    stop = whole[9:13]
    got = await answer(engine, PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True, stop=(stop,)))
    assert got.text == whole[: whole.index(stop)]
    assert got.completion is not None
    assert got.completion.stop_reason == stop


async def test_draining_takes_no_more_and_waits_for_those_that_run(folder: Path, undisturbed: list[Generation]) -> None:
    async with running(folder) as engine:
        request = asyncio.create_task(answer(engine, *REQUESTS[0]))
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(engine.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await answer(engine, "x", GREEDY)
        assert await draining
        assert same([await request], undisturbed[:1])


async def test_closing_ends_what_runs_with_its_reason(folder: Path) -> None:
    async with running(folder) as engine:
        request = asyncio.create_task(answer(engine, "x", SamplingParams(max_tokens=900, ignore_eos=True)))
        await asyncio.sleep(0.3)
        assert not await engine.drain(0.1)
        await engine.close()
        with pytest.raises(Draining):
            await request


async def test_closing_while_the_forkserver_imports_leaves_no_process(folder: Path) -> None:
    FORKSERVER.kill()
    forkserver = Forkserver()
    engine = LLMEngine(config(folder), NullObserver(), forkserver, set_up_logging=no_logs)
    engine.start()
    with pytest.raises(Loading):
        await submit(engine, "x", GREEDY)
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await engine.close()
    forkserver.close()
    assert time.monotonic() - began < 2
    with pytest.raises(Draining):
        await engine.started()


async def test_a_model_that_is_refused_ends_the_start_with_the_reason(tiny_model: TinyModel) -> None:
    engine = LLMEngine(config(tiny_model("bloom")), NullObserver(), FORKSERVER, set_up_logging=no_logs)
    engine.start()
    with pytest.raises(ModelRefused):
        await engine.started()
    await engine.close()
    assert engine.state().status is EngineStatus.DEAD
