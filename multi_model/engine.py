"""Framework -> worker: the one place that names them. Another framework is a module beside the others and a line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llm.exceptions import ModelUnavailable
from multi_model.messages import PredictorSpec
from multi_model.store import Entry, located
from multi_model.workers.base import Worker
from multi_model.workers.process import ProcessConfig
from multi_model.workers.transformer import TransformerWorker


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What workers are built from, beside their entry."""

    processes: ProcessConfig
    device: str
    catalogue_folder: Path  # relative sources are relative to it
    model_cache: Path


Build = Callable[[Entry, Surroundings], Worker]


def build_worker(entry: Entry, surroundings: Surroundings) -> Worker:
    """Not loaded yet. Raises ModelUnavailable where its source isn't there."""
    return _FRAMEWORKS[entry.framework](entry, surroundings)


def _transformer(entry: Entry, surroundings: Surroundings) -> Worker:
    return TransformerWorker(_spec(entry, surroundings), entry.replicas, surroundings.processes)


def _spec(entry: Entry, surroundings: Surroundings) -> PredictorSpec:
    try:
        source = located(entry.source or entry.name, surroundings.catalogue_folder)
    except ValueError as error:
        raise ModelUnavailable(entry.name, str(error)) from None
    return PredictorSpec(
        name=entry.name,
        source=source,
        revision=entry.revision,
        labels=entry.labels,
        dtype=entry.dtype,
        device=surroundings.device,
        cache=str(surroundings.model_cache),
    )


_FRAMEWORKS: Mapping[str, Build] = {"transformers": _transformer}
