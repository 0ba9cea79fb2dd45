"""On a GPU with the extra `vllm`: the real vLLM behind our engine's interface.

On a GPU not run so far; docs/gpu.md says what was run with vLLM's CPU build.
"""

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from llm.config import VllmConfig
from llm.sequence import FinishReason, SamplingParams
from llm.submission import Generation, GenerationRequest
from llm.vllm_engine import VllmEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(default_model: Path) -> AsyncIterator[VllmEngine]:
    if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        pytest.skip("there is no CUDA device, or no vLLM")
    config = VllmConfig(
        dtype="auto", max_model_len=2048, max_num_seqs=4, allow_cpu=False, gpu_memory_fraction=0.3, start_timeout=600.0
    )
    engine = VllmEngine(config, lambda: str(default_model))
    yield engine
    await engine.close()


async def answer(engine: VllmEngine, prompt: str, params: SamplingParams) -> Generation:
    with await engine.submit(GenerationRequest("test", (prompt,), params)) as submission:
        return await submission.outputs[0].collect()


async def test_it_answers(engine: VllmEngine) -> None:
    one = await answer(engine, "The capital of France is", SamplingParams(max_tokens=12, temperature=0.0, logprobs=2))
    assert one.text.startswith(" Paris")
    assert one.completion is not None
    assert one.completion.completion_tokens == len(one.token_ids) == len(one.logprobs)
    assert all(entry.top[0][0] == token for entry, token in zip(one.logprobs, one.token_ids, strict=True))


async def test_a_stop_string_ends_it(engine: VllmEngine) -> None:
    params = SamplingParams(max_tokens=200, temperature=0.0, stop=("Paris",), ignore_eos=True)
    one = await answer(engine, "The capital of France is", params)
    assert one.text == " "
    assert one.completion is not None
    assert (one.completion.finish_reason, one.completion.stop_reason) == (FinishReason.STOP, "Paris")


async def test_a_seed_repeats_a_draw(engine: VllmEngine) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    assert (await answer(engine, "Once upon a time", params)).text == (await answer(engine, "Once upon a time", params)).text
