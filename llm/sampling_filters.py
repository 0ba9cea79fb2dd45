"""Which tokens a draw may choose from: top_k, top_p, min_p and typical_p on one row.

Every filter takes the log-weights of the tokens that have survived so far, `values`: [n] float64, in ascending order of
token id, their largest 0, and returns the kept ones' indices, ascending; at least one is kept. Ties are settled by the
token id: the lower one comes first. So the result depends neither on how a sort treats equals nor on how wide a part of
the row was sorted. Sums run over one row's own numbers in one thread, in an order that these numbers alone decide.
"""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Ids = NDArray[np.int64]

_HEADS = (1024, 8192)  # most distributions reach their mass within these; sorting all of a row is slow


def top_k(values: Values, k: int) -> Ids:
    """The first k by value."""
    if k >= len(values):
        return np.arange(len(values))
    least = np.partition(values, len(values) - k)[len(values) - k]
    kept = values > least
    kept[np.flatnonzero(values == least)[: k - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def top_p(values: Values, p: float) -> Ids:
    """The shortest list of tokens, the likeliest first, whose probability reaches p."""
    wanted = p * np.exp(values).sum()
    for size in (_HEADS[0], len(values)):
        head = np.partition(values, len(values) - size)[len(values) - size :] if size < len(values) else values
        reached = np.cumsum(np.exp(np.sort(head)[::-1]))
        if reached[-1] >= wanted or len(head) == len(values):
            break
    return top_k(values, int(np.searchsorted(reached, wanted)) + 1)


def min_p(values: Values, p: float) -> Ids:
    """Those at least p times as likely as the likeliest."""
    return np.flatnonzero(np.exp(values) >= p)


def typical_p(values: Values, p: float) -> Ids:
    """The shortest list of tokens that reaches p, those first whose surprise is nearest to the entropy.

    Meister, Pimentel, Wiher, Cotterell: "Locally typical sampling", TACL 2023.
    """
    masses = np.exp(values)
    total = masses.sum()
    surprise = np.log(total) - values
    weighted = np.where(masses > 0, masses * surprise, 0.0)
    return _shortest_prefix(np.abs(surprise - weighted.sum() / total), masses, p * total)


def best(values: NDArray[np.floating], k: int) -> Ids:
    """The indices of the k largest, the largest first, of equal ones the lower index; k is at least 1."""
    k = min(k, len(values))
    least = np.partition(values, len(values) - k)[len(values) - k]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")[:k]]


def _shortest_prefix(keys: Values, masses: Values, wanted: float) -> Ids:
    """Of the indices in ascending order of their keys as many as it takes to reach the wanted mass, and at least one."""
    for size in (*_HEADS, len(keys)):
        head = np.flatnonzero(keys <= np.partition(keys, size - 1)[size - 1]) if size < len(keys) else np.arange(len(keys))
        order = head[np.argsort(keys[head], kind="stable")]
        reached = np.cumsum(masses[order])
        if reached[-1] >= wanted or len(head) == len(keys):
            break
    return np.sort(order[: np.searchsorted(reached, wanted) + 1])
