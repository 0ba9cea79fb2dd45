"""Image classifiers: pictures are decoded side by side, and stacked for the forward."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from llm.loading import choose_device, choose_dtype
from multi_model.messages import Classes, ImageInput, PredictorSpec, Rejected
from multi_model.predictors.base import serve
from multi_model.predictors.image_models import load_image_model
from multi_model.predictors.pictures import BadPicture, decode, middle

# Images in one forward. On a CPU the activations of more don't stay in its caches: 16 took twice the time of 4 x 4.
_MOST_IMAGES = {"cpu": 4, "cuda": 32}


@dataclass(frozen=True, slots=True)
class _Fault:
    sentence: str


class ImageClassifier:
    def __init__(self, spec: PredictorSpec) -> None:
        self.device = choose_device(spec.device)
        model = load_image_model(spec)
        self.labels = model.labels
        self._prepare, self._max_pixels = model.prepare, spec.max_pixels
        self._dtype = choose_dtype(spec.dtype, self.device)
        self._module = model.module.eval().to(self.device, self._dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def predict(self, requests: Sequence[ImageInput]) -> tuple[list[Any], int]:
        read = iter(self._map_decode([image for request in requests for image in request.images]))
        pictures = [[next(read) for _ in request.images] for request in requests]
        answers: list[Any] = [_rejected(request, found) for request, found in zip(requests, pictures, strict=True)]
        good = [i for i, answer in enumerate(answers) if answer is None]
        stack = [picture for i in good for picture in pictures[i] if isinstance(picture, torch.Tensor)]
        rows = iter(self._classify(stack))
        for i in good:
            answers[i] = Classes(tuple(next(rows) for _ in pictures[i]))
        return answers, len(stack)

    def _map_decode(self, images: list[bytes]) -> list[torch.Tensor | _Fault]:
        threads = torch.get_num_threads()
        if threads == 1 or len(images) == 1:
            return [self._decode(image) for image in images]
        with ThreadPoolExecutor(threads) as decoders:
            return list(decoders.map(self._decode, images))

    def _decode(self, image: bytes) -> torch.Tensor | _Fault:
        """-> [3, height, width]"""
        try:
            return self._prepare(middle(decode(image, self._max_pixels)))
        except BadPicture as bad:
            return _Fault(str(bad))

    def _classify(self, pictures: list[torch.Tensor]) -> list[tuple[float, ...]]:
        most = _MOST_IMAGES[self.device.type]
        rows: list[tuple[float, ...]] = []
        for i in range(0, len(pictures), most):
            stacked = torch.stack(pictures[i : i + most]).to(self.device, self._dtype, memory_format=torch.channels_last)
            rows += map(tuple, self._module(stacked).float().softmax(-1).cpu().tolist())
        return rows


def _rejected(request: ImageInput, pictures: list[torch.Tensor | _Fault]) -> Rejected | None:
    for place, picture in enumerate(pictures):
        if isinstance(picture, _Fault):
            return Rejected(f"[{place}]" if request.listed else "", picture.sentence)
    return None


def run(spec: PredictorSpec, tasks: Connection, results: Connection) -> None:
    serve(ImageClassifier, spec, tasks, results)
