"""On a GPU: every backend that is chosen there gives what the model gives by itself, and the probe's promise of bits holds.

Not run so far, see docs/gpu.md.
"""

import random
from pathlib import Path

import pytest
import torch

from llm.batch import Row
from llm.model_runner import ModelRunner
from llm.probe import plain_logits
from tests.integration.conftest import TinyModel
from tests.integration.driver import blocks_for, generate, runner, scattered

_HALF_TOLERANCE = 0.06  # of the norm of the logits, as in llm/probe.py
_FLASH = ("llama", "mistral-window", "qwen2", "qwen3", "gemma3", "gpt2")
_DENSE = ("gemma2", "gpt-oss")  # a soft cap, sinks


@pytest.fixture(autouse=True, scope="module")
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def check(model: ModelRunner, tolerance: float) -> None:
    """Prompts that arrive at any time, in any chunks, over scattered blocks; each token's logits against the model's own."""
    rng = random.Random(0)  # noqa: S311
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (1, 15, 16, 17, 127, 128, 129, 300)]
    sequences = scattered(model, prompts, 16, rng)
    generate(model, sequences, 4, (1, 7, 16, 64, 512), rng)
    for sequence in sequences:
        first = len(sequence.prompt) - 1
        expected = plain_logits(model.model, sequence.known[:-1], model.device)[first:, : model.vocab_size]
        assert relative(torch.stack(sequence.logits), expected) <= tolerance


@pytest.mark.parametrize("name", _FLASH)
def test_flash_attention_agrees_with_the_model(name: str, tiny_model: TinyModel) -> None:
    model = runner(tiny_model(name), "bfloat16", device="cuda")
    assert model.ready.probe.attention_backend == "varlen"
    check(model, _HALF_TOLERANCE)


@pytest.mark.parametrize("name", _DENSE)
def test_a_layer_that_flash_attention_lacks_goes_to_plain_torch(name: str, tiny_model: TinyModel) -> None:
    model = runner(tiny_model(name), "bfloat16", device="cuda")
    assert model.ready.probe.attention_backend == "dense"
    check(model, _HALF_TOLERANCE)


@pytest.mark.parametrize("name", [*_FLASH, *_DENSE])
def test_plain_torch_in_float32_agrees_with_the_model(name: str, tiny_model: TinyModel) -> None:
    model = runner(tiny_model(name), "float32", device="cuda")
    assert model.ready.probe.attention_backend == "dense"
    check(model, 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_alone_and_in_a_crowd(dtype: str, default_model: Path) -> None:
    """Where `/version` says batch_invariant."""
    model = runner(default_model, dtype, device="cuda")
    if not model.ready.probe.batch_invariant:
        pytest.skip("the probe promises nothing on this device")
    rng = random.Random(1)  # noqa: S311
    tokens = [rng.randrange(3, 300) for _ in range(140)]
    free = list(range(1, model.ready.num_blocks + 1))
    blocks, free = free[: blocks_for(140)], free[blocks_for(140) :]
    alone = model.forward([Row(tokens, 0, blocks, 0)])
    crowd = [Row([rng.randrange(3, 300) for _ in range(30)], 0, [free.pop(), free.pop()], 29) for _ in range(7)]
    for size in (64, 16):
        parts = []
        for at in range(0, len(tokens), size):
            mine = Row(tokens[at : at + size], at, blocks, 0)
            parts.append(model.forward([*crowd, mine])[len(crowd) :])
        assert torch.equal(torch.cat(parts), alone), f"in a crowd, in chunks of {size}"
