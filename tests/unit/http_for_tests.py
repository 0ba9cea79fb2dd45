"""One request at a time straight into the app, with the connection in the test's hand."""

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from starlette.types import ASGIApp, Message

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse_constant)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error


class Connection:
    """`chunks`: the body as it arrives. `open`: as a context, the request runs beside the test."""

    def __init__(
        self, app: ASGIApp, method: str, path: str, chunks: Iterable[bytes] = (), headers: dict[str, str] | None = None
    ) -> None:
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }
        self.unread = deque(chunks)
        self.pieces: list[bytes] = []
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self._app = app
        self._left = asyncio.Event()
        self._sent = asyncio.Event()
        self._complete = False

    def leave(self) -> None:
        self._left.set()

    async def _answered(self) -> None:
        await self._app(self.scope, self._receive, self._send)

    async def run(self) -> Answer:
        async with asyncio.timeout(10):
            await self._answered()
        if self.status is None:
            raise AssertionError("the app sent nothing")
        return Answer(self.status, self.headers, b"".join(self.pieces))

    async def piece(self) -> bytes:
        """The next bytes of the body."""
        async with asyncio.timeout(10):
            while not self.pieces:
                self._sent.clear()
                await self._sent.wait()
        return self.pieces.pop(0)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._answered())
        return self

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.timeout(10):
            await self._task

    async def _receive(self) -> Message:
        if self.unread:
            chunk = self.unread.popleft()
            return {"type": "http.request", "body": chunk, "more_body": bool(self.unread)}
        if not self._complete:
            await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        elif message.get("body"):
            self.pieces.append(message["body"])
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._complete = True
        self._sent.set()


class Client:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return await Connection(self.app, "GET", path, headers=headers).run()

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        """body: bytes go as they are; anything else as JSON."""
        return await self.open(path, body, headers).run()

    def open(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Connection:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**JSON, "content-length": str(len(raw)), **(headers or {})}
        return Connection(self.app, "POST", path, [raw], sent)


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")
