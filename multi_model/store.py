"""The catalogue: which models there are, read from a JSON file and checked entry by entry.

A wrong entry is named by its place and field, and left out; the others stand.
"""

import importlib.util
import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, ValidationError

from llm.exceptions import ModelNotFound

_PACKAGE = "package:"


def _uuid(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise ValueError("is no UUID") from None


Name = Annotated[str, Field(min_length=1, max_length=256)]
Labels = Annotated[tuple[Name, ...], Field(min_length=1, max_length=100_000)]


class Entry(BaseModel):
    """One model. What follows `description` may be absent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, AfterValidator(_uuid)]
    name: Name
    type: Name = Field(description="For people: text-classification, image-classification, text-generation, …")
    framework: Name
    version: Name = "1"
    description: str = ""
    source: Name | None = Field(None, description="A folder, `package:NAME/FOLDER`, or a name on the hub; absent: its name")
    revision: Name | None = Field(None, description="Of a name on the hub")
    architecture: Name | None = Field(None, description="Of an image model; absent: what follows the colon of its name")
    head: Name | None = Field(None, description="Of a sentence encoder: a file with a linear head that makes it a classifier")
    labels: Labels | None = Field(None, description="Names of the classes; absent: those that the model brings along")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        None, description="Absent: float32, and auto for language models"
    )
    memory: ByteSize | None = Field(None, description="Estimate for a first load; absent: from the size of the weights")
    pinned: bool = False
    ttl: Annotated[float, Field(gt=0)] | None = Field(None, description="Seconds without a request; then it is unloaded")
    replicas: Annotated[int, Field(ge=1, le=64)] = 1


@dataclass(frozen=True, slots=True)
class Catalogue:
    """`faults`: a sentence for each entry that was left out."""

    entries: tuple[Entry, ...] = ()
    faults: tuple[str, ...] = ()

    def find(self, model: str) -> Entry:
        """By id or name. Raises ModelNotFound."""
        for entry in self.entries:
            if model in {entry.id, entry.name} or model.lower() == entry.id:
                return entry
        raise ModelNotFound(model, tuple(entry.name for entry in self.entries), param="model_id")


def read_catalogue(path: Path, frameworks: Collection[str]) -> Catalogue:
    """frameworks: those that there are. Raises OSError or ValueError, with a sentence, where there is no list at all."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(listed, list):
        raise ValueError(f"{path} must hold a list of models")
    entries: list[Entry] = []
    faults: list[str] = []
    for i, given in enumerate(listed):
        try:
            entry = Entry.model_validate(given)
        except ValidationError as error:
            faults.append(f"{path.name}[{i}]{_where(error)}")
            continue
        if entry.framework not in frameworks:
            faults.append(f"{path.name}[{i}].framework: {entry.framework!r} is none of {', '.join(sorted(frameworks))}")
            continue
        double = next((name for name in ("id", "name") if getattr(entry, name) in {getattr(e, name) for e in entries}), None)
        if double is None:
            entries.append(entry)
        else:
            faults.append(f"{path.name}[{i}].{double}: {getattr(entry, double)} is there already")
    return Catalogue(tuple(entries), tuple(faults))


def located(source: str, beside: Path) -> str:
    """Where a source is: a folder's path, or a name on the hub as it is. Folders are relative to the catalogue's folder.

    Raises ValueError with a sentence where a package isn't installed or hasn't that folder.
    """
    if not source.startswith(_PACKAGE):
        folder = beside / source
        return str(folder.resolve()) if folder.exists() else source
    package, _, inside = source.removeprefix(_PACKAGE).partition("/")
    found = importlib.util.find_spec(package)  # finds a top-level package without importing it
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"the package {package} is not installed")
    path = Path(found.submodule_search_locations[0]) / inside
    if not path.exists():
        raise ValueError(f"the package {package} has no {inside}")
    return str(path)


def _where(error: ValidationError) -> str:
    first: Any = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    return f"{path}: {first['msg'].removeprefix('Value error, ')}"
