"""Sentence embeddings: an encoder's token vectors pooled as its folder says, and a linear head on them where one is given.

The folder is one of sentence-transformers: `1_Pooling/config.json` says how tokens become one vector, and `modules.json`
whether that is scaled to length 1.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from safetensors import safe_open
from transformers import AutoModel

from llm.exceptions import ModelRefused
from llm.light_imports import light_imports

_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}


class SentenceEncoder(torch.nn.Module):
    """Ids and mask [texts, tokens], padded on the right -> [texts, width] float32."""

    def __init__(self, model: torch.nn.Module, pooling: str, *, unit: bool) -> None:
        super().__init__()
        self._model, self._pooling, self._unit = model, pooling, unit

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> Self:
        """Raises ModelRefused for a pooling of another kind, or what transformers raises."""
        with light_imports():
            model = AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return cls(model.eval(), _pooling(folder), unit=_scaled(folder))

    @property
    def width(self) -> int:
        return int(self._model.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def forward(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        states = self._model(input_ids=input_ids, attention_mask=attention_mask, **more).last_hidden_state.float()
        match self._pooling:
            case "cls":
                vectors = states[:, 0]
            case "last":
                vectors = states[torch.arange(len(states)), attention_mask.sum(1) - 1]
            case _:
                mask = attention_mask[:, :, None].float()
                vectors = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(vectors) if self._unit else vectors


class HeadedClassifier(torch.nn.Module):
    """As a classifier of transformers: answers an object with `logits`, [texts, classes]."""

    def __init__(self, encoder: SentenceEncoder, head: Path) -> None:
        """head: `weight` [classes, width] and `bias` [classes], and `labels`, as JSON, in the metadata. Raises ModelRefused."""
        super().__init__()
        self._encoder = encoder
        with safe_open(head, "pt") as file:
            told = file.metadata() or {}
            weight, bias = file.get_tensor("weight").float(), file.get_tensor("bias").float()
        self.labels: tuple[str, ...] = tuple(json.loads(told["labels"]))
        if weight.shape != (len(self.labels), encoder.width) or bias.shape != (len(self.labels),):
            raise ModelRefused(f"{head.name} does not fit: it is {list(weight.shape)}, for vectors of {encoder.width}")
        self._head = torch.nn.Linear(encoder.width, len(self.labels))
        self._head.weight.data, self._head.bias.data = weight, bias

    def forward(self, **given: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self._head(self._encoder(**given)))


def _pooling(folder: Path) -> str:
    said = json.loads((folder / "1_Pooling" / "config.json").read_text())
    modes = [mode for mode, chosen in said.items() if mode.startswith("pooling_mode_") and chosen]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelRefused(f"{folder.name} pools by {', '.join(modes) or 'nothing'}, which isn't offered")
    return _POOLINGS[modes[0]]


def _scaled(folder: Path) -> bool:
    modules = json.loads((folder / "modules.json").read_text())
    return any(module["type"].endswith("Normalize") for module in modules)
