"""Image architectures by name: the module, what it does to a picture first, and the names of its classes.

Those of torchvision, and EfficientNet-Lite from its package, whose preprocessing is that of the paper's code
(https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import is_zipfile

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file

from llm.exceptions import ModelRefused
from llm.light_imports import light_imports
from multi_model.messages import PredictorSpec

with light_imports():
    import torchvision.models

_LITE = "efficientnet-lite"
_BORDER = 32  # pixels that the middle square leaves out, at the model's own size


@dataclass(frozen=True, slots=True)
class ImageModel:
    """prepare: a picture -> [3, height, width] float32"""

    module: torch.nn.Module
    prepare: Callable[[Image.Image], torch.Tensor]
    labels: tuple[str, ...]


def load_image_model(spec: PredictorSpec) -> ImageModel:
    """On the CPU, in the weights' own format. Raises ModelRefused."""
    name = spec.architecture or ""
    model = _lite(name, spec) if name.startswith(_LITE) else _torchvision(name, spec)
    weights = _weights(spec, name)
    try:
        missing, unexpected = model.module.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # other shapes
        raise ModelRefused(f"{spec.name} does not fit {name}: {error}") from error
    wrong = [key for key in missing if not key.endswith("num_batches_tracked")] + list(unexpected)
    if wrong:
        raise ModelRefused(f"{spec.name} does not fit {name}, as {', '.join(sorted(wrong)[:3])} shows")
    return model


def _torchvision(name: str, spec: PredictorSpec) -> ImageModel:
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise ModelRefused(f"{spec.name}: {name!r} is no image classifier of torchvision, which `architecture` must name")
    known = torchvision.models.get_model_weights(name).DEFAULT
    labels = spec.labels or tuple(known.meta["categories"])
    return ImageModel(torchvision.models.get_model(name, num_classes=len(labels)), known.transforms(), labels)


def _lite(name: str, spec: PredictorSpec) -> ImageModel:
    try:
        package = importlib.import_module("efficientnet_lite_pytorch")
    except ImportError:
        raise ModelRefused(f"{spec.name} needs the package efficientnet-lite-pytorch, which is not installed") from None
    labels = spec.labels or tuple(torchvision.models.MobileNet_V2_Weights.DEFAULT.meta["categories"])
    try:
        size: int = package.EfficientNet.get_image_size(name)
        module = package.EfficientNet.from_name(name, num_classes=len(labels))
    except (ValueError, KeyError):
        raise ModelRefused(f"{spec.name}: there is no {name!r}") from None
    return ImageModel(module, lambda picture: _lite_input(picture, size), labels)


def _lite_input(picture: Image.Image, size: int) -> torch.Tensor:
    width, height = picture.size
    side = max(1, min(width, height) * size // (size + _BORDER))
    left, top = (width - side) // 2, (height - side) // 2
    square = picture.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return (torch.from_numpy(numpy.array(square)).permute(2, 0, 1).float() - 127) / 128


def _weights(spec: PredictorSpec, name: str) -> dict[str, torch.Tensor]:
    file = Path(spec.source)
    try:
        if file.is_dir():
            [file] = [inside for inside in file.iterdir() if inside.suffix in {".safetensors", ".pth", ".pt"}]
        if not file.is_file():
            return _downloaded(name, Path(spec.cache))
        if file.suffix == ".safetensors":
            return load_file(file)
        mapped = is_zipfile(file)  # as torch has written them since 1.6
        state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # those of torch, safetensors and of a network have no common base
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelRefused(f"{spec.name}'s weights can't be read: {reason}") from error
    return state


def _downloaded(name: str, cache: Path) -> dict[str, torch.Tensor]:
    weights = torchvision.models.get_model_weights(name).DEFAULT
    state: dict[str, torch.Tensor] = weights.get_state_dict(
        model_dir=str(cache / "torchvision"), progress=False, check_hash=True
    )
    return state
