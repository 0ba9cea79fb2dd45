"""Attention on CUDA in half precision, by torch's variable-length flash attention.

Where the device's kernel reads the cache through a block table (FlashAttention 3 does, with blocks of any size), it
does; elsewhere a sequence's keys and values are gathered end to end first. `num_splits=1` keeps a row's bits the same
in every batch. Chosen at load by the probe, on the device itself, and only where it agrees with the model alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from llm.attention.base import LayerCache, LayerOptions, StepMetadata
from llm.batch import PackedBatch, block_tables

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Ragged(StepMetadata):
    query_starts: torch.Tensor  # [rows + 1] int32
    key_starts: torch.Tensor  # [rows + 1] int32
    key_lengths: torch.Tensor  # [rows] int32
    tables: torch.Tensor  # [rows, blocks] int32
    slots: torch.Tensor  # [keys of all rows], where they are in the cache
    num_queries: int  # without the padding
    longest_query: int
    longest_key: int


class VarlenBackend:
    name = "varlen"
    block_size = 16

    def __init__(self) -> None:
        self._paged = _reads_block_tables(self.block_size)

    @staticmethod
    def usable(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype in _HALF

    def prepare(self, packed: PackedBatch, device: torch.device) -> _Ragged:
        lengths = np.array([row.end for row in packed.rows])
        tables = block_tables(packed.rows, -(-int(lengths.max()) // self.block_size))
        places = [np.arange(length) for length in lengths]
        slots = [
            table[at // self.block_size] * self.block_size + at % self.block_size
            for table, at in zip(tables, places, strict=True)
        ]

        def small(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        return _Ragged(
            query_starts=small(packed.starts),
            key_starts=small(np.concatenate(([0], np.cumsum(lengths)))),
            key_lengths=small(lengths),
            tables=small(tables),
            slots=torch.from_numpy(np.concatenate(slots)).to(device),
            num_queries=int(packed.starts[-1]),
            longest_query=int(np.diff(packed.starts).max()),
            longest_key=int(lengths.max()),
        )

    def attend(self, query: torch.Tensor, cache: LayerCache, options: LayerOptions, metadata: StepMetadata) -> torch.Tensor:
        """Raises ValueError for a layer with a soft cap or sinks, which these kernels don't have."""
        assert isinstance(metadata, _Ragged)  # noqa: S101 - made by `prepare`
        if options.softcap is not None or options.sinks is not None:
            raise ValueError("flash attention has no soft cap and no sinks")
        heads, tokens, _ = query.shape
        out = query.new_zeros(tokens, heads, cache.values.shape[2])
        real = query[:, : metadata.num_queries].transpose(0, 1).contiguous()
        attend = self._attend_paged if self._paged else self._attend_gathered
        out[: metadata.num_queries] = attend(real, cache, options, metadata)
        return out

    def _attend_paged(self, query: torch.Tensor, cache: LayerCache, options: LayerOptions, metadata: _Ragged) -> torch.Tensor:
        return _flash(
            query, _pages(cache.keys, self.block_size), _pages(cache.values, self.block_size), options, metadata, paged=True
        )

    def _attend_gathered(
        self, query: torch.Tensor, cache: LayerCache, options: LayerOptions, metadata: _Ragged
    ) -> torch.Tensor:
        keys, values = (part.index_select(1, metadata.slots).transpose(0, 1) for part in (cache.keys, cache.values))
        return _flash(query, keys.contiguous(), values.contiguous(), options, metadata, paged=False)


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    options: LayerOptions,
    metadata: _Ragged,
    *,
    paged: bool,
) -> torch.Tensor:
    """query: [tokens, heads, size]; keys and values: [keys, kv heads, size], or [blocks, block_size, kv heads, size]."""
    window = -1 if options.sliding_window is None else options.sliding_window - 1
    out = varlen_attn(
        query,
        keys,
        values,
        metadata.query_starts,
        metadata.key_starts,
        metadata.longest_query,
        metadata.longest_key,
        scale=options.scaling,
        window_size=(window, 0),
        enable_gqa=query.shape[1] != keys.shape[-2],
        seqused_k=metadata.key_lengths if paged else None,
        block_table=metadata.tables if paged else None,
        num_splits=1,
    )
    assert isinstance(out, torch.Tensor)  # noqa: S101 - nothing beside it was asked for
    return out


def _pages(cached: torch.Tensor, block_size: int) -> torch.Tensor:
    """[kv heads, slots, size] as a view [blocks, block_size, kv heads, size]"""
    kv_heads, _, size = cached.shape
    return cached.view(kv_heads, -1, block_size, size).permute(1, 2, 0, 3)


def _reads_block_tables(block_size: int) -> bool:
    """Whether this device's kernel takes pages of that size, found out by asking it."""
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    one = starts[1:]
    ragged = _Ragged(starts, starts, one, one[:, None], one.long(), 1, 1, 1)
    cached = _pages(torch.zeros(1, 2 * block_size, 64, dtype=torch.bfloat16, device="cuda"), block_size)
    query = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device="cuda")
    try:
        _flash(query, cached, cached, LayerOptions(1.0), ragged, paged=True)
        torch.cuda.synchronize()
    # The kernel's own refusal, by device and release of torch; then keys are gathered first, and the probe checks either way.
    except (RuntimeError, ValueError):
        return False
    return True
