"""Packing: the rows of one step, laid end to end without padding between them, as numpy arrays.

rows        A: tokens 5..7 of a prompt     B: its last token     (padding)
token_ids   [ a5    a6    a7               b19                   0     0     0     0 ]
positions   [ 5     6     7                19                    0     0     0     0 ]
slots       [ where each key and value is written: block * block_size + offset; padding writes to block 0 ]
starts      [ 0, 3, 4 ]                    row i is token_ids[starts[i] : starts[i + 1]]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """The next known tokens of one sequence. `block_table` has a block for every position up to the last of them."""

    token_ids: Sequence[int]
    start: int  # position of the first
    block_table: Sequence[int]
    logits_from: int  # logits are wanted of token_ids[logits_from:]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    rows: Sequence[Row]
    block_size: int
    token_ids: Ints  # [tokens, padded]
    positions: Ints  # [tokens, padded]
    slots: Ints  # [tokens, padded]
    starts: Ints  # [rows + 1]
    logits: Ints  # [wanted, padded] places in token_ids
    num_wanted: int


def pack(rows: Sequence[Row], block_size: int, padded: Callable[[int], int]) -> PackedBatch:
    """Tokens and wanted logits are each padded to as many as `padded` says; logits with the last wanted place."""
    lengths = np.fromiter((len(row.token_ids) for row in rows), np.int64, len(rows))
    starts = np.concatenate(([0], np.cumsum(lengths)))
    size = padded(int(starts[-1]))
    token_ids, positions, slots = (np.zeros(size, np.int64) for _ in range(3))
    wanted: list[Ints] = []
    for row, at in zip(rows, starts, strict=False):
        end = at + len(row.token_ids)
        token_ids[at:end] = row.token_ids
        positions[at:end] = np.arange(row.start, row.end)
        slots[at:end] = _slots(row, block_size)
        wanted.append(np.arange(at + row.logits_from, end))
    places = np.concatenate(wanted) if wanted else np.zeros(0, np.int64)
    padding = padded(len(places)) - len(places)
    logits = np.concatenate((places, np.repeat(places[-1:], padding)))
    return PackedBatch(rows, block_size, token_ids, positions, slots, starts, logits, len(places))


def block_tables(rows: Sequence[Row], num_blocks: int) -> Ints:
    """[rows, num_blocks]: each row's first blocks, as far as it has tokens there; 0 elsewhere."""
    tables = np.zeros((len(rows), num_blocks), np.int64)
    for i, row in enumerate(rows):
        used = min(num_blocks, len(row.block_table))
        tables[i, :used] = row.block_table[:used]
    return tables


def _slots(row: Row, block_size: int) -> Ints:
    if len(row.token_ids) == 1:
        block, offset = divmod(row.start, block_size)
        return np.array([row.block_table[block] * block_size + offset])
    positions = np.arange(row.start, row.end)
    table = np.asarray(row.block_table, np.int64)
    slots: Ints = table[positions // block_size] * block_size + positions % block_size
    return slots
