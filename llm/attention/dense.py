"""Attention in plain torch: right on every device, and the reference for every other backend.

The keys of a sequence are summed in tiles of KEY_TILE positions, counted from its beginning, one tile after the other:

    scores  [kv heads, sequences, tiles, query rows, KEY_TILE]     one product per tile, all of the same size
    out     = (tile 0 + tile 1 + ...) / (sum 0 + sum 1 + ...)       masked positions and tiles add exactly zero

So the bits of a token depend on its own sequence only: not on the batch, the chunk it came in, or how many tiles others
need. A product of few rows goes other ways in the libraries than one of many, so query rows are padded to a multiple.

Rows with one token are computed together, grouped by their number of tiles; longer ones one by one.
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
    """Sequences with the same number of tokens and tiles in this step; what their layers share.

    masks: per sliding window, True where a query doesn't see a key: [sequences, tiles, tokens, 1, KEY_TILE]
    queries: per shape of the heads, the padded query rows of every product; the padding stays zero from layer to layer
    """

    places: torch.Tensor | None  # [sequences * tokens] in the packed batch; None: the batch from its beginning
    blocks: torch.Tensor  # [sequences * tiles * KEY_TILE / block_size]
    positions: torch.Tensor  # [sequences, tokens] of the queries
    num_tiles: int
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    queries: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

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

    def query_rows(self, kv_heads: int, per_kv: int, size: int) -> torch.Tensor:
        """[kv heads, sequences, tiles, padded rows, size] float32"""
        known = self.queries.get((kv_heads, per_kv, size))
        if known is None:
            sequences, tokens = self.positions.shape
            rows = _round_up(tokens * per_kv, QUERY_ROWS if size <= WIDE_HEAD else WIDE_QUERY_ROWS)
            known = torch.zeros(kv_heads, sequences, self.num_tiles, rows, size, device=self.positions.device)
            self.queries[kv_heads, per_kv, size] = known
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
                single.setdefault(-(-row.end // KEY_TILE), []).append(i)
            else:
                groups += self._chunks(row, int(packed.starts[i]), device)
        for num_tiles, members in single.items():
            places = packed.starts[members]
            rows = [packed.rows[i] for i in members]
            positions = packed.positions[places][:, None]
            everything = len(members) == len(packed.rows)
            groups.append(self._group(rows, None if everything else places, positions, num_tiles, device))
        return _Groups(groups)

    def attend(self, query: torch.Tensor, cache: LayerCache, options: LayerOptions, metadata: StepMetadata) -> torch.Tensor:
        assert isinstance(metadata, _Groups)  # noqa: S101 - made by `prepare`
        heads, tokens, _ = query.shape
        out = query.new_zeros(tokens, heads, cache.values.shape[2])
        for group in metadata.groups:
            if group.places is None:
                self._attend_group(query, cache, options, group, out)
            else:
                part = out.new_empty(len(group.places), heads, out.shape[2])
                self._attend_group(query[:, group.places], cache, options, group, part)
                out.index_copy_(0, group.places, part)
        return out

    def _attend_group(
        self, query: torch.Tensor, cache: LayerCache, options: LayerOptions, group: _Group, out: torch.Tensor
    ) -> None:
        """query: [heads, sequences * tokens or more, size]; out: [sequences * tokens or more, heads, value size]"""
        kv_heads, _, size = cache.keys.shape
        sequences, tokens = group.positions.shape
        per_kv, count = query.shape[0] // kv_heads, sequences * tokens
        rows = tokens * per_kv
        q = group.query_rows(kv_heads, per_kv, size)
        # A kv head's queries of one token stand together: [kv heads, sequences, 1, tokens, per kv head, size]
        ordered = query[:, :count].view(kv_heads, per_kv, sequences, tokens, size).permute(0, 2, 3, 1, 4)[:, :, None]
        q[..., :rows, :].view(kv_heads, sequences, group.num_tiles, tokens, per_kv, size).copy_(ordered)

        keys, values = self._gather(cache, group)
        q = q.view(keys.shape[0], -1, size)
        scores = torch.baddbmm(q.new_empty(1), q, keys.transpose(1, 2), beta=0, alpha=options.scaling)
        total = self._weigh(scores, kv_heads, per_kv, options, group)
        part = torch.bmm(scores, values).view(kv_heads, sequences, group.num_tiles, -1, values.shape[2])
        summed = _sum_tiles(part)[:, :, :rows] / total[:, :, :rows, None]
        into = out[:count].view(sequences, tokens, kv_heads, per_kv, -1).permute(2, 0, 1, 3, 4)
        into.copy_(summed.view(kv_heads, sequences, tokens, per_kv, -1))

    def _weigh(self, scores: torch.Tensor, kv_heads: int, per_kv: int, options: LayerOptions, group: _Group) -> torch.Tensor:
        """scores: [products, padded rows, KEY_TILE], becomes exp(scores - max); returns the sums of that: [kv heads,
        sequences, padded rows]. Rows of padding see everything."""
        if options.softcap is not None:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
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
        return total

    def _sinks(self, sinks: torch.Tensor | None, kv_heads: int, tokens: int, highest: torch.Tensor) -> torch.Tensor | None:
        """[heads] -> as `highest`, [kv heads, sequences, 1, padded rows, 1]"""
        if sinks is None:
            return None
        rows = sinks.float().view(kv_heads, 1, -1).expand(-1, tokens, -1).reshape(kv_heads, -1)
        rows = torch.nn.functional.pad(rows, (0, highest.shape[3] - rows.shape[1]))
        return rows[:, None, None, :, None].expand_as(highest)

    def _gather(self, cache: LayerCache, group: _Group) -> tuple[torch.Tensor, torch.Tensor]:
        """The tiles' keys and values, [kv heads * sequences * tiles, KEY_TILE, size] each, float32."""
        if cache.joined is None:
            return self._tiles(cache.keys, group), self._tiles(cache.values, group)
        keys, values = self._tiles(cache.joined, group).chunk(2)
        return keys, values

    def _tiles(self, cached: torch.Tensor, group: _Group) -> torch.Tensor:
        heads, _, size = cached.shape
        blocks = cached.view(heads, -1, self.block_size * size).index_select(1, group.blocks)
        return blocks.view(-1, KEY_TILE, size).float()

    def _chunks(self, row: Row, at: int, device: torch.device) -> list[_Group]:
        groups = []
        for first in range(0, len(row.token_ids), QUERY_TILE):
            last = min(first + QUERY_TILE, len(row.token_ids))
            positions = np.arange(row.start + first, row.start + last)[None]
            num_tiles = -(-(row.start + last) // KEY_TILE)
            groups.append(self._group([row], np.arange(at + first, at + last), positions, num_tiles, device))
        return groups

    def _group(self, rows: Sequence[Row], places: Ints | None, positions: Ints, num_tiles: int, device: torch.device) -> _Group:
        blocks = block_tables(rows, num_tiles * KEY_TILE // self.block_size).reshape(-1)
        return _Group(
            None if places is None else torch.from_numpy(places).to(device),
            torch.from_numpy(blocks).to(device),
            torch.from_numpy(np.ascontiguousarray(positions)).to(device),
            num_tiles,
        )


def _sum_tiles(parts: torch.Tensor) -> torch.Tensor:
    """parts: [kv heads, sequences, tiles, ...], summed over the tiles from the first to the last."""
    total = parts[:, :, 0]
    for i in range(1, parts.shape[2]):
        total = total + parts[:, :, i]
    return total


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
