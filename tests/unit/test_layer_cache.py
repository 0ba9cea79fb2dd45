"""A cache is zero at first, and takes memory only where it has been written."""

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from llm.attention.base import LayerCache, LayerShape

_SLOTS = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [LayerShape(2, 64, 64), LayerShape(2, 64, 32)])
def test_memory_comes_as_it_is_written(shape: LayerShape, dtype: torch.dtype) -> None:
    before = psutil.Process().memory_info().rss
    cache = LayerCache.zeros(shape, _SLOTS, dtype, torch.device("cpu"))
    assert cache.keys.shape == (2, _SLOTS, 64)
    assert cache.values.shape == (2, _SLOTS, shape.value_size)
    assert cache.keys.dtype == cache.values.dtype == dtype
    places = torch.tensor([5, _SLOTS - 1])
    cache.keys.index_copy_(1, places, torch.ones(2, 2, 64, dtype=dtype))
    assert cache.keys[:, places].eq(1).all()
    assert cache.keys[:, 6:2000].eq(0).all()
    assert cache.values[:, :2000].eq(0).all()
    assert psutil.Process().memory_info().rss - before < _SLOTS * 2 * 64 * dtype.itemsize / 4
