"""A token's logits have the same bits alone and in a crowd, in one piece and in chunks, first time and after a prefix hit."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from llm.batch import Row
from llm.model_runner import ModelRunner
from tests.integration.conftest import TinyModel
from tests.integration.driver import blocks_for, runner, spec

_MODELS = ("llama", "gemma3", "default")
_LENGTH = 140  # tokens of the sequence that is looked at: two tiles of keys
_HIT = 64  # tokens of it that another sequence had computed


def whole(model: ModelRunner, tokens: list[int], blocks: list[int]) -> torch.Tensor:
    """[tokens, vocab]"""
    return model.forward([Row(tokens, 0, blocks, 0)])


def in_chunks(model: ModelRunner, tokens: list[int], blocks: list[int], size: int, start: int = 0) -> torch.Tensor:
    """Those before `start` are in the cache."""
    parts = [model.forward([Row(tokens[at : at + size], at, blocks, 0)]) for at in range(start, len(tokens), size)]
    return torch.cat(parts)


def in_a_crowd(
    model: ModelRunner, tokens: list[int], blocks: list[int], free: list[int], rng: random.Random, *, start: int
) -> torch.Tensor:
    """Chunks of random sizes, each in the midst of other rows: single tokens and prompts."""
    parts, at = [], start
    while at < len(tokens):
        size = rng.choice((1, 1, 5, 16, 40))
        others, left = [], list(free)
        for _ in range(rng.randrange(1, 12)):
            length = rng.choice((1, 1, 1, 30, 70))
            table = [left.pop() for _ in range(blocks_for(length))]
            others.append(Row([rng.randrange(3, 300) for _ in range(length)], 0, table, length - 1))
        place = rng.randrange(len(others) + 1)
        mine = Row(tokens[at : at + size], at, blocks, 0)
        logits = model.forward([*others[:place], mine, *others[place:]])
        parts.append(logits[place : place + len(mine.token_ids)])
        at += size
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", _MODELS)
def test_bits(name: str, dtype: str, tiny_model: TinyModel, default_model: Path) -> None:
    if name == "default":  # a step of a real model takes long: only tokens around the tile's end are computed singly
        check(default_model, dtype, single_from=124, crowds=1)
    else:
        check(tiny_model(name), dtype, single_from=0, crowds=5)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_the_default_model_from_the_first_token_on(dtype: str, default_model: Path) -> None:
    check(default_model, dtype, single_from=0, crowds=5)


def check(folder: Path, dtype: str, *, single_from: int, crowds: int) -> None:
    model = runner(folder, dtype)
    assert model.ready.probe.batch_invariant
    rng = random.Random(1)  # noqa: S311
    tokens = [rng.randrange(3, 300) for _ in range(_LENGTH)]
    free = list(range(1, model.ready.num_blocks + 1))
    rng.shuffle(free)
    blocks, free = free[: blocks_for(_LENGTH)], free[blocks_for(_LENGTH) :]
    expected = whole(model, tokens, blocks)
    for size in (512, 64, 16):
        assert torch.equal(in_chunks(model, tokens, blocks, size), expected), f"in chunks of {size}"
    assert torch.equal(in_chunks(model, tokens, blocks, 1, single_from), expected[single_from:]), "token by token"
    for _ in range(crowds):
        assert torch.equal(in_a_crowd(model, tokens, blocks, free, rng, start=single_from), expected[single_from:]), (
            "in a crowd"
        )
    other = [*blocks[: _HIT // 16], *free[: len(blocks) - _HIT // 16]]
    assert torch.equal(model.forward([Row(tokens[_HIT:], _HIT, other, 0)]), expected[_HIT:]), "after a prefix hit"
    several = runner(Path(model.model.config._name_or_path), dtype, threads=4)
    assert several.ready.probe.thread_counts == (4, 2, 1)
    for count in several.ready.probe.thread_counts:
        torch.set_num_threads(count)
        found = whole(several, tokens, blocks)
        single = several.forward([Row(tokens[-1:], _LENGTH - 1, blocks, 0)])
        torch.set_num_threads(1)
        assert torch.equal(found, expected), f"with {count} threads"
        assert torch.equal(single, expected[-1:]), f"with {count} threads, a token alone"


def test_where_it_is_not_asked_for_it_is_not_promised_and_the_answer_is_the_same_but_for_rounding(
    tiny_model: TinyModel,
) -> None:
    asked = runner(tiny_model("llama"))
    free = ModelRunner(dataclasses.replace(spec(tiny_model("llama")), batch_invariant=False), lambda _: None)
    assert (asked.ready.probe.batch_invariant, free.ready.probe.batch_invariant) == (True, False)
    tokens = list(range(3, 40))
    torch.testing.assert_close(whole(free, tokens, [1, 2, 3]), whole(asked, tokens, [1, 2, 3]), rtol=1e-4, atol=1e-5)


def test_a_step_that_wants_no_logits_computes_the_cache(tiny_model: TinyModel) -> None:
    model = runner(tiny_model("llama"))
    tokens = list(range(3, 40))
    expected = whole(model, tokens, [1, 2, 3])
    assert model.forward([Row(tokens[:20], 0, [4, 5, 6], 20)]).shape == (0, model.vocab_size)
    assert torch.equal(model.forward([Row(tokens[20:], 20, [4, 5, 6], 0)]), expected[20:])


def test_what_a_slot_held_before_never_shows(tiny_model: TinyModel) -> None:
    model = runner(tiny_model("llama"))
    tokens = list(range(3, 40))
    expected = whole(model, tokens, [1, 2, 3])
    for cache in model._caches.values():
        cache.keys.fill_(float("nan"))
    assert torch.equal(whole(model, tokens, [4, 5, 6]), expected)


def test_a_sequence_without_finite_numbers_spoils_nobody_else(tiny_model: TinyModel) -> None:
    model = runner(tiny_model("llama"))
    tokens = list(range(3, 40))
    expected = whole(model, tokens, [1, 2, 3])
    with torch.inference_mode():
        embeddings = model.model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding)
        embeddings.weight[300] = float("inf")
    poisoned = Row([300] * 20, 0, [4, 5], 0)
    logits = model.forward([poisoned, Row(tokens, 0, [6, 7, 8], 0)])
    assert not torch.isfinite(logits[:20]).all()
    assert torch.equal(logits[20:], expected)
    assert torch.equal(whole(model, tokens, [4, 5, 6]), expected)  # in blocks that held them
