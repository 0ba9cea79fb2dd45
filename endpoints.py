"""The native routes: validate, submit, shape."""

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

import errors
from bodies import JsonRoute
from containers import Generator, Services
from dtos import (
    DetokenizeRequest,
    GeneratedText,
    GeneratedTexts,
    Prompt,
    PromptRequest,
    PromptsRequest,
    Sampling,
    TokenizeRequest,
    Tokens,
    detail_of,
)
from llm.exceptions import InvalidRequest, ModelNotFound
from llm.sequence import SamplingParams
from llm.submission import Generation, GenerationRequest
from logs import request_id
from streaming import TokenStream, collect

VERSION = "0.1.0"

logger = logging.getLogger("quartet.prompts")
router = APIRouter(route_class=JsonRoute)
_GENERATION_REFUSALS = errors.documented(*errors.GENERATION_REFUSALS)
_ENGINE_REFUSALS = errors.documented(*errors.ENGINE_REFUSALS)


def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


Built = Annotated[Services, Depends(services)]


@router.post("/basic_generate", tags=["generation"], response_model=GeneratedText, responses=_GENERATION_REFUSALS)
async def basic_generate(body: PromptRequest, request: Request, built: Built) -> Response:
    """One prompt, one text."""
    asked = _generation_request(body, (body.prompt,), built, many=False)
    [generation] = await collect(await built.engine.submit(asked), request.receive)
    return _shaped("generated_text", _text(generation, body, body.prompt), [generation], body, asked.params)


@router.post("/generate", tags=["generation"], response_model=GeneratedTexts, responses=_GENERATION_REFUSALS)
async def generate(body: PromptsRequest, request: Request, built: Built) -> Response:
    """Several prompts, as many texts, in the order asked."""
    return await _generate(body, request, built, built.engine)


@router.post("/generate_vllm", tags=["generation"], response_model=GeneratedTexts, responses=_GENERATION_REFUSALS)
async def generate_vllm(body: PromptsRequest, request: Request, built: Built) -> Response:
    """As /generate, answered by vLLM, where there is a GPU and vLLM is installed."""
    return await _generate(body, request, built, built.vllm)


@router.post(
    "/generate_stream",
    tags=["generation"],
    response_class=Response,
    responses=_GENERATION_REFUSALS
    | {
        errors.OK: {
            "description": "Events `data: {token, sequence_id}`; with `details` then `event: done`; `event: error` on failure",
            "content": {"text/event-stream": {"example": 'data: {"token": " Paris", "sequence_id": "5f0c…"}\n\n'}},
        }
    },
)
async def generate_stream(body: PromptRequest, built: Built) -> Response:
    """One prompt, its text piece by piece as server-sent events."""
    asked = _generation_request(body, (body.prompt,), built, many=False)

    def detail(generation: Generation) -> dict[str, Any]:
        return detail_of(generation, asked.params)

    return TokenStream(
        await built.engine.submit(asked),
        keep_alive=built.http.keep_alive_seconds,
        prefix=body.prompt if body.return_full_text else "",
        detail=detail if body.details else None,
    )


@router.post("/tokenize", tags=["tokens"], response_model=Tokens, responses=_ENGINE_REFUSALS)
async def tokenize(body: TokenizeRequest, built: Built) -> Response:
    """A text's token ids."""
    tokens = await built.engine.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    ready = built.engine.state().ready
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": ready.max_model_len if ready else 0})


@router.post("/detokenize", tags=["tokens"], response_model=Prompt, responses=_ENGINE_REFUSALS)
async def detokenize(body: DetokenizeRequest, built: Built) -> Response:
    """The text of token ids."""
    skip = body.skip_special_tokens is not False
    return JSONResponse({"prompt": await built.engine.detokenize(body.tokens, skip_special_tokens=skip)})


@router.api_route("/health", methods=["GET"], tags=["operations"], responses=errors.documented())
async def health(built: Built) -> Response:
    """Whether the process does its work, or is on the way to it. 500 only when it has given up."""
    state = built.engine.state()
    told = {
        "status": state.status.value,
        "reason": state.reason,
        "running": state.running,
        "waiting": state.waiting,
        "used_blocks": state.used_blocks,
        "num_blocks": state.num_blocks,
        "restarts": state.restarts,
        "worker_pid": state.worker_pid,
    }
    return JSONResponse(told, errors.health_status(state))


@router.api_route("/ready", methods=["GET"], tags=["operations"], responses=_ENGINE_REFUSALS)
async def ready(built: Built) -> Response:
    """Whether a request sent now would be taken; 503 with the reason where not."""
    refusal = errors.not_ready(built.engine.state())
    if refusal is not None:
        raise refusal
    return JSONResponse({"status": "ready"})


# Probes may ask with HEAD; the description shows each route once.
router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)
router.add_api_route("/ready", ready, methods=["HEAD"], include_in_schema=False)


@router.get("/version", tags=["operations"])
async def show_version(built: Built) -> Response:
    """What is served by what."""
    state = built.engine.state()
    told: dict[str, Any] = {
        "service": "quartet",
        "version": VERSION,
        "model": state.model,
        "torch": _installed("torch"),
        "transformers": _installed("transformers"),
    }
    if state.ready is not None:
        worker = state.ready
        told |= {
            "torch": worker.torch_version,
            "transformers": worker.transformers_version,
            "architecture": worker.architecture,
            "device": worker.device,
            "dtype": worker.dtype,
            "threads": worker.threads,
            "max_model_len": worker.max_model_len,
            "kv_cache_bytes": worker.kv_cache_bytes,
            "block_size": worker.block_size,
            "num_blocks": worker.num_blocks,
            "attention_backend": worker.probe.attention_backend,
            "batch_invariant": worker.probe.batch_invariant,
            "conformance": {"difference": worker.probe.difference, "tolerance": worker.probe.tolerance},
            "load_seconds": round(worker.seconds, 3),
        }
    return JSONResponse(told)


@router.get("/metrics", tags=["operations"], response_class=Response)
async def metrics(built: Built) -> Response:
    """Prometheus text."""
    return Response(built.metrics.text(), media_type=built.metrics.content_type)


async def _generate(body: PromptsRequest, request: Request, built: Services, generator: Generator) -> Response:
    asked = _generation_request(body, tuple(body.prompts), built, many=True)
    generations: list[Generation] = []
    if asked.prompts:
        generations = await collect(await generator.submit(asked), request.receive)
    texts = [_text(generation, body, prompt) for generation, prompt in zip(generations, body.prompts, strict=True)]
    return _shaped("generated_texts", texts, generations, body, asked.params)


def _generation_request(body: Sampling, prompts: tuple[str, ...], built: Services, *, many: bool) -> GenerationRequest:
    own = built.engine.state().model
    if body.model is not None and body.model not in {own, built.http.model_alias}:
        raise ModelNotFound(body.model, (own,))
    if len(prompts) > built.http.max_prompts:
        raise InvalidRequest("prompts", f"prompts has {len(prompts)} entries, at most {built.http.max_prompts}")
    params = body.sampling_params(built.http.request_timeout)
    if built.http.log_prompts:
        logger.info("prompts: %s", list(prompts))
    return GenerationRequest(request_id.get() or "", prompts, params, many)


def _text(generation: Generation, body: Sampling, prompt: str) -> str:
    return prompt + generation.text if body.return_full_text else generation.text


def _shaped(
    name: str, texts: str | list[str], generations: list[Generation], body: Sampling, params: SamplingParams
) -> JSONResponse:
    answer: dict[str, Any] = {name: texts}
    if body.details:
        answer["details"] = [detail_of(generation, params) for generation in generations]
    return JSONResponse(answer)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
