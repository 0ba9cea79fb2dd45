"""Framework -> worker: the one place that names them. Another framework is a module beside the others and a line here."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from llm.exceptions import ModelUnavailable
from llm.llm import LLMEngine
from multi_model.messages import PredictorSpec
from multi_model.store import Entry, located
from multi_model.workers import torch_vision, transformer
from multi_model.workers.base import Worker
from multi_model.workers.language_model import LanguageModelWorker
from multi_model.workers.process import ProcessConfig
from multi_model.workers.torch_vision import TorchVisionWorker
from multi_model.workers.transformer import TransformerWorker


class Kind(Enum):
    """What a model takes and answers."""

    TEXT = "text"  # texts -> classes
    IMAGE = "image"  # images -> classes
    GENERATION = "generation"  # prompts -> texts


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What workers are built from, beside their entry."""

    processes: ProcessConfig
    engines: Callable[[str, str], LLMEngine]  # (source, dtype) -> an engine, not started yet
    device: str
    catalogue_folder: Path  # relative sources are relative to it
    model_cache: Path
    kv_cache_bytes: int  # of a language model, at most
    max_pixels: int  # of an image


@dataclass(frozen=True, slots=True)
class Framework:
    kind: Kind
    build: Callable[[Entry, Surroundings], Worker]
    imports: str | None = None  # a module for the forkserver to import, so that a load need not


def kind_of(entry: Entry) -> Kind:
    return FRAMEWORKS[entry.framework].kind


def imports_of(entries: Iterable[Entry]) -> list[str]:
    """Modules that their loads would have to import."""
    imports = [FRAMEWORKS[entry.framework].imports for entry in entries]
    return sorted({module for module in imports if module is not None})


def build_worker(entry: Entry, surroundings: Surroundings) -> Worker:
    """Not loaded yet. Raises ModelUnavailable where its source isn't there."""
    return FRAMEWORKS[entry.framework].build(entry, surroundings)


def _transformer(entry: Entry, surroundings: Surroundings) -> Worker:
    return TransformerWorker(_spec(entry, surroundings), entry.replicas, surroundings.processes)


def _torch_vision(entry: Entry, surroundings: Surroundings) -> Worker:
    return TorchVisionWorker(_spec(entry, surroundings), entry.replicas, surroundings.processes)


def _language_model(entry: Entry, surroundings: Surroundings) -> Worker:
    engine = surroundings.engines(_source(entry, surroundings), entry.dtype or "auto")
    return LanguageModelWorker(entry.name, engine, own=False)


def _spec(entry: Entry, surroundings: Surroundings) -> PredictorSpec:
    return PredictorSpec(
        name=entry.name,
        source=_source(entry, surroundings),
        revision=entry.revision,
        architecture=entry.architecture or entry.name.rpartition(":")[2],
        head=None if entry.head is None else _located(entry, entry.head, surroundings),
        labels=entry.labels,
        dtype=entry.dtype or "float32",
        device=surroundings.device,
        cache=str(surroundings.model_cache),
        max_pixels=surroundings.max_pixels,
    )


def _source(entry: Entry, surroundings: Surroundings) -> str:
    return _located(entry, entry.source or entry.name, surroundings)


def _located(entry: Entry, source: str, surroundings: Surroundings) -> str:
    try:
        return located(source, surroundings.catalogue_folder)
    except ValueError as error:
        raise ModelUnavailable(entry.name, str(error)) from None


def estimated_bytes(entry: Entry, surroundings: Surroundings) -> int:
    """Before a first load: what the catalogue says, or from the size of the weights."""
    if entry.memory is not None:
        return entry.memory
    try:
        folder = Path(located(entry.source or entry.name, surroundings.catalogue_folder))
    except ValueError:
        folder = Path()  # building it says what is wrong
    files = [folder] if folder.is_file() else list(folder.glob("*.safetensors")) if entry.source or folder.is_dir() else []
    weights = sum(file.stat().st_size for file in files) or _UNKNOWN
    cache = surroundings.kv_cache_bytes if kind_of(entry) is Kind.GENERATION else 0
    return entry.replicas * (_PROCESS + weights) + cache


_PROCESS = 100 << 20  # bytes of a process beside its weights
_UNKNOWN = 400 << 20  # bytes of weights that are still on a hub
FRAMEWORKS: Mapping[str, Framework] = {
    "quartet": Framework(Kind.GENERATION, _language_model),
    "transformers": Framework(Kind.TEXT, _transformer, transformer.MODULE),
    "torchvision": Framework(Kind.IMAGE, _torch_vision, torch_vision.MODULE),
}
