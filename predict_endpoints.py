"""The routes of the catalogue: ask a model, see what there is, load, unload and pin."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

import errors
from bodies import JsonRoute
from containers import Services
from endpoints import services
from llm.exceptions import InvalidRequest
from logs import request_id
from multi_model.engine import Kind, kind_of
from multi_model.messages import ImageInput, TextInput
from multi_model.store import Entry
from predict_dtos import (
    IMAGE_FORM,
    ModelDetail,
    ModelList,
    Predictions,
    PredictRequest,
    class_predictions,
    detail,
    read_image_form,
    summary,
    text_predictions,
)
from streaming import unless_client_leaves

router = APIRouter(route_class=JsonRoute)
uploads = APIRouter()
_REFUSALS = errors.documented(404, 503)

Built = Annotated[Services, Depends(services)]


@router.post("/predict", tags=["models"], response_model=Predictions, responses=errors.documented(*errors.GENERATION_REFUSALS))
async def predict(body: PredictRequest, request: Request, built: Built) -> Response:
    """Asks a model of the catalogue; it is loaded where it isn't yet, and others go where it needs their room."""
    entry = built.models.manager.find(body.model_id)
    answer = _ANSWERS[kind_of(entry)]
    return JSONResponse(await unless_client_leaves(answer(entry, body, built), request.receive))


@uploads.post(
    "/predict/image",
    tags=["models"],
    response_model=Predictions,
    responses=errors.documented(*errors.GENERATION_REFUSALS),
    openapi_extra=IMAGE_FORM,
)
async def predict_image(request: Request, built: Built) -> Response:
    """As /predict for an image classifier, with the files in the request: fields `model_id`, `image` (one or several),
    `top_k`, `timeout`."""
    body, images = await read_image_form(request, built.http.max_prompts)
    entry = built.models.manager.find(body.model_id)
    if kind_of(entry) is not Kind.IMAGE:
        raise InvalidRequest("model_id", f"{entry.name} is no image classifier")
    names = [f"image[{i}]" for i in range(len(images))]
    built.models.images.check_sizes([len(image) for image in images], names)
    asked = ImageInput(tuple(images), listed=True, param="image")
    return JSONResponse(await unless_client_leaves(_classified(entry, asked, body, built), request.receive))


async def _texts_classified(entry: Entry, body: PredictRequest, built: Services) -> dict[str, Any]:
    return await _classified(entry, body.text_input(built.http.max_prompts), body, built)


async def _images_classified(entry: Entry, body: PredictRequest, built: Services) -> dict[str, Any]:
    references, listed = body.image_references(built.http.max_prompts)
    names = [f"input_data[{i}]" if listed else "input_data" for i in range(len(references))]
    images = await asyncio.to_thread(built.models.images.read, references, names)
    return await _classified(entry, ImageInput(images, listed), body, built)


async def _classified(entry: Entry, asked: TextInput | ImageInput, body: PredictRequest, built: Services) -> dict[str, Any]:
    answer, labels = await built.models.manager.predict(entry, asked, _seconds(body, built))
    return class_predictions(entry, labels, answer, body)


async def _generated(entry: Entry, body: PredictRequest, built: Services) -> dict[str, Any]:
    asked, sampling = body.generation_request(request_id.get() or "", built.http.max_prompts, built.http.request_timeout)
    generations, _ = await built.models.manager.predict(entry, asked, _seconds(body, built)) if asked.prompts else ([], ())
    return text_predictions(entry, generations, asked, sampling)


_ANSWERS = {Kind.TEXT: _texts_classified, Kind.IMAGE: _images_classified, Kind.GENERATION: _generated}


def _seconds(body: PredictRequest, built: Services) -> float:
    ceiling = built.models.predict_timeout
    if body.timeout is not None and body.timeout > ceiling:
        raise InvalidRequest("timeout", f"timeout must be at most {ceiling:g} s on this server")
    return body.timeout or ceiling


@router.get("/models", tags=["models"], response_model=ModelList, responses=errors.documented())
async def list_models(built: Built) -> Response:
    """What there is, and what is loaded."""
    manager = built.models.manager
    available = [summary(manager.status(entry)) for entry in manager.entries()]
    return JSONResponse({"available_models": available, "loaded_models": manager.loaded()})


@router.post("/models/reload", tags=["models"], response_model=ModelList, responses=_REFUSALS)
async def reload_catalogue(built: Built) -> Response:
    """Reads the catalogue again. What is loaded stays as it is."""
    built.models.read_catalogue()
    return await list_models(built)


@router.get("/models/{model}", tags=["models"], response_model=ModelDetail, responses=_REFUSALS)
async def show_model(model: str, built: Built) -> Response:
    """By id or name."""
    return _shown(built.models.manager.find(model), built)


@router.post("/models/{model}/load", tags=["models"], response_model=ModelDetail, responses=_REFUSALS)
async def load_model(model: str, request: Request, built: Built) -> Response:
    """Answers when it is loaded."""
    entry = built.models.manager.find(model)
    await unless_client_leaves(built.models.manager.load(entry, built.models.predict_timeout), request.receive)
    return _shown(entry, built)


@router.post("/models/{model}/unload", tags=["models"], response_model=ModelDetail, responses=_REFUSALS)
async def unload_model(model: str, built: Built) -> Response:
    """Answers at once: it goes when the last request that uses it has ended."""
    entry = _not_own(model, built)
    built.models.manager.unload(entry)
    return _shown(entry, built)


@router.post("/models/{model}/pin", tags=["models"], response_model=ModelDetail, responses=_REFUSALS)
async def pin_model(model: str, built: Built) -> Response:
    """Once loaded it stays, whoever else needs room."""
    entry = built.models.manager.find(model)
    built.models.manager.pin(entry, True)
    return _shown(entry, built)


@router.delete("/models/{model}/pin", tags=["models"], response_model=ModelDetail, responses=_REFUSALS)
async def unpin_model(model: str, built: Built) -> Response:
    """It may be unloaded again to make room."""
    entry = _not_own(model, built)
    built.models.manager.pin(entry, False)
    return _shown(entry, built)


def _not_own(model: str, built: Services) -> Entry:
    entry = built.models.manager.find(model)
    if entry is built.models.own:
        raise InvalidRequest("model_id", f"{entry.name} is the service's own model, and stays")
    return entry


def _shown(entry: Entry, built: Services) -> Response:
    return JSONResponse(detail(built.models.manager.status(entry), time.monotonic()))
