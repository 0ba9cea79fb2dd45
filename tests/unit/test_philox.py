"""A seed repeats its draws, and the draws have the distribution that was asked for."""

import math

import numpy as np
import pytest

from llm.philox import draw, philox4x32

CHI_SQUARE_5_DEGREES = 20.52  # exceeded by chance once in a thousand
LARGEST_SEED = 2**63 - 1


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_generator_gives_the_known_answers_of_its_authors(counter: str, key: str, answer: str) -> None:
    first, second, third, fourth = (np.array([int(word, 16)], dtype=np.uint64) for word in counter.split())
    low, high = (int(word, 16) for word in key.split())
    words = philox4x32((first, second, third, fourth), (low, high))
    assert " ".join(f"{int(word[0]):08x}" for word in words) == answer


def scalar_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The rounds as the paper writes them, with Python's integers."""
    c, (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = (p1 >> 32) ^ c[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ c[3] ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def gumbel(seed: int, position: int, token: int) -> float:
    halves = [scalar_philox((token // 4, position, plane, 0), (seed % 2**32, seed >> 32))[token % 4] for plane in (0, 1)]
    uniform = min((halves[0] * 2**32 + halves[1] + 0.5) * 2.0**-64, 1 - 2.0**-53)
    return -math.log(-math.log1p(-uniform))


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_the_draw_is_the_largest_of_log_weight_plus_noise(spread: float) -> None:
    """The shortcut that leaves most tokens' noise half computed changes no winner."""
    random = np.random.default_rng(3)
    for case in range(40):
        tokens = np.sort(random.choice(300, size=int(random.integers(1, 250)), replace=False))
        weights = random.standard_normal(len(tokens)) * spread
        seed, position = int(random.integers(0, 2**63)), case * 37
        scores = [w + gumbel(seed, position, int(t)) for w, t in zip(weights, tokens, strict=True)]
        assert draw(weights, tokens, seed, position) == int(np.argmax(scores))


def test_a_token_that_loses_can_be_left_out() -> None:
    """A filter that drops tokens never changes the draw unless it drops the winner."""
    weights, tokens = np.zeros(1000), np.arange(1000)
    for position in range(30):
        winner = draw(weights, tokens, 5, position)
        kept = np.unique(np.append(np.arange(position, 1000, 17), winner))
        assert kept[draw(weights[kept], tokens[kept], 5, position)] == winner


@pytest.mark.parametrize("seed", [0, 11, LARGEST_SEED])
def test_the_draws_have_the_asked_distribution(seed: int) -> None:
    weights = np.log([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])
    tokens = np.array([0, 1, 7, 8, 4000, 49151])
    draws = np.bincount([draw(weights, tokens, seed, position) for position in range(6000)], minlength=6)
    expected = 6000 * np.exp(weights)
    assert ((draws - expected) ** 2 / expected).sum() < CHI_SQUARE_5_DEGREES


def test_seeds_and_positions_draw_independently() -> None:
    weights, tokens = np.zeros(4096), np.arange(4096)
    by_position = {draw(weights, tokens, 1, position) for position in range(100)}
    by_seed = {draw(weights, tokens, seed, 1) for seed in [*range(50), *(2**40 + i for i in range(50))]}
    assert len(by_position) > 90
    assert len(by_seed) > 90


def test_certain_and_impossible_tokens() -> None:
    tokens = np.arange(5)
    weights = np.array([-np.inf, -800.0, 0.0, -np.inf, -1e300])
    assert {draw(weights, tokens, 9, position) for position in range(200)} == {2}
    assert draw(np.zeros(1), np.array([77]), LARGEST_SEED, 0) == 0
