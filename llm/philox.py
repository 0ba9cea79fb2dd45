"""Random numbers without a state: Philox4x32-10, and the draw of a token keyed by seed, position and token id.

Philox is a counter-based generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
a number is a function of (key, counter), so any draw can be repeated without the draws before it, in any order. Here

    key      the seed: low and high 32 bits
    counter  (token id // 4, position, plane, 0), which gives one word to each of four tokens
             plane 0 holds the high, plane 1 the low 32 bits of a token's uniform number
"""

import math

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # each below 2**32: the products of a round need all 64 bits
Ids = NDArray[np.int64]
Values = NDArray[np.float64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LOW = np.uint64(_MASK)
_HALF = np.uint64(32)
_BELOW_ONE = 1 - 2.0**-53  # the largest double below 1
_SLACK = 1e-9  # far above the rounding of the logarithms compared, far below what would add candidates


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox on each counter. The four words of the counters are arrays of one shape, and so is the answer."""
    first, second, third, fourth = counter
    key_low, key_high = key
    for _ in range(_ROUNDS):
        product, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first = (other >> _HALF) ^ second ^ np.uint64(key_low)
        third = (product >> _HALF) ^ fourth ^ np.uint64(key_high)
        second, fourth = other & _LOW, product & _LOW
        key_low, key_high = (key_low + _WEYL[0]) & _MASK, (key_high + _WEYL[1]) & _MASK
    return first, second, third, fourth


def draw(log_weights: Values, tokens: Ids, seed: int, position: int) -> int:
    """The index i for which log_weights[i] + gumbel(seed, position, tokens[i]) is largest; of equal ones the first.

    So i comes with probability proportional to exp(log_weights[i]) (the Gumbel-max trick), and a token's noise doesn't
    depend on which other tokens take part. `log_weights`: [n], `tokens`: [n], ascending.

    With a uniform v the noise is -log(e) of the exponential e = -log(1 - v), so the smallest log(e) - log_weight wins.
    As e >= v, the high half of v bounds that from below, and only tokens whose bound is within the exact value of the
    most promising one need the exact noise: the same winner for half the work.
    """
    high = _words(tokens, seed, position, 0)
    least = np.maximum(high.astype(np.float64), 2.0**-33)  # v is at least 2**-65
    bounds = np.log(least) - 32 * math.log(2) - log_weights

    def times(chosen: Ids) -> Values:
        return np.asarray(_log_exponentials(high[chosen], tokens[chosen], seed, position) - log_weights[chosen])

    limit = times(bounds.argmin(keepdims=True))[0] + _SLACK
    candidates = np.flatnonzero(bounds <= limit)
    return int(candidates[times(candidates).argmin()])


def _log_exponentials(high: Words, tokens: Ids, seed: int, position: int) -> Values:
    """log(e) with all 64 bits; `high` are the tokens' high halves."""
    bits = (high << _HALF) | _words(tokens, seed, position, 1)
    uniform = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-64, _BELOW_ONE)
    return np.asarray(np.log(-np.log1p(-uniform)))


def _words(tokens: Ids, seed: int, position: int, plane: int) -> Words:
    """A token's word is the same whether its block is computed for it alone or with all blocks."""
    last_block = int(tokens[-1]) >> 2
    dense = len(tokens) > last_block
    blocks = np.arange(last_block + 1, dtype=np.uint64) if dense else (tokens >> 2).astype(np.uint64)
    counter = (blocks, np.full_like(blocks, position), np.full_like(blocks, plane), np.zeros_like(blocks))
    words = np.stack(philox4x32(counter, (seed & _MASK, seed >> 32)), axis=1).ravel()
    return words[tokens if dense else np.arange(len(tokens)) * 4 + (tokens & 3)]
