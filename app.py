"""The FastAPI app around the services: routes, error handlers, middleware, lifespan."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import endpoints
import errors
import predict_endpoints
from containers import Services
from middleware import BodyLimit, RequestScope


def create_app(services: Services) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with services.running():
            yield

    app = FastAPI(
        title="Quartet",
        version=endpoints.VERSION,
        description="An LLM serving service. Every answer carries `x-request-id`; every refusal has the same shape.",
        lifespan=lifespan,
        strict_content_type=False,  # `bodies.JsonRoute` decides
        redoc_url=None,
    )
    app.state.services = services
    app.include_router(endpoints.router)
    app.include_router(predict_endpoints.router)
    app.include_router(predict_endpoints.uploads)
    errors.install(app)
    app.add_middleware(BodyLimit, limit=services.http.max_body_bytes)
    app.add_middleware(RequestScope, metrics=services.metrics)  # added last: outermost
    return app
