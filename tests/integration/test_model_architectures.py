"""Any decoder runs packed, ragged and paged as it runs by itself: the same greedy tokens, the same logprobs."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.generation.utils import GenerateDecoderOnlyOutput

from tests.integration.conftest import TinyModel
from tests.integration.driver import generate, runner, scattered

ARCHITECTURES = (
    "llama",
    "llama-tied",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma2",  # a soft cap on the scores
    "gemma3",
    "gpt-oss",  # sinks, and experts
    "gpt2",
    "opt",
    "phi",
    "phi3",
    "gpt-neox",
)
_LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 47, 64, 65, 100, 127, 128, 129, 200, 256, 300, 600)


def reference(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[tuple[list[int], list[float]]]:
    """transformers' greedy generate in float32, prompt by prompt: (tokens, their logprobs)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    no_tokens = list(range(vocabulary, model.config.vocab_size))  # rows of the head that are never emitted
    answers = []
    for prompt in prompts:
        out = model.generate(  # type: ignore[misc]  # transformers' own mixin
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            suppress_tokens=no_tokens or None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert isinstance(out, GenerateDecoderOnlyOutput)
        assert out.logits is not None
        tokens = out.sequences[0, len(prompt) :].tolist()
        logprobs = [
            float(row[0, :vocabulary].float().log_softmax(-1)[token]) for row, token in zip(out.logits, tokens, strict=True)
        ]
        answers.append((tokens, logprobs))
    return answers


def check(folder: Path, prompts: list[list[int]], new_tokens: int, batches: tuple[int, ...]) -> None:
    expected = reference(folder, prompts, new_tokens)
    model = runner(folder)
    for batch in batches:
        rng = random.Random(batch)  # noqa: S311 - chooses chunks
        sequences = scattered(model, prompts, new_tokens, rng)
        generate(model, sequences, batch, (1, 7, 16, 64, 512), rng)
        for sequence, (tokens, logprobs) in zip(sequences, expected, strict=True):
            assert sequence.known[len(sequence.prompt) :] == tokens
            ours = [float(row.log_softmax(-1)[token]) for row, token in zip(sequence.logits, tokens, strict=True)]
            assert ours == pytest.approx(logprobs, abs=1e-4)


def prompts_of(vocabulary: range) -> list[list[int]]:
    rng = random.Random(0)  # noqa: S311
    return [[rng.choice(vocabulary) for _ in range(length)] for length in _LENGTHS]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiny_models_give_the_tokens_of_transformers(name: str, tiny_model: TinyModel) -> None:
    check(tiny_model(name), prompts_of(range(3, 320)), 64, (4, 16))


def test_the_default_model_gives_the_tokens_of_transformers(default_model: Path) -> None:
    prompts = prompts_of(range(100, 49000))
    check(default_model, [prompts[i] for i in (4, 13, 19)], 32, (3,))


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiny_models_give_them_one_at_a_time(name: str, tiny_model: TinyModel) -> None:
    check(tiny_model(name), prompts_of(range(3, 320)), 64, (1,))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_default_model_gives_them_for_all_prompts_and_batches(default_model: Path) -> None:
    check(default_model, prompts_of(range(100, 49000)), 64, (1, 4, 16))
