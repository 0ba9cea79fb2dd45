"""Framework -> worker: the one place that names them. Another framework is a module beside the others and a line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llm.exceptions import ModelUnavailable
from llm.llm import LLMEngine
from multi_model.messages import PredictorSpec
from multi_model.store import Entry, located
from multi_model.workers.base import Worker
from multi_model.workers.language_model import LanguageModelWorker
from multi_model.workers.process import ProcessConfig
from multi_model.workers.transformer import TransformerWorker


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What workers are built from, beside their entry."""

    processes: ProcessConfig
    engines: Callable[[str, str], LLMEngine]  # (source, dtype) -> an engine, not started yet
    device: str
    catalogue_folder: Path  # relative sources are relative to it
    model_cache: Path
    kv_cache_bytes: int  # of a language model, at most


Build = Callable[[Entry, Surroundings], Worker]


def build_worker(entry: Entry, surroundings: Surroundings) -> Worker:
    """Not loaded yet. Raises ModelUnavailable where its source isn't there."""
    return _FRAMEWORKS[entry.framework](entry, surroundings)


def _transformer(entry: Entry, surroundings: Surroundings) -> Worker:
    return TransformerWorker(_spec(entry, surroundings), entry.replicas, surroundings.processes)


def _language_model(entry: Entry, surroundings: Surroundings) -> Worker:
    engine = surroundings.engines(_source(entry, surroundings), entry.dtype or "auto")
    return LanguageModelWorker(entry.name, engine, own=False)


def _spec(entry: Entry, surroundings: Surroundings) -> PredictorSpec:
    return PredictorSpec(
        name=entry.name,
        source=_source(entry, surroundings),
        revision=entry.revision,
        labels=entry.labels,
        dtype=entry.dtype or "float32",
        device=surroundings.device,
        cache=str(surroundings.model_cache),
    )


def _source(entry: Entry, surroundings: Surroundings) -> str:
    try:
        return located(entry.source or entry.name, surroundings.catalogue_folder)
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
    cache = surroundings.kv_cache_bytes if entry.framework == "quartet" else 0
    return entry.replicas * (_PROCESS + weights) + cache


_PROCESS = 100 << 20  # bytes of a process beside its weights
_UNKNOWN = 400 << 20  # bytes of weights that are still on a hub
_FRAMEWORKS: Mapping[str, Build] = {"transformers": _transformer, "quartet": _language_model}
