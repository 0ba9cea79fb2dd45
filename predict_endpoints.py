"""The routes of the catalogue: ask a model, see what there is, load, unload and pin."""

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
from multi_model.store import Entry
from predict_dtos import (
    ModelDetail,
    ModelList,
    Predictions,
    PredictRequest,
    class_predictions,
    detail,
    summary,
    text_predictions,
)
from streaming import unless_client_leaves

router = APIRouter(route_class=JsonRoute)
_REFUSALS = errors.documented(404, 503)

Built = Annotated[Services, Depends(services)]


@router.post("/predict", tags=["models"], response_model=Predictions, responses=errors.documented(*errors.GENERATION_REFUSALS))
async def predict(body: PredictRequest, request: Request, built: Built) -> Response:
    """Asks a model of the catalogue; it is loaded where it isn't yet, and others go where it needs their room."""
    entry = built.models.manager.find(body.model_id)
    answer = _generated if entry.framework == "quartet" else _classified
    return JSONResponse(await unless_client_leaves(answer(entry, body, built), request.receive))


async def _classified(entry: Entry, body: PredictRequest, built: Services) -> dict[str, Any]:
    asked = body.text_input(built.http.max_prompts)
    answer, labels = await built.models.manager.predict(entry, asked, _seconds(body, built))
    return class_predictions(entry, labels, answer, body)


async def _generated(entry: Entry, body: PredictRequest, built: Services) -> dict[str, Any]:
    asked, sampling = body.generation_request(request_id.get() or "", built.http.max_prompts, built.http.request_timeout)
    generations, _ = await built.models.manager.predict(entry, asked, _seconds(body, built)) if asked.prompts else ([], ())
    return text_predictions(entry, generations, asked, sampling)


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
