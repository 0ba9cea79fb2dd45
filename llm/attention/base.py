"""Our attention function, as transformers calls it, and the interface that a backend fills.

The function is registered under our own name; a model that is built with it passes its queries, keys and values here, and
what it says about the layer as keywords. A keyword that we don't know, and that says anything, is refused: a swallowed
one (sinks, a bias, a mask) would serve that family silently wrong.
"""

import math
import mmap
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from llm.batch import PackedBatch

NAME = "quartet"
_HARMLESS = frozenset(
    {"output_router_logits", "use_cache", "position_ids", "cache_position", "is_causal", "position_embeddings"}
)


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_kv_heads: int
    key_size: int  # per head
    value_size: int

    @property
    def numbers_per_token(self) -> int:
        return self.num_kv_heads * (self.key_size + self.value_size)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """keys: [kv heads, slots, key size], values: [kv heads, slots, value size], in the model's dtype.

    joined: both as one tensor, [2 * kv heads, slots, size], where they are of one size: then one read gets both.
    """

    keys: torch.Tensor
    values: torch.Tensor
    joined: torch.Tensor | None

    @classmethod
    def zeros(cls, shape: LayerShape, slots: int, dtype: torch.dtype, device: torch.device) -> "LayerCache":
        heads = shape.num_kv_heads
        if shape.key_size == shape.value_size:
            joined = _zeros((2 * heads, slots, shape.key_size), dtype, device)
            return cls(joined[:heads], joined[heads:], joined)
        keys, values = (_zeros((heads, slots, size), dtype, device) for size in (shape.key_size, shape.value_size))
        return cls(keys, values, None)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the system provides the memory page by page as it is written; torch itself would write all of it at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What a layer asks of its attention beyond plain causal softmax."""

    scaling: float
    sliding_window: int | None = None  # tokens that a query sees, itself included
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads], a logit without a value


class StepMetadata(Protocol):
    """What a backend works out once per step and uses in every layer."""


class AttentionBackend(Protocol):
    """Must give a token the same bits whatever else is in the step and however its sequence was cut into chunks."""

    name: str
    block_size: int  # tokens in a block of the cache

    def prepare(self, packed: PackedBatch, device: torch.device) -> StepMetadata: ...

    def attend(self, query: torch.Tensor, cache: LayerCache, options: LayerOptions, metadata: StepMetadata) -> torch.Tensor:
        """query: [heads, tokens, key size] -> [tokens, heads, value size]. The step's keys and values are in the cache."""
        ...


@dataclass(slots=True)
class Step:
    """One forward. Reaches our function as the model's keyword `quartet_step`."""

    slots: torch.Tensor  # [tokens]
    caches: dict[int, LayerCache]
    backend: AttentionBackend
    metadata: StepMetadata

    def run(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        cache = self.caches[layer]
        cache.keys.index_copy_(1, self.slots, key)
        # A masked slot's value is multiplied by zero, which must stay zero whoever wrote it.
        cache.values.index_copy_(1, self.slots, torch.nan_to_num(value))
        return self.backend.attend(query, cache, options, self.metadata)


@dataclass(slots=True)
class Survey:
    """A first forward that only asks which layers there are and what they cache."""

    shapes: dict[int, LayerShape]

    def run(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        self.shapes[layer] = LayerShape(key.shape[0], key.shape[2], value.shape[2])
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    quartet_step: Step | Survey | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, heads, tokens, key size], key and value: [1, kv heads, tokens, size] -> [1, tokens, heads, value size].

    Raises ValueError for what this function doesn't do.
    """
    unknown = [name for name, given in others.items() if name not in _HARMLESS and given is not None and given is not False]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if unknown:
        raise ValueError(f"the attention of this model asks for {', '.join(unknown)}")
    if quartet_step is None:
        raise ValueError("this model doesn't hand its keywords down to its attention")
    if getattr(module, "is_causal", True) is False:
        raise ValueError("the attention of this model isn't causal")
    options = LayerOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    layer = module.layer_idx
    assert isinstance(layer, int)  # noqa: S101 - transformers numbers its layers
    return quartet_step.run(layer, query[0], key[0], value[0], options).unsqueeze(0), None


def register() -> None:
    """Under our name. No mask is registered with it, so transformers builds none."""
    AttentionInterface.register(NAME, attend)
