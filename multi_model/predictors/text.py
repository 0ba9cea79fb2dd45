"""Text classifiers of transformers: texts of about one length share a forward."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Encoding, Tokenizer
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedConfig

from llm.exceptions import ModelRefused
from llm.light_imports import light_imports
from llm.loading import choose_device, choose_dtype
from multi_model.messages import Classes, PredictorSpec, Rejected, TextInput
from multi_model.predictors.base import serve
from multi_model.predictors.embedding import HeadedClassifier, SentenceEncoder

_MOST_TEXTS = 64  # in one forward
_MOST_TOKENS = 4096  # in one forward, padding included
_WASTE = 1.25  # the longest of a forward over the shortest, at most, and
_SLACK = 8  # tokens
_LONGEST_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class _Text:
    request: int
    place: int  # within the request
    ids: list[int]
    type_ids: list[int]


class TextClassifier:
    def __init__(self, spec: PredictorSpec) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.device = choose_device(spec.device)
        local = Path(spec.source).is_dir()
        where: dict[str, Any] = {
            "local_files_only": local,
            "cache_dir": None if local else spec.cache,
            "revision": spec.revision,
        }
        try:
            config = AutoConfig.from_pretrained(spec.source, **where)
            self._model, own_labels = _model(spec, config, choose_dtype(spec.dtype, self.device), where)
            self._tokenizer = _tokenizer(spec.source, where)
        except ModelRefused:
            raise
        except Exception as error:  # those of transformers, tokenizers and safetensors have no common base
            reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
            raise ModelRefused(f"{spec.name} can't be loaded: {reason}") from error
        self.labels = _labels(spec, own_labels)
        self._longest = _longest(spec.source, config)
        self._pad = config.pad_token_id or 0
        self._typed = getattr(config, "type_vocab_size", 0) > 1
        self._model.to(self.device).eval()

    def predict(self, requests: Sequence[TextInput]) -> tuple[list[Any], int]:
        answers: list[Any] = [None] * len(requests)
        texts: list[_Text] = []
        truncated: dict[int, tuple[bool, ...]] = {}
        for i, request in enumerate(requests):
            encodings = self._tokenizer.encode_batch(list(request.texts))
            too_long = [place for place, encoding in enumerate(encodings) if len(encoding.ids) > self._longest]
            empty = [place for place, encoding in enumerate(encodings) if not encoding.ids]
            if empty:
                answers[i] = _rejected(request, empty[0], "has no tokens, and this model's tokenizer adds none")
                continue
            if too_long and not request.truncate:
                sentence = f"has {len(encodings[too_long[0]].ids)} tokens, and the model reads {self._longest}"
                answers[i] = _rejected(request, too_long[0], f"{sentence}; truncate: true has it cut")
                continue
            truncated[i] = tuple(place in too_long for place in range(len(encodings)))
            for place in too_long:
                encodings[place] = self._cut(request.texts[place])
            texts += [_Text(i, place, encoding.ids, encoding.type_ids) for place, encoding in enumerate(encodings)]
        rows: dict[tuple[int, int], tuple[float, ...]] = {}
        for group in _groups(texts):
            for text, row in zip(group, self._forward(group).tolist(), strict=True):
                rows[text.request, text.place] = tuple(row)
        for i, cut in truncated.items():
            answers[i] = Classes(tuple(rows[i, place] for place in range(len(cut))), cut)
        return answers, len(texts)

    def _forward(self, group: list[_Text]) -> torch.Tensor:
        """-> [texts, classes] float32, each row's sum 1. What is padded is masked: a text's answer is its own."""
        width = max(len(text.ids) for text in group)
        ids = torch.full((len(group), width), self._pad)
        mask = torch.zeros((len(group), width), dtype=torch.int64)
        types = torch.zeros((len(group), width), dtype=torch.int64)
        for row, text in enumerate(group):
            ids[row, : len(text.ids)] = torch.tensor(text.ids)
            mask[row, : len(text.ids)] = 1
            types[row, : len(text.ids)] = torch.tensor(text.type_ids)
        given = {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": types} if self._typed else {})
        logits: torch.Tensor = self._model(**{name: tensor.to(self.device) for name, tensor in given.items()}).logits
        return logits.float().softmax(-1).cpu()

    def _cut(self, text: str) -> Encoding:
        self._tokenizer.enable_truncation(self._longest)
        try:
            return self._tokenizer.encode(text)
        finally:
            self._tokenizer.no_truncation()


def _rejected(request: TextInput, place: int, sentence: str) -> Rejected:
    return Rejected(f"[{place}]" if request.listed else "", sentence)


def _groups(texts: Sequence[_Text]) -> list[list[_Text]]:
    """Of about one length each, shortest first."""
    groups: list[list[_Text]] = []
    for text in sorted(texts, key=lambda text: len(text.ids)):
        group = groups[-1] if groups else []
        shortest = len(group[0].ids) if group else 0
        close = len(text.ids) <= max(_WASTE * shortest, shortest + _SLACK)
        if group and close and len(group) < _MOST_TEXTS and (len(group) + 1) * len(text.ids) <= _MOST_TOKENS:
            group.append(text)
        else:
            groups.append([text])
    return groups


def _tokenizer(source: str, where: dict[str, Any]) -> Tokenizer:
    file = Path(source) / "tokenizer.json"
    if file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
    else:
        tokenizer = AutoTokenizer.from_pretrained(source, **where).backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _model(
    spec: PredictorSpec, config: PreTrainedConfig, dtype: torch.dtype, where: dict[str, Any]
) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """-> the classifier, and its own labels"""
    if spec.head is not None:
        headed = HeadedClassifier(SentenceEncoder.load(Path(spec.source), dtype), Path(spec.head))
        return headed, headed.labels
    with light_imports():
        model, report = AutoModelForSequenceClassification.from_pretrained(
            spec.source, config=config, dtype=dtype, output_loading_info=True, **where
        )
    if report["missing_keys"]:  # transformers would go on with random numbers there
        raise ModelRefused(f"{spec.name} lacks {', '.join(sorted(report['missing_keys'])[:3])}")
    named: dict[Any, str] = dict(config.id2label or {})
    return model, tuple(str(named[key]) for key in sorted(named, key=int))


def _labels(spec: PredictorSpec, own: tuple[str, ...]) -> tuple[str, ...]:
    if spec.labels is not None and len(spec.labels) != len(own):
        raise ModelRefused(f"{spec.name} has {len(own)} classes, and the catalogue names {len(spec.labels)} labels")
    return spec.labels or own


def _longest(source: str, config: PreTrainedConfig) -> int:
    """Tokens that the model reads. Models of RoBERTa's kind count positions from their padding's id on."""
    positions = getattr(config, "max_position_embeddings", None) or 512
    if "roberta" in config.model_type or config.model_type in {"camembert", "longformer"}:
        positions -= (config.pad_token_id or 0) + 1
    file = Path(source) / "tokenizer_config.json"
    stated = json.loads(file.read_text()).get("model_max_length", positions) if file.is_file() else positions
    return int(min(positions, stated))


def run(spec: PredictorSpec, tasks: Connection, results: Connection) -> None:
    serve(TextClassifier, spec, tasks, results)
