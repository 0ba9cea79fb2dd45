"""Matrix products whose rows have the same bits in every batch: computed in tiles of a few fixed numbers of rows.

The libraries choose another kernel, with another order of sums, by the number of rows: a row alone, one of 16 and one of
64 differ in their last bits. So a product of many rows is cut into tiles of sizes that a probe has found to agree, for
all shapes of a model, wherever in the tile a row stands (`agreeing_tiles`); and rows are padded to the smallest of them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_SMALLEST = 16  # rows; fewer cost as much: reading the weights is what takes the time
_LARGER = (32, 64, 128, 256)

Product = Callable[[torch.Tensor], torch.Tensor]


def tile_products(model: PreTrainedModel, tiles: Sequence[int]) -> None:
    """Has every product of the model computed in tiles, from now on. Call it once."""
    for module in _layers(model):
        module.forward = partial(_in_tiles, module.forward, tuple(sorted(tiles, reverse=True)))  # type: ignore[method-assign]


@torch.inference_mode()
def agreeing_tiles(model: PreTrainedModel, dtype: torch.dtype) -> tuple[int, ...]:
    """The numbers of rows, smallest first, at which every product of this model on this machine gives a row the same
    bits; empty where a row's bits depend on its place.

    The same as in one thread, where any number does that: then two services with other numbers of threads agree.
    """
    for reference_threads in dict.fromkeys((1, torch.get_num_threads())):
        tiles = _tiles_that_agree(model, dtype, reference_threads)
        if tiles:
            return tiles
    return ()


def _tiles_that_agree(model: PreTrainedModel, dtype: torch.dtype, reference_threads: int) -> tuple[int, ...]:
    agreeing = [_SMALLEST, *_LARGER]
    seen = set()
    for layer in _layers(model):
        shape = (tuple(layer.weight.shape), layer.bias is None)
        if shape not in seen:
            seen.add(shape)
            agreeing = _agreeing(layer.forward, _inputs(layer, agreeing[-1], dtype), agreeing, reference_threads)
            if not agreeing:
                return ()
    return tuple(agreeing)


def _agreeing(product: Product, rows: torch.Tensor, sizes: list[int], reference_threads: int) -> list[int]:
    """rows: [1, largest size, inputs]. Those of the sizes that agree with the smallest in the reference's threads; none
    where that one doesn't agree with itself."""
    smallest, threads = sizes[0], torch.get_num_threads()
    torch.set_num_threads(reference_threads)
    expected = _in_tiles(product, (smallest,), rows)
    torch.set_num_threads(threads)
    moved = _in_tiles(product, (smallest,), rows.roll(1, dims=1)).roll(-1, dims=1)
    if not torch.equal(moved, expected):
        return []
    found = [size for size in sizes if torch.equal(_in_tiles(product, (size,), rows), expected)]
    return found if smallest in found else []


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


def _layers(model: PreTrainedModel) -> Iterator[torch.nn.Linear | Conv1D]:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            yield module


def _inputs(layer: torch.nn.Linear | Conv1D, count: int, dtype: torch.dtype) -> torch.Tensor:
    size = layer.weight.shape[0 if isinstance(layer, Conv1D) else 1]
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, count, size, generator=generator).to(layer.weight.device, dtype)
