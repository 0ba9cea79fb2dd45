"""uvicorn around the app, with our own way out: the listener stays open while running requests finish."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI

from connections import Connection
from containers import Services
from llm.engine_state import EngineStatus
from llm.exceptions import QuartetError

logger = logging.getLogger("quartet.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LAST_WORDS_SECONDS = 1  # for answers that are still being written when the service ends at once
_END_SECONDS = 1.7  # then the process ends, whatever thread of it is in the middle of something
_POLL_SECONDS = 0.05
_KEEP_ALIVE_SECONDS = 75  # longer than proxies keep theirs: who closes first must not be us


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The handlers are ours: uvicorn's would close the listener before anything is drained."""
        yield


class Server:
    """Runs until it is told to stop by a signal, or the first load fails.

    First signal: no new request is taken, those that run have `drain_seconds`. Second signal, or their end: what is left
    gets its error, and the process ends.
    """

    def __init__(
        self,
        app: FastAPI,
        services: Services,
        listener: socket.socket,
        *,
        drain_seconds: float,
        max_connections: int,
        say: Callable[[str], None],
        hurry: Callable[[], None],
    ) -> None:
        """hurry: called when nothing is waited for any more; the process should end soon, whatever it is at."""
        config = uvicorn.Config(
            app,
            http=partial(Connection, most=max_connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._uvicorn = _Uvicorn(config)
        self._services = services
        self._listener = listener
        self._drain_seconds = drain_seconds
        self._say = say
        self._hurry = hurry
        self._signals = 0
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._closing: asyncio.Future[None] | None = None
        self._exit_code = 0

    async def run(self, started: float) -> int:
        """Returns the process's exit code. started: `time.monotonic()` of the process's start, for the progress lines."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        tasks = [asyncio.create_task(self._stop_when_told()), asyncio.create_task(self._tell_start(started))]
        try:
            await self._uvicorn.serve(sockets=[self._listener])
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            if self._closing is not None:
                await self._closing
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return self._exit_code

    def _on_signal(self) -> None:
        self._signals += 1
        (self._first_signal if self._signals == 1 else self._second_signal).set()

    async def _stop_when_told(self) -> None:
        await self._first_signal.wait()
        deadline = time.monotonic() + self._drain_seconds
        logger.info("draining: requests that run have %g s to finish", self._drain_seconds)
        drained = await self._drained()
        self._uvicorn.should_exit = True  # the listener closes, as do connections that wait for a next request
        if drained:  # some answers may still be on their way to slow readers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._second_signal.wait(), max(_LAST_WORDS_SECONDS, deadline - time.monotonic()))
        logger.warning("ending now: requests that still run get an error")
        self._hurry()
        self._closing = asyncio.ensure_future(self._services.close())
        await asyncio.sleep(_LAST_WORDS_SECONDS)
        await self._cut_off()

    async def _cut_off(self) -> None:
        """Whoever reads no more, or is still sending, is not waited for."""
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(_POLL_SECONDS)  # the requests notice, and log it
        for task in list(self._uvicorn.server_state.tasks):
            task.cancel()

    async def _drained(self) -> bool:
        """Whether everything finished within the grace; False at once on a second signal."""
        draining = asyncio.ensure_future(self._services.drain(self._drain_seconds))
        hurrying = asyncio.ensure_future(self._second_signal.wait())
        try:
            await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
            return draining.done() and draining.result()
        finally:
            draining.cancel()
            hurrying.cancel()
            await asyncio.gather(draining, hurrying, return_exceptions=True)

    async def _tell_start(self, started: float) -> None:
        """Each step of the first load with the time since the start, then where the service is. A failed load ends it."""
        await self._uvicorn.listening.wait()
        engine = self._services.engine
        loading = asyncio.ensure_future(engine.started())
        told = ""
        try:
            while not loading.done():
                state = engine.state()
                if state.status is EngineStatus.LOADING and state.reason != told:
                    told = state.reason
                    self._say(f"[{time.monotonic() - started:5.1f} s] {told}")
                await asyncio.wait((loading,), timeout=_POLL_SECONDS)
            loading.result()
        except QuartetError as error:
            if not self._signals:
                logger.error("the model can't be served: %s", error)
                self._exit_code = 1
                self._uvicorn.should_exit = True
            return
        finally:
            loading.cancel()
        if not self._signals:
            self._say(f"[{time.monotonic() - started:5.1f} s] serving {engine.state().model} at {url_of(self._listener)}")
            self._say(_CURL.format(url=url_of(self._listener)))


def end_process_soon() -> None:
    """A long text that is being tokenized would be waited for, by the event loop and by the interpreter. Our other processes
    end with this one by themselves."""
    timer = threading.Timer(_END_SECONDS, os._exit, (0,))
    timer.daemon = True
    timer.start()


_CURL = (
    "curl -s {url}/basic_generate -H 'content-type: application/json' "
    """-d '{{"prompt": "The capital of France is", "max_tokens": 20}}'"""
)


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - where all are listened at, one to ask
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
