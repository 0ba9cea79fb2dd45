"""One HTTP connection: how many there may be, and how long a request's head may take."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # from the connection, or a head's first byte, to its last


class Connection(H11Protocol):
    """One connection too many is closed at once: what is left of the file handles is for the worker's restarts."""

    def __init__(self, *, most: int, head_seconds: float = HEAD_SECONDS, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._most = most
        self._head_seconds = head_seconds
        self._head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        full = len(self.connections) >= self._most
        super().connection_made(transport)
        if full:
            transport.abort()
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        else:
            self._forget_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(self._head_seconds, self.transport.abort)

    def _forget_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
