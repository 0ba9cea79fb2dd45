"""The matrix products of a model: weights packed for the CPU, and rows that have the same bits in every batch.

The libraries choose another kernel, with another order of sums, by the number of rows: a row alone, one of 16 and one of
64 can differ in their last bits. So a product of many rows is cut into tiles of sizes that a probe has found to agree, for
all shapes of a model, wherever in the tile a row stands (`agreement`); and few rows are padded to one of them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llm.light_imports import light_imports

_REFERENCE = 16  # rows: the size that the others must agree with
# Few sizes are good for speed, too: a library makes a kernel for each number of rows that it meets.
TILES = (1, 2, 4, 8, _REFERENCE, 32, 64, 128, 256)
_DISTINCT = 4096  # outputs of a product that is tried; more of them repeat these

Layer = torch.nn.Linear | Conv1D
Product = Callable[[torch.Tensor], torch.Tensor]
_mkldnn: Any = torch.ops.mkldnn  # has no types


def pack_weights(model: PreTrainedModel) -> None:
    """Has oneDNN lay out each layer's weights once, where otherwise it does so in every product; what is shared with the
    embedding is then there twice. Where this torch or CPU can't, nothing happens."""
    for layer in _layers(model):
        _pack(layer)


def tile_products(model: PreTrainedModel, tiles: Sequence[int]) -> None:
    """Has every product of the model computed in tiles, smallest first, from now on. Call it once."""
    for layer in _layers(model):
        layer.forward = partial(_in_tiles, layer.forward, tuple(reversed(tiles)))  # type: ignore[method-assign]


def padded(count: int, tiles: Sequence[int]) -> int:
    """The number of rows to compute in place of `count`: few are one tile, since reading the weights is what takes the
    time, and more are cut into tiles of at least the reference's size. tiles: those that agree, smallest first; none:
    nothing to pad for."""
    if not tiles:
        return count
    multiple = next(size for size in tiles if size >= min(count, _REFERENCE))
    return -(-count // multiple) * multiple


@torch.inference_mode()
def agreement(model: PreTrainedModel, thread_counts: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of rows, smallest first, and of threads, the largest first, at all of which every product of this model
    on this machine gives a row the same bits; no rows where they depend on a row's place.

    thread_counts: to choose from, the largest first. Where the bits depend on them, only the largest is left.
    """
    for counts in dict.fromkeys((tuple(thread_counts), (thread_counts[0],))):
        tiles = _tiles_that_agree(model, counts)
        torch.set_num_threads(thread_counts[0])
        if tiles:
            return tiles, counts
    return (), (thread_counts[0],)


def _pack(layer: Layer) -> None:
    weight = layer.weight.detach()
    if not _packs(weight):
        return
    packed = _mkldnn._reorder_linear_weight(weight.t().contiguous() if isinstance(layer, Conv1D) else weight, _REFERENCE)
    layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    layer.forward = partial(_packed_product, packed, layer.bias)  # type: ignore[method-assign]


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(_mkldnn, "_linear_pointwise"):
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and bool(_mkldnn._is_mkldnn_bf16_supported()))


def _packed_product(packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product


def _tiles_that_agree(model: PreTrainedModel, counts: Sequence[int]) -> tuple[int, ...]:
    agreeing = list(TILES)
    seen = set()
    for layer in _layers(model):
        kind = (_shape(layer), layer.bias is None)
        if kind not in seen:
            seen.add(kind)
            agreeing = _agreeing(*_cancelling(layer, agreeing[-1]), agreeing, counts)
            if not agreeing:
                return ()
    return tuple(agreeing)


def _shape(layer: Layer) -> tuple[int, int]:
    """(inputs, outputs)"""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def _cancelling(layer: Layer, count: int) -> tuple[Product, torch.Tensor]:
    """A product as this layer's with other weights, and rows for it, [1, count, inputs]. Every sum is one of p and -p, so
    what comes out is the rounding of the partial sums alone: another order shows, which the rounding of a usual result to
    half precision would hide nearly always."""
    (inputs, outputs), device, dtype = _shape(layer), layer.weight.device, layer.weight.dtype
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(inputs, generator=generator)

    def halves(number: int, sign: int) -> torch.Tensor:
        half = torch.randn(number, inputs // 2, generator=generator)
        return torch.cat([half, sign * half, torch.zeros(number, inputs % 2)], dim=1)[:, order]

    some = halves(min(outputs, _DISTINCT), -1)
    weight = some.repeat(-(-outputs // len(some)), 1)[:outputs]
    trial = _without_weights(layer)
    trial.weight = torch.nn.Parameter((weight.t() if isinstance(layer, Conv1D) else weight).contiguous().to(device, dtype))
    if layer.bias is not None:
        trial.bias = torch.nn.Parameter(torch.zeros(outputs, device=device, dtype=dtype))
    _pack(trial)
    return trial.forward, halves(count, 1)[None].to(device, dtype)


def _without_weights(layer: Layer) -> Layer:
    inputs, outputs = _shape(layer)
    with light_imports(), torch.device("meta"):
        if isinstance(layer, Conv1D):
            conv: Conv1D = Conv1D(outputs, inputs)  # type: ignore[no-untyped-call]
            return conv
        return torch.nn.Linear(inputs, outputs, bias=layer.bias is not None)


def _agreeing(product: Product, rows: torch.Tensor, sizes: list[int], counts: Sequence[int]) -> list[int]:
    """rows: [1, largest size, inputs]. Those of the sizes that agree with the reference at every number of threads; none
    where that one doesn't agree with itself."""
    torch.set_num_threads(counts[-1])
    expected = _in_tiles(product, (_REFERENCE,), rows)
    for count in counts:
        torch.set_num_threads(count)
        moved = _in_tiles(product, (_REFERENCE,), rows.roll(1, dims=1)).roll(-1, dims=1)
        if not torch.equal(moved, expected):
            return []
        sizes = [size for size in sizes if _same(product, size, rows[:, : max(size, _REFERENCE)], expected)]
    return sizes if _REFERENCE in sizes else []


def _same(product: Product, size: int, rows: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(_in_tiles(product, (size,), rows), expected[:, : rows.shape[1]])


def _in_tiles(product: Product, sizes: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
    """rows: [1, rows, inputs]. Cut into the largest sizes that still fit; what is left over is one more piece."""
    pieces = list(_cuts(rows.shape[1], sizes))
    if len(pieces) <= 1:  # none where a step wants no logits: the head gets no rows
        return product(rows)
    return torch.cat([product(piece) for piece in torch.split(rows, pieces, dim=1)], dim=1)


def _cuts(count: int, sizes: tuple[int, ...]) -> Iterator[int]:
    for size in sizes:
        while count >= size:
            yield size
            count -= size
    if count:
        yield count


def _layers(model: PreTrainedModel) -> Iterator[Layer]:
    for module in model.modules():
        if isinstance(module, Layer):
            yield module
