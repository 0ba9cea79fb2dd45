"""Attention in plain torch: right on every device, and the reference for every other backend.

The keys of a sequence are summed in tiles of KEY_TILE positions, counted from its beginning, one tile after the other:

    scores  [kv heads, sequences, tiles, query rows, KEY_TILE]     one product per tile, all of the same size
    out     = (tile 0 + tile 1 + ...) / (sum 0 + sum 1 + ...)       masked positions and tiles add exactly zero

So the bits of a token depend on its own sequence only: not on the batch, the chunk it came in, or how many tiles others
need. A product of few rows goes other ways in the libraries than one of many, so query rows are padded to a multiple.

Rows with one token are computed together, grouped by their number of tiles (a power of two); longer ones one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from llm.attention.base import LayerCache, LayerOptions, StepMetadata
from llm.batch import Ints, PackedBatch, Row, block_tables

KEY_TILE = 128  # positions
QUERY_TILE = 128  # tokens of one sequence, in one product
QUERY_ROWS = 8  # query rows come in multiples of this: from here on a row's bits don't depend on their number
WIDE_HEAD = 128
WIDE_QUERY_ROWS = 16  # the same for heads wider than that


@dataclass(slots=True)
class _Group:
    """Sequences with the same number of tokens and tiles in this step.

    masks: per sliding window, True where a query doesn't see a key: [sequences, tiles, tokens, 1, KEY_TILE]
    """

    places: torch.Tensor  # [sequences * tokens] in the packed batch
    blocks: torch.Tensor  # [sequences * tiles * KEY_TILE / block_size]
    positions: torch.Tensor  # [sequences, tokens] of the queries
    num_tiles: int
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        known = self.masks.get(window)
        if known is None:
            keys = torch.arange(self.num_tiles * KEY_TILE, device=self.positions.device)
            keys = keys.view(1, self.num_tiles, 1, 1, KEY_TILE)
            queries = self.positions[:, None, :, None, None]
            known = keys > queries
            if window is not None:
                known |= keys <= queries - window
            self.masks[window] = known
        return known


@dataclass(slots=True)
class _Groups(StepMetadata):
    groups: list[_Group]


class DenseBackend:
    name = "dense"
    block_size = 16

    def prepare(self, packed: PackedBatch, device: torch.device) -> _Groups:
        single: dict[int, list[int]] = {}
        groups: list[_Group] = []
        for i, row in enumerate(packed.rows):
            if len(row.token_ids) == 1:
                single.setdefault(_power_of_two(-(-row.end // KEY_TILE)), []).append(i)
            else:
                groups += self._chunks(row, int(packed.starts[i]), device)
        for num_tiles, members in single.items():
            places = packed.starts[members]
            rows = [packed.rows[i] for i in members]
            positions = packed.positions[places][:, None]
            groups.append(self._group(rows, places, positions, num_tiles, device))
        return _Groups(groups)

    def attend(self, query: torch.Tensor, cache: LayerCache, options: LayerOptions, metadata: StepMetadata) -> torch.Tensor:
        assert isinstance(metadata, _Groups)  # noqa: S101 - made by `prepare`
        heads, tokens, _ = query.shape
        out = query.new_zeros(tokens, heads, cache.values.shape[2])
        for group in metadata.groups:
            out.index_copy_(0, group.places, self._attend_group(query, cache, options, group).to(out.dtype))
        return out

    def _attend_group(self, query: torch.Tensor, cache: LayerCache, options: LayerOptions, group: _Group) -> torch.Tensor:
        """-> [sequences * tokens, heads, value size] float32"""
        kv_heads, _, size = cache.keys.shape
        sequences, tokens = group.positions.shape
        per_kv = query.shape[0] // kv_heads
        rows = tokens * per_kv
        padded = _round_up(rows, QUERY_ROWS if size <= WIDE_HEAD else WIDE_QUERY_ROWS)
        products = kv_heads * sequences * group.num_tiles

        # [kv heads, sequences, rows, size]; a kv head's queries of one token stand together
        q = query[:, group.places].float() * options.scaling
        q = q.view(kv_heads, per_kv, sequences, tokens, size).permute(0, 2, 3, 1, 4).reshape(kv_heads, sequences, rows, size)
        q = torch.nn.functional.pad(q, (0, 0, 0, padded - rows))
        q = q[:, :, None].expand(-1, -1, group.num_tiles, -1, -1).reshape(products, padded, size)
        scores = torch.bmm(q, self._gather(cache.keys, group, products).transpose(1, 2))
        weights, total = self._weights(scores, kv_heads, per_kv, options, group)

        part = torch.bmm(weights, self._gather(cache.values, group, products))
        part = part.view(kv_heads, sequences, group.num_tiles, padded, -1)
        summed = _sum_tiles(part)[:, :, :rows] / total[:, :, :rows, None]
        value_size = summed.shape[-1]
        summed = summed.view(kv_heads, sequences, tokens, per_kv, value_size).permute(1, 2, 0, 3, 4)
        return summed.reshape(sequences * tokens, kv_heads * per_kv, value_size)

    def _weights(
        self, scores: torch.Tensor, kv_heads: int, per_kv: int, options: LayerOptions, group: _Group
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """scores: [products, padded rows, KEY_TILE] -> exp(scores - max), in place, and its sums [kv heads, sequences,
        padded rows]. Rows of padding see everything."""
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        sequences, tokens = group.positions.shape
        rows = tokens * per_kv
        tiles = scores.view(kv_heads, sequences, group.num_tiles, -1, KEY_TILE)
        real = tiles[:, :, :, :rows].view(kv_heads, sequences, group.num_tiles, tokens, per_kv, KEY_TILE)
        real.masked_fill_(group.mask(options.sliding_window)[None], float("-inf"))
        highest = tiles.amax(dim=(2, 4), keepdim=True)
        sinks = self._sinks(options.sinks, kv_heads, tokens, highest)
        if sinks is not None:
            highest = torch.maximum(highest, sinks)
        tiles.sub_(highest).exp_()
        total = _sum_tiles(tiles.sum(dim=-1))
        if sinks is not None:
            total = total + torch.exp(sinks - highest)[:, :, 0, :, 0]
        return scores, total

    def _sinks(self, sinks: torch.Tensor | None, kv_heads: int, tokens: int, highest: torch.Tensor) -> torch.Tensor | None:
        """[heads] -> as `highest`, [kv heads, sequences, 1, padded rows, 1]"""
        if sinks is None:
            return None
        rows = sinks.float().view(kv_heads, 1, -1).expand(-1, tokens, -1).reshape(kv_heads, -1)
        rows = torch.nn.functional.pad(rows, (0, highest.shape[3] - rows.shape[1]))
        return rows[:, None, None, :, None].expand_as(highest)

    def _gather(self, cached: torch.Tensor, group: _Group, products: int) -> torch.Tensor:
        """cached: [kv heads, slots, size] -> [products, KEY_TILE, size] float32, block by block."""
        kv_heads, _, size = cached.shape
        blocks = cached.view(kv_heads, -1, self.block_size * size).index_select(1, group.blocks)
        return blocks.view(products, KEY_TILE, size).float()

    def _chunks(self, row: Row, at: int, device: torch.device) -> list[_Group]:
        groups = []
        for first in range(0, len(row.token_ids), QUERY_TILE):
            last = min(first + QUERY_TILE, len(row.token_ids))
            positions = np.arange(row.start + first, row.start + last)[None]
            num_tiles = -(-(row.start + last) // KEY_TILE)
            groups.append(self._group([row], np.arange(at + first, at + last), positions, num_tiles, device))
        return groups

    def _group(self, rows: Sequence[Row], places: Ints, positions: Ints, num_tiles: int, device: torch.device) -> _Group:
        blocks = block_tables(rows, num_tiles * KEY_TILE // self.block_size).reshape(-1)
        places_, blocks_, positions_ = (
            torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in (places, blocks, positions)
        )
        return _Group(places_, blocks_, positions_, num_tiles)


def _sum_tiles(parts: torch.Tensor) -> torch.Tensor:
    """parts: [kv heads, sequences, tiles, ...], summed over the tiles from the first to the last."""
    total = parts[:, :, 0]
    for i in range(1, parts.shape[2]):
        total = total + parts[:, :, i]
    return total


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
