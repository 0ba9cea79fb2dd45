"""Around every request, in plain ASGI: its id, its log line and metrics, the last catch, and the bound on its body."""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import errors
from llm.exceptions import ClientError, RequestTooLarge
from logs import request_id
from metrics import ServiceMetrics
from streaming import ClientLeft

access = logging.getLogger("quartet.access")
logger = logging.getLogger("quartet.errors")

_LONGEST_ID = 128
_LONGEST_PATH = 200
_PROBES = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds: their lines are for debugging
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})  # a label's values are bounded


class RequestScope:
    """Outermost. Gives the request an id, counts and logs how it ended, answers what nobody else caught."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        token = request_id.set(exchange.request_id)
        self._metrics.request_started()
        try:
            await self._run(scope, exchange)
        finally:
            self._report(scope, exchange)
            request_id.reset(token)

    async def _run(self, scope: Scope, exchange: "_Exchange") -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientLeft:
            exchange.client_left = True
        except Exception as error:
            logger.exception("a request failed")
            if exchange.status is not None:
                raise  # too late for a status: the server cuts the connection
            await errors.answer(error)(scope, exchange.receive, exchange.send)

    def _report(self, scope: Scope, exchange: "_Exchange") -> None:
        seconds = time.monotonic() - exchange.start
        status = exchange.outcome
        route = getattr(scope.get("route"), "path", "unknown")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.request_ended(method=method, route=route, status=status, seconds=seconds)
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:_LONGEST_PATH]
        access.log(
            logging.DEBUG if route in _PROBES else logging.INFO,
            "%s %s %d %.1f ms",
            method,
            path,
            status,
            seconds * 1000,
            extra={"method": method, "path": path, "status": status, "duration_ms": round(seconds * 1000, 1)},
        )


class _Exchange:
    """One request's two directions, watched."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request_id = _request_id(scope["headers"])
        self.start = time.monotonic()
        self.status: int | None = None
        self.client_left = False
        self._complete = False
        self._receive = receive
        self._send = send

    @property
    def outcome(self) -> int:
        if self._complete and self.status is not None:
            return self.status
        return errors.CLIENT_CLOSED_REQUEST if self.client_left or self.status is None else errors.INTERNAL

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._complete:
            self.client_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.request_id.encode("ascii"))]
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = not self.client_left


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The caller's, if it is up to 128 visible ASCII characters; else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and 0 < len(value) <= _LONGEST_ID and all(0x21 <= byte <= 0x7E for byte in value):
            return value.decode("ascii")
    return str(uuid.uuid4())


class BodyLimit:
    """Reads the whole body before anyone else sees the request, and stops reading at the limit: 413, connection closed.

    A length that is announced is believed when it is too large; one that is not announced is counted.
    """

    def __init__(self, app: ASGIApp, limit: int, patience: float = 30.0) -> None:
        """limit: bytes. patience: seconds without a byte of a body that isn't complete."""
        self._app = app
        self._limit = limit
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ClientError as error:
            await errors.answer(error)(scope, receive, send)
            return
        await self._app(scope, _Replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        announced = _announced_length(scope)
        if announced > self._limit:
            raise RequestTooLarge(self._limit)
        body = bytearray()
        more = True
        while more:
            message = await self._receive(receive)
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                raise RequestTooLarge(self._limit)
        return bytes(body)

    async def _receive(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._patience):
                return await receive()
        except TimeoutError:
            raise ClientError(f"nothing more of the body came for {self._patience:g} s") from None


class _Replay:
    """`receive` for a body that has been read: the body once, then whatever the connection says."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _announced_length(scope: Scope) -> int:
    return max((int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()), default=0)
