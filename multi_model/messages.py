"""Everything that crosses the boundary to a predictor's process: small frozen dataclasses, in both directions.

Service -> process: PredictorSpec (once, at start), Batch.
Process -> service: PredictorReady or PredictorFailed, then a BatchResult for each Batch, or PredictorCrashed.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    name: str
    source: str  # a file, a folder, or a name on the hub
    architecture: str | None  # of an image model
    head: str | None  # a file: a linear head on an encoder of texts
    revision: str | None
    labels: tuple[str, ...] | None  # None: the model's own
    dtype: str
    device: str  # "auto", "cpu", "cuda", "cuda:N"
    cache: str  # folder for what is fetched
    max_pixels: int  # of one image


@dataclass(frozen=True, slots=True)
class PredictorReady:
    pid: int
    device: str
    labels: tuple[str, ...]
    seconds: float  # from the start of the process


@dataclass(frozen=True, slots=True)
class PredictorFailed:
    """It can't be loaded."""

    reason: str


@dataclass(frozen=True, slots=True)
class TextInput:
    """Of one request. Longer texts than the model reads are refused, unless they may be cut."""

    texts: tuple[str, ...]
    listed: bool  # the caller sent a list: a refusal then names the place
    truncate: bool
    param: str = "input_data"

    @property
    def size(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class ImageInput:
    """Of one request: the bytes of image files."""

    images: tuple[bytes, ...]
    listed: bool
    param: str = "input_data"

    @property
    def size(self) -> int:
        return sum(map(len, self.images))


@dataclass(frozen=True, slots=True)
class Classes:
    """One request's answer: for each input the probability of each class, in the order of the labels."""

    probabilities: tuple[tuple[float, ...], ...]
    truncated: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Nothing of this request was computed: its `param` followed by `where` is at fault."""

    where: str  # "", "[3]"
    message: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that share their forwards."""

    number: int
    requests: tuple[Any, ...]
    threads: int  # that may compute it


@dataclass(frozen=True, slots=True)
class BatchResult:
    number: int
    answers: tuple[Any, ...]  # one for each request: its answer, or Rejected
    inputs: int  # that were computed
    seconds: float


@dataclass(frozen=True, slots=True)
class PredictorCrashed:
    """The batch raised; the process ends itself after this."""

    number: int
    text: str
