"""From an engine's deltas to the client: server-sent events, keep-alive, an error event, and abort when the client leaves."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import errors
from llm.delivery import Delta
from llm.exceptions import QuartetError
from llm.submission import Generation, Output, Submission

logger = logging.getLogger("quartet.streaming")

KEEP_ALIVE = b": waiting\n\n"  # a comment: no client takes it for an event
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
# Beside \n and the like, which JSON escapes anyway, str.splitlines ends a line at these.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\u0085\u2028\u2029"}

Result = TypeVar("Result")


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


def frame(data: dict[str, Any], event: str | None = None) -> bytes:
    """One event: its data is one line, whatever the text holds, by the SSE grammar and by str.splitlines."""
    line = json.dumps(data, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {line}\n\n".encode()


async def unless_client_leaves(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The work's result. Raises ClientLeft, the work cancelled, when the client goes first.

    receive: of a request whose body has been read, so that only the end of the connection is still to come.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(submission: Submission, receive: Receive) -> list[Generation]:
    """Every output in full, in order. The first that fails, or the client's leaving, ends the others."""
    with submission:
        return await unless_client_leaves(submission.collect(), receive)


class TokenStream(Response):
    """The answer of `/generate_stream`: one event for each piece of text.

    Headers wait for the first delta, or for the first keep-alive: a request that fails before that gets a status.
    """

    def __init__(
        self,
        submission: Submission,
        *,
        keep_alive: float,
        prefix: str = "",
        detail: Callable[[Generation], dict[str, Any]] | None = None,
    ) -> None:
        """keep_alive: seconds. prefix: sent ahead of the first piece. detail: makes the data of the event `done`."""
        self.status_code = errors.OK
        self.background = None
        self.init_headers(HEADERS)
        self._submission = submission
        self._keep_alive = keep_alive
        self._prefix = prefix
        self._detail = detail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._submission:
            await unless_client_leaves(self._answer(_Writer(self, send)), receive)

    async def _answer(self, writer: "_Writer") -> None:
        try:
            await self._write_events(writer)
        except QuartetError as error:
            if not writer.started:
                raise
            logger.warning("the stream ended with an error: %s", error)
            await writer.write(frame(errors.body_of(error), "error"))
        except Exception as error:
            if not writer.started:
                raise
            logger.exception("the stream failed")
            await writer.write(frame(errors.body_of(error), "error"))
        await writer.end()

    async def _write_events(self, writer: "_Writer") -> None:
        [output] = self._submission.outputs
        whole = Generation()
        pending = self._prefix
        async for delta in _with_keep_alive(output, self._keep_alive, writer):
            text, pending = pending + delta.text, ""
            if text:
                await writer.write(frame({"token": text, "sequence_id": output.sequence_id}))
            if self._detail is not None:
                whole.token_ids += delta.token_ids
                whole.logprobs += delta.logprobs
                whole.completion = delta.completion
        if self._detail is not None:
            await writer.write(frame(self._detail(whole), "done"))


async def _with_keep_alive(output: Output, seconds: float, writer: "_Writer") -> AsyncIterator[Delta]:
    while True:
        try:
            async with asyncio.timeout(seconds):
                delta = await anext(output)
        except TimeoutError:
            await writer.write(KEEP_ALIVE)
        except StopAsyncIteration:
            return
        else:
            yield delta


class _Writer:
    """The response's bytes; the headers go with the first of them."""

    def __init__(self, response: Response, send: Send) -> None:
        self._response = response
        self._send = send
        self.started = False

    async def write(self, data: bytes) -> None:
        await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._start()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self) -> None:
        if not self.started:
            self.started = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": self._response.status_code,
                    "headers": self._response.raw_headers,
                }
            )
