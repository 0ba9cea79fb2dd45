"""Packing lays the rows end to end, writes each token to its own slot, and pads where nobody reads."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from llm.batch import Row, block_tables, pack


def multiple_of(size: int) -> Callable[[int], int]:
    return lambda count: -(-count // size) * size


exact, by_eight = multiple_of(1), multiple_of(8)


def test_rows_stand_end_to_end_with_their_positions_and_slots() -> None:
    chunk = Row([50, 51, 52], 3, [7, 2], 1)
    single = Row([90], 5, [4, 9], 0)
    packed = pack([chunk, single], 4, exact)
    assert packed.token_ids.tolist() == [50, 51, 52, 90]
    assert packed.positions.tolist() == [3, 4, 5, 5]
    assert packed.slots.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 9 * 4 + 1]
    assert packed.starts.tolist() == [0, 3, 4]
    assert packed.logits.tolist() == [1, 2, 3]
    assert packed.num_wanted == 3
    assert chunk.end == 6


def test_padding_writes_to_block_0_and_repeats_the_last_wanted_place() -> None:
    packed = pack([Row([5] * 5, 0, [3, 1], 4)], 4, by_eight)
    assert packed.token_ids.tolist() == [5] * 5 + [0] * 3
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert packed.slots.tolist() == [12, 13, 14, 15, 4, 0, 0, 0]
    assert packed.starts.tolist() == [0, 5]
    assert packed.logits.tolist() == [4] * 8
    assert packed.num_wanted == 1


def test_a_full_multiple_is_not_padded() -> None:
    packed = pack([Row(list(range(8)), 0, [1, 2], 0)], 4, by_eight)
    assert len(packed.token_ids) == len(packed.logits) == 8


def test_a_chunk_may_want_no_logits() -> None:
    packed = pack([Row([1, 2], 0, [1], 2)], 4, by_eight)
    assert packed.logits.tolist() == []
    assert packed.num_wanted == 0
    assert len(packed.token_ids) == 8


def test_no_rows_make_an_empty_batch() -> None:
    packed = pack([], 4, by_eight)
    assert packed.token_ids.tolist() == packed.logits.tolist() == []
    assert packed.starts.tolist() == [0]
    assert packed.num_wanted == 0


@pytest.mark.parametrize("length", [1, 2])
def test_a_block_is_left_at_its_end(length: int) -> None:
    """The last slot of one block is followed by the first of the next, wherever that is."""
    for start in range(11 - length):
        packed = pack([Row([0] * length, start, [5, 1, 8], 0)], 4, exact)
        assert packed.slots.tolist() == [[5, 1, 8][at // 4] * 4 + at % 4 for at in range(start, start + length)]


def test_a_longer_block_table_than_needed_is_ignored() -> None:
    short, long = Row([1, 2], 3, [5, 6], 0), Row([1, 2], 3, [5, 6, 7, 8], 0)
    assert pack([short], 4, exact).slots.tolist() == pack([long], 4, exact).slots.tolist()


def test_block_tables_are_cut_and_filled_to_one_length() -> None:
    tables = block_tables([Row([1], 0, [5, 6, 7], 0), Row([1], 0, [4], 0), Row([1], 0, [8, 9], 0)], 2)
    assert tables.tolist() == [[5, 6], [4, 0], [8, 9]]


def test_any_batch_holds_every_token_once() -> None:
    """Each row's part of the batch is the row; no two tokens share a slot; only padding is in block 0."""
    rng = random.Random(0)  # noqa: S311
    for _ in range(200):
        free = list(range(1, 60))
        rng.shuffle(free)
        rows = []
        for _ in range(rng.randrange(1, 6)):
            start, length = rng.randrange(20), rng.randrange(1, 12)
            table = [free.pop() for _ in range(-(-(start + length) // 4))]
            rows.append(Row([rng.randrange(1, 99) for _ in range(length)], start, table, rng.randrange(length + 1)))
        multiple = rng.choice((1, 8, 16))
        packed = pack(rows, 4, multiple_of(multiple))
        wanted: list[int] = []
        for row, begin, end in zip(rows, packed.starts[:-1], packed.starts[1:], strict=True):
            assert packed.token_ids[begin:end].tolist() == list(row.token_ids)
            assert packed.positions[begin:end].tolist() == list(range(row.start, row.end))
            assert set(packed.slots[begin:end] // 4) <= set(row.block_table)
            wanted += range(begin + row.logits_from, end)
        used = packed.slots[: packed.starts[-1]]
        assert len(np.unique(used)) == len(used)
        assert (used >= 4).all()
        assert not packed.slots[packed.starts[-1] :].any()
        assert packed.logits[: packed.num_wanted].tolist() == wanted
        assert len(packed.token_ids) % multiple == len(packed.logits) % multiple == 0
        assert len(packed.token_ids) - packed.starts[-1] < multiple
