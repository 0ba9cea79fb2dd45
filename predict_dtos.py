"""Requests and answers of /predict and /models; what is right in a request depends on the kind of model that it is for."""

from typing import Annotated, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dtos import Sampling, StrictModel, Text, detail_of
from llm.exceptions import InvalidRequest
from llm.submission import Generation, GenerationRequest
from multi_model.manager import ModelStatus
from multi_model.messages import Classes, TextInput
from multi_model.store import Entry

ModelId = Annotated[Text, Field(min_length=1, max_length=256)]


class PredictRequest(StrictModel):
    """For one model of the catalogue."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model_id": "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "input_data": "You have won a prize"},
                {
                    "model_id": "SmolLM2-135M-Instruct",
                    "input_data": ["The capital of France is"],
                    "parameters": {"max_tokens": 8},
                },
            ]
        }
    )
    model_id: ModelId = Field(description="A model's id or name")
    input_data: Any = Field(
        description="By kind of model a text, a prompt, an image (data URL, or path under the image root), or a list of such"
    )
    truncate: bool | None = Field(None, description="Text classifiers: have texts cut that are too long. Default false")
    top_k: int | None = Field(None, ge=1, le=100_000, description="Classifiers: only the likeliest classes, with their names")
    parameters: Sampling | None = Field(None, description="Language models: how to sample")
    timeout: float | None = Field(None, gt=0, le=86400, description="Seconds to wait and compute at most")

    def text_input(self, max_inputs: int) -> TextInput:
        """Raises InvalidRequest naming what is wrong, or is for another kind of model."""
        self._refuse("parameters", "is for language models")
        texts, listed = self._strings(max_inputs, "a text")
        return TextInput(tuple(texts), listed, self.truncate is True)

    def image_references(self, max_inputs: int) -> tuple[list[str], bool]:
        """-> paths and data URLs, and whether they came as a list. Raises as `text_input`."""
        self._refuse("parameters", "is for language models")
        self._refuse("truncate", "is for text classifiers")
        return self._strings(max_inputs, "a data:image/…;base64,… URL or a path")

    def generation_request(self, request_id: str, max_inputs: int, ceiling: float | None) -> tuple[GenerationRequest, Sampling]:
        """ceiling: seconds, the service's own. Raises as `text_input`."""
        self._refuse("truncate", "is for text classifiers")
        self._refuse("top_k", "is for classifiers")
        texts, listed = self._strings(max_inputs, "a text")
        sampling = self.parameters or Sampling.model_validate({})
        if sampling.model is not None:
            raise InvalidRequest("parameters.model", "parameters.model is said by model_id here")
        params = sampling.sampling_params(ceiling)
        return GenerationRequest(request_id, tuple(texts), params, listed, names=("input_data", "input_data")), sampling

    def _strings(self, max_inputs: int, what: str) -> tuple[list[str], bool]:
        given = self.input_data
        texts = given if isinstance(given, list) else [given]
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                name = f"input_data[{i}]" if isinstance(given, list) else "input_data"
                or_list = "" if isinstance(given, list) else ", or a list of such"
                raise InvalidRequest(name, f"{name} must be {what}{or_list}")
        if len(texts) > max_inputs:
            raise InvalidRequest("input_data", f"input_data has {len(texts)} entries, at most {max_inputs}")
        return texts, isinstance(given, list)

    def _refuse(self, name: str, why: str) -> None:
        if getattr(self, name) is not None:
            raise InvalidRequest(name, f"{name} {why}, and this model is none")


_FORM_FIELDS = ("model_id", "top_k", "timeout")
IMAGE_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["model_id", "image"],
                    "properties": {
                        "model_id": {"type": "string"},
                        "image": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        "top_k": {"type": "integer", "minimum": 1},
                        "timeout": {"type": "number", "exclusiveMinimum": 0},
                    },
                }
            }
        },
    }
}


async def read_image_form(request: Request, max_images: int) -> tuple[PredictRequest, list[bytes]]:
    """Raises InvalidRequest naming the field, or HTTPException where it can't be read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise InvalidRequest("content-type", "the body must be multipart/form-data")
    fields: dict[str, Any] = {}
    images: list[bytes] = []
    async with request.form(max_files=max_images, max_fields=len(_FORM_FIELDS) + 1) as form:
        for name, value in form.multi_items():
            if name == "image" and not isinstance(value, str):
                images.append(await value.read())
            elif name == "image":
                raise InvalidRequest("image", "image must be a file")
            elif name not in _FORM_FIELDS:
                raise InvalidRequest(name, f"{name} is not a field of this form")
            elif name in fields:
                raise InvalidRequest(name, f"{name} is there twice")
            else:
                fields[name] = value
    if not images:
        raise InvalidRequest("image", "image is needed")
    try:
        return PredictRequest.model_validate({**fields, "input_data": None}, strict=False), images
    except ValidationError as error:
        raise RequestValidationError([{**found, "loc": ("body", *found["loc"])} for found in error.errors()]) from None


class Likely(BaseModel):
    label: str
    index: int
    probability: float


class Predictions(BaseModel):
    """Of a classifier: a row of probabilities, or the likeliest classes, for each input. Of a language model: texts."""

    model_id: str
    model_version: str
    predictions: list[list[float]] | list[list[Likely]] | list[str]
    labels: list[str] | None = Field(None, description="Of classifiers: the columns of a row")
    truncated: list[bool] | None = Field(None, description="With `truncate: true`: which texts were cut")
    details: list[dict[str, Any]] | None = Field(None, description="Of language models, with `details: true`")


class ModelSummary(BaseModel):
    id: str
    name: str
    type: str
    framework: str
    version: str
    description: str
    state: str = Field(examples=["unloaded", "loading", "ready", "busy", "unloading", "failed"])


class ModelList(BaseModel):
    available_models: list[ModelSummary]
    loaded_models: list[str] = Field(description="Ids, least recently used first")


class ModelDetail(ModelSummary):
    reason: str | None = Field(description="Why it has failed")
    pinned: bool
    bytes: int = Field(description="Counted against the memory budget")
    in_use: int = Field(description="Requests that use it now")
    idle_seconds: float | None = Field(description="Since its last use")
    load_seconds: float | None = Field(description="Of its last load")
    loads: int
    evictions: int
    hits: int


def class_predictions(entry: Entry, labels: tuple[str, ...], answer: Classes, asked: PredictRequest) -> dict[str, Any]:
    rows: list[Any] = [list(row) for row in answer.probabilities]
    if asked.top_k is not None:
        rows = [_likeliest(row, labels, asked.top_k) for row in rows]
    told = {"model_id": entry.id, "model_version": entry.version, "predictions": rows, "labels": list(labels)}
    if asked.truncate:
        told["truncated"] = list(answer.truncated)
    return told


def text_predictions(
    entry: Entry, generations: list[Generation], asked: GenerationRequest, sampling: Sampling
) -> dict[str, Any]:
    texts = [
        (str(prompt) if sampling.return_full_text else "") + generation.text
        for prompt, generation in zip(asked.prompts, generations, strict=True)
    ]
    told: dict[str, Any] = {"model_id": entry.id, "model_version": entry.version, "predictions": texts}
    if sampling.details:
        told["details"] = [detail_of(generation, asked.params) for generation in generations]
    return told


def summary(status: ModelStatus) -> dict[str, Any]:
    entry = status.entry
    return {
        "id": entry.id,
        "name": entry.name,
        "type": entry.type,
        "framework": entry.framework,
        "version": entry.version,
        "description": entry.description,
        "state": "busy" if status.in_use and status.state.value == "ready" else status.state.value,
    }


def detail(status: ModelStatus, now: float) -> dict[str, Any]:
    """now: of `time.monotonic()`"""
    return summary(status) | {
        "reason": status.reason or None,
        "pinned": status.pinned,
        "bytes": status.memory,
        "in_use": status.in_use,
        "idle_seconds": round(now - status.last_use, 3) if status.loads else None,
        "load_seconds": None if status.load_seconds is None else round(status.load_seconds, 3),
        "loads": status.loads,
        "evictions": status.evictions,
        "hits": status.hits,
    }


def _likeliest(row: list[float], labels: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    order = sorted(range(len(row)), key=lambda index: (-row[index], index))[:count]
    return [{"label": labels[index], "index": index, "probability": row[index]} for index in order]
