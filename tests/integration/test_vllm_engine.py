"""The way to vLLM and back: its process, what is mapped and refused, deadlines, aborts, deaths. vLLM is a stand-in here."""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from llm.config import VllmConfig
from llm.exceptions import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Loading,
    QueueFull,
    SequenceFailed,
    VllmUnavailable,
)
from llm.sequence import FinishReason, SamplingParams
from llm.submission import Generation, GenerationRequest, Submission
from llm.vllm_engine import VllmEngine, unavailable
from tests.integration.conftest import TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

STAND_IN = Path(__file__).parent / "vllm_stand_in"
CONFIG = VllmConfig(
    dtype="float32", max_model_len=None, max_num_seqs=4, allow_cpu=True, gpu_memory_fraction=0.3, start_timeout=60.0
)
LONG = SamplingParams(max_tokens=600, ignore_eos=True)


@pytest.fixture(autouse=True, scope="module")
def vllm_installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_IN)
        patch.setenv("PYTHONPATH", str(STAND_IN))
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tiny_model: TinyModel) -> AsyncIterator[VllmEngine]:
    """For tests after which its process still runs."""
    folder = str(tiny_model("llama"))
    engine = VllmEngine(CONFIG, lambda: folder)
    await answer(engine, "starts it")
    yield engine
    assert engine._bound.held == 0
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def own_engine(tiny_model: TinyModel) -> AsyncIterator[VllmEngine]:
    folder = str(tiny_model("llama"))
    engine = VllmEngine(CONFIG, lambda: folder)
    yield engine
    assert engine._bound.held == 0
    await engine.close()


def request(*prompts: str, params: SamplingParams) -> GenerationRequest:
    return GenerationRequest("test", prompts, params)


async def answer(engine: VllmEngine, prompt: str, **parameters: object) -> Generation:
    params = SamplingParams(**({"max_tokens": 8} | parameters))  # type: ignore[arg-type]
    with await engine.submit(request(prompt, params=params)) as submission:
        return await submission.outputs[0].collect()


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "llm.vllm_worker" in one.cmdline()]


async def test_an_answer_has_what_ours_has(engine: VllmEngine) -> None:
    one = await answer(engine, "abc", max_tokens=7, logprobs=1, seed=5)
    assert one.text == "abcabca"
    assert one.completion is not None
    assert one.completion.finish_reason is FinishReason.LENGTH
    assert (one.completion.prompt_tokens, one.completion.completion_tokens, one.completion.seed) == (3, 7, 5)
    assert len(one.logprobs) == 7
    assert one.logprobs[0].logprob == -9999.0
    assert one.logprobs[0].top == ((5, -0.5),)


async def test_our_decoder_finds_stop_strings_and_the_rest_is_not_computed(engine: VllmEngine) -> None:
    one = await answer(engine, "abc", max_tokens=600, stop=("ca",))
    assert one.text == "ab"
    assert one.completion is not None
    assert (one.completion.finish_reason, one.completion.stop_reason) == (FinishReason.STOP, "ca")
    assert (await answer(engine, "running", max_tokens=1)).text == "1"


async def test_many_share_one_process(engine: VllmEngine) -> None:
    texts = [f"{i}x" for i in range(12)]
    answers = await asyncio.gather(*(answer(engine, text) for text in texts))
    assert [one.text for one in answers] == [(text * 4)[:8] for text in texts]
    with await engine.submit(request("ab", "cd", params=SamplingParams(max_tokens=4))) as submission:
        assert [(await output.collect()).text for output in submission.outputs] == ["abab", "cdcd"]
    assert len(children()) == 1


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"typical_p": 0.5}, "typical_p"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"stop_token_ids": (4000,)}, "stop_token_ids[0]"),
    ],
)
async def test_what_vllm_would_do_otherwise_is_refused(engine: VllmEngine, parameters: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await answer(engine, "a", **parameters)
    assert refused.value.param == param


async def test_too_long_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(ContextLengthExceeded):
        await answer(engine, "a b" * 600)


async def test_who_leaves_is_forgotten_by_vllm_too(engine: VllmEngine) -> None:
    with await engine.submit(request("abc", params=LONG)) as submission:
        await submission.outputs[0].__anext__()
    assert await engine._bound.empty(1)
    assert (await answer(engine, "running", max_tokens=1)).text == "1"


async def test_a_deadline_holds(engine: VllmEngine) -> None:
    with pytest.raises(DeadlineExceeded):
        await answer(engine, "slow", timeout=0.1)
    late = VllmEngine(CONFIG, engine._folder)
    with pytest.raises(DeadlineExceeded):
        await answer(late, "a start takes longer", timeout=0.01)
    assert late._bound.held == 0
    await late.close()


@pytest.mark.parametrize("word", ["raise", "odd"])
async def test_a_request_that_fails_fails_alone(engine: VllmEngine, word: str) -> None:
    mate = asyncio.create_task(answer(engine, "mate", max_tokens=100))
    with pytest.raises(SequenceFailed):
        await answer(engine, word)
    assert (await mate).text == "mate" * (len((await mate).text) // 4)


@pytest.mark.parametrize("word", ["exit", "dead", "kill"])
async def test_a_death_is_told_and_the_next_request_starts_another(own_engine: VllmEngine, word: str) -> None:
    others = children()
    mate = asyncio.create_task(answer(own_engine, "mate", max_tokens=600))
    bad = asyncio.create_task(answer(own_engine, word, max_tokens=600))
    if word == "kill":
        await answer(own_engine, "ab")
        (process,) = set(children()) - set(others)
        os.kill(process.pid, signal.SIGKILL)
    for request in (mate, bad):
        with pytest.raises(VllmUnavailable):
            await request
    assert (await answer(own_engine, "ab", max_tokens=2)).text == "ab"


async def test_the_bound_holds_and_nothing_of_a_refused_request_is_kept(engine: VllmEngine) -> None:
    with pytest.raises(QueueFull):
        await engine.submit(request(*["x"] * 261, params=LONG))


async def test_a_drain_waits_for_what_runs_and_takes_no_more(own_engine: VllmEngine) -> None:
    submission = await own_engine.submit(request("abc", params=LONG))
    await submission.outputs[0].__anext__()
    assert not await own_engine.drain(0.01)
    with pytest.raises(Draining):
        await answer(own_engine, "abc")
    draining = asyncio.create_task(own_engine.drain(30))
    assert len((await submission.outputs[0].collect()).token_ids) > 1
    assert await draining


async def test_closing_ends_what_runs_with_its_reason(own_engine: VllmEngine) -> None:
    submissions: list[Submission] = [await own_engine.submit(request("abc", params=LONG)) for _ in range(3)]
    await submissions[0].outputs[0].__anext__()
    before = time.monotonic()
    await own_engine.close()
    assert time.monotonic() - before < 2
    assert own_engine._bound.held == 0
    for submission in submissions:
        with pytest.raises(Draining):
            await submission.outputs[0].collect()
    with pytest.raises(Draining):
        await answer(own_engine, "late")
    await own_engine.close()


async def test_a_start_that_fails_says_why(tiny_model: TinyModel, tmp_path: Path) -> None:
    for file in tiny_model("llama").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "no-load").touch()
    engine = VllmEngine(CONFIG, lambda: str(tmp_path))
    with pytest.raises(VllmUnavailable, match="no memory for the cache"):
        await answer(engine, "a")
    (tmp_path / "no-load").unlink()
    assert (await answer(engine, "ab", max_tokens=2)).text == "ab"
    await engine.close()
    quick = VllmEngine(dataclasses.replace(CONFIG, start_timeout=0.05), lambda: str(tmp_path))
    with pytest.raises(VllmUnavailable, match="did not start"):
        await answer(quick, "a")
    await quick.close()


async def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tiny_model: TinyModel) -> None:
    with pytest.raises(Loading):
        await answer(VllmEngine(CONFIG, lambda: None), "a")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert unavailable(allow_cpu=False) == "there is no NVIDIA GPU"
    assert unavailable(allow_cpu=True) is None
    folder = str(tiny_model("llama"))
    with pytest.raises(VllmUnavailable, match="GPU"):
        await answer(VllmEngine(dataclasses.replace(CONFIG, allow_cpu=False), lambda: folder), "a")
