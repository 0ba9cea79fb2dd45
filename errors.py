"""Exception -> status, code, headers, body. The only file that knows HTTP statuses."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from llm import exceptions as domain
from llm.engine_state import EngineState, EngineStatus
from logs import request_id

logger = logging.getLogger("quartet.errors")

OK = 200
CLIENT_CLOSED_REQUEST = 499  # only in the log: nobody is there to read it
INVALID = 422
INTERNAL = 500

STATUSES: Mapping[type[domain.QuartetError], int] = {
    domain.ClientError: INVALID,  # of the body as a whole
    domain.InvalidRequest: INVALID,
    domain.ContextLengthExceeded: 400,
    domain.ModelNotFound: 404,
    domain.DeadlineExceeded: 408,
    domain.RequestTooLarge: 413,
    domain.QueueFull: 429,
    domain.Loading: 503,
    domain.Draining: 503,
    domain.EngineDead: 503,
    domain.VllmUnavailable: 503,
    domain.ModelUnavailable: 503,
    domain.SequenceFailed: INTERNAL,
    domain.ModelRefused: INTERNAL,
    domain.WorkerDied: INTERNAL,
}
_INTERNAL_MESSAGE = "something went wrong here; the log has it under this request id"
_LONGEST_MESSAGE = 2000  # characters: a message may quote what the client sent
_LONGEST_PARAM = 100


class ErrorDetail(BaseModel):
    code: str = Field(examples=["invalid_request"])
    message: str = Field(examples=["max_tokens must be at least 1"])
    param: str | None = Field(examples=["max_tokens"])
    request_id: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def install(app: FastAPI) -> None:
    app.add_exception_handler(domain.QuartetError, _answer_domain)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(HTTPException, _answer_http)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route: every refusal has one shape."""
    return {status: {"model": ErrorBody} for status in (INVALID, 413, INTERNAL, *statuses)}


GENERATION_REFUSALS = (400, 404, 408, 429, 503)
ENGINE_REFUSALS = (503,)


def status_of(error: BaseException) -> int:
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), INTERNAL)


def body_of(error: BaseException) -> dict[str, dict[str, str | None]]:
    """What the client is told: `{"error": {code, message, param, request_id}}`, always encodable and bounded."""
    if isinstance(error, domain.SequenceFailed) or (isinstance(error, domain.QuartetError) and status_of(error) != INTERNAL):
        return _body(error.code, error.message, error.param)
    return _body("internal_error", _INTERNAL_MESSAGE, None)


def answer(error: BaseException) -> JSONResponse:
    headers: dict[str, str] = {}
    if isinstance(error, domain.QuartetError) and error.retry_after is not None:
        headers["retry-after"] = str(max(1, error.retry_after))
    if isinstance(error, domain.RequestTooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    return JSONResponse(body_of(error), status_of(error), headers)


def health_status(state: EngineState) -> int:
    return INTERNAL if state.status is EngineStatus.DEAD else OK


def not_ready(state: EngineState) -> domain.ServerError | None:
    """Why a request sent now would not be taken; None where it would."""
    match state.status:
        case EngineStatus.READY:
            return None
        case EngineStatus.DRAINING:
            return domain.Draining()
        case EngineStatus.DEAD:
            return domain.EngineDead(state.reason)
        case EngineStatus.LOADING:
            return domain.Loading(state.reason)
        case EngineStatus.RECOVERING:
            return domain.Loading(f"recovering: {state.reason}")


def _body(code: str, message: str, param: str | None) -> dict[str, dict[str, str | None]]:
    if param is not None:
        param = _plain(param, _LONGEST_PARAM)
    detail = {"code": code, "message": _plain(message, _LONGEST_MESSAGE), "param": param, "request_id": request_id.get()}
    return {"error": detail}


def _plain(text: str, longest: int) -> str:
    text = text if len(text) <= longest else text[:longest] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")


def _answer_domain(request: Request, error: Exception) -> JSONResponse:
    if status_of(error) == INTERNAL:
        logger.error("failed: %s", error, exc_info=error)
    return answer(error)


def _answer_validation(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    return answer(invalid_request(error.errors()))


def _answer_http(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    codes = {404: "not_found", 405: "method_not_allowed"}
    messages = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not offered here"}
    code = codes.get(error.status_code, "invalid_request")
    message = messages.get(error.status_code, str(error.detail))
    return JSONResponse(_body(code, message, None), error.status_code, error.headers)


def invalid_request(errors: Sequence[Any]) -> domain.QuartetError:
    """pydantic's first complaint in our words. `loc` is ("body", "stop", 1): the parameter is `stop[1]`."""
    first = errors[0]
    kind, param = first["type"], _param(first["loc"][1:])
    if kind == "json_invalid":
        return domain.ClientError(f"the body is not valid JSON: {first['ctx']['error']}")
    if not param:
        missing = kind == "missing"
        return domain.ClientError("a JSON body is needed" if missing else "the body must be a JSON object")
    sentence = _SENTENCES.get(kind) or first["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
    return domain.InvalidRequest(param, f"{param} {sentence}")


# What pydantic says well enough, with the limit in it, it says itself.
_SENTENCES: Mapping[str, str] = {
    "missing": "is needed",
    "extra_forbidden": "is not a parameter of this endpoint",
    "string_unicode": "holds half of a surrogate pair, which is no character",
}


def _param(path: Sequence[int | str]) -> str:
    param = ""
    for part in path:
        if isinstance(part, int) or not part.isidentifier():
            param += f"[{part}]" if param else str(part)
        else:
            param += f".{part}" if param else part
    return param
