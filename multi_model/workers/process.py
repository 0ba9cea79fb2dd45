"""A model in processes of its own: requests that arrive together share a batch, and unloading is ending the processes.

    event loop           predict -> queue -> future
    replica's thread     queue -> Batch, task pipe -> the process -> BatchResult, result pipe -> the futures

Each replica is a thread and a process; all take from one queue. One that is free takes all that waits, up to a bound: what
arrives meanwhile is the next batch, so that batches grow with the load, and nobody waits for one to fill.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llm.channel import Stopped, Wakeup, wait_readable
from llm.exceptions import InvalidRequest, ModelUnavailable, WorkerDied
from llm.forkserver import Forkserver
from llm.worker_process import WorkerProcess
from multi_model.memory import footprint
from multi_model.messages import (
    Batch,
    BatchResult,
    PredictorCrashed,
    PredictorFailed,
    PredictorReady,
    PredictorSpec,
    Rejected,
)

_MOST_REQUESTS, _MOST_BYTES = 256, 32 << 20  # in one batch, but for a single request, which may be larger
_END_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """What the processes of all models have in common."""

    forkserver: Forkserver
    set_up_logging: Callable[[], None]
    threads: Callable[[], int]  # how many the next batch may use
    load_timeout: float  # seconds
    batch_timeout: float  # seconds; a batch that takes longer counts as a dead process


@dataclass(slots=True, eq=False)
class _Pending:
    request: Any
    answer: asyncio.Future[Any]


class _Queue:
    """Of the requests that wait for a replica. Any thread."""

    def __init__(self) -> None:
        self.arrived = Wakeup()
        self._waiting: deque[_Pending] = deque()
        self._lock = threading.Lock()
        self._closed: WorkerDied | None = None

    def put(self, pending: _Pending) -> None:
        """Raises WorkerDied where nobody will take it."""
        with self._lock:
            if self._closed is not None:
                raise WorkerDied(self._closed.message)
            self._waiting.append(pending)
            self.arrived.set()

    def take(self) -> list[_Pending]:
        """As many as make a batch, without those whose callers have left."""
        taken: list[_Pending] = []
        size = 0
        with self._lock:
            while self._waiting and len(taken) < _MOST_REQUESTS:
                size += self._waiting[0].request.size
                if taken and size > _MOST_BYTES:
                    break
                taken.append(self._waiting.popleft())
            if not self._waiting:
                self.arrived.clear()
        return [pending for pending in taken if not pending.answer.cancelled()]

    def close(self, error: WorkerDied) -> list[_Pending]:
        """Takes no more; returns what waited."""
        with self._lock:
            self._closed = self._closed or error
            left, self._waiting = list(self._waiting), deque()
            return left


class ProcessWorker:
    """A `multi_model.workers.base.Worker`. entry: what a process runs, "module:function"."""

    def __init__(self, spec: PredictorSpec, entry: str, replicas: int, config: ProcessConfig) -> None:
        self.labels: tuple[str, ...] = ()
        self._queue, self._stop = _Queue(), Wakeup()
        self._died = asyncio.Event()
        self._unloaded = False
        self._replicas = [
            _Replica(spec, entry, config, queue=self._queue, stop=self._stop, died=self._died) for _ in range(replicas)
        ]

    async def load(self) -> None:
        for replica in self._replicas:
            replica.thread.start()
        try:
            ready = await asyncio.gather(*(replica.ready for replica in self._replicas))
        except BaseException:  # a caller that leaves meanwhile is a CancelledError; whatever it is, it is raised again
            await self.unload()
            raise
        self.labels = ready[0].labels

    async def died(self) -> None:
        await self._died.wait()

    async def measure(self) -> int:
        pids = [replica.pid for replica in self._replicas if replica.pid is not None]
        return (await asyncio.to_thread(footprint, pids)).total

    async def predict(self, request: Any) -> Any:
        pending = _Pending(request, asyncio.get_running_loop().create_future())
        self._queue.put(pending)
        answer = await pending.answer
        if isinstance(answer, Rejected):
            name = f"{request.param}{answer.where}"
            raise InvalidRequest(name, f"{name} {answer.message}")
        return answer

    async def unload(self) -> None:
        if self._unloaded:
            return
        self._unloaded = True
        self._stop.set()
        await asyncio.to_thread(self._join)
        self._queue.arrived.close()
        self._stop.close()

    def _join(self) -> None:
        for replica in self._replicas:
            if replica.thread.ident is not None:
                replica.thread.join(_END_SECONDS)


class _Replica:
    """A thread and its process. The death of one is the model's: what is in hand fails, and the manager unloads the rest."""

    def __init__(
        self, spec: PredictorSpec, entry: str, config: ProcessConfig, *, queue: _Queue, stop: Wakeup, died: asyncio.Event
    ) -> None:
        self.pid: int | None = None
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[PredictorReady] = self._loop.create_future()
        self.thread = threading.Thread(target=self._run, name="replica", daemon=True)
        self._spec, self._entry, self._config = spec, entry, config
        self._queue, self._stop, self._died = queue, stop, died
        self._taken: list[_Pending] = []

    def _run(self) -> None:
        process: WorkerProcess | None = None
        try:
            process = WorkerProcess.start(
                self._config.forkserver,
                self._entry,
                self._config.set_up_logging,
                self._spec,
                stop=self._stop,
                timeout=self._config.load_timeout,
            )
            self.pid = process.pid
            self._load(process)
            number = 0
            while True:
                number += 1
                self._wait(process)
                self._compute(process, number)
        except Stopped:
            self._end(WorkerDied("it was unloaded"))
        except WorkerDied as error:
            self._end(error)
            self._post(self._died.set)
        except ModelUnavailable as error:
            self._post(_fail, self.ready, error)
        finally:
            self.pid = None
            if process is not None:
                process.end()

    def _load(self, process: WorkerProcess) -> None:
        ready = process.receive("loading", self._config.load_timeout, time.monotonic())
        if isinstance(ready, PredictorFailed):
            raise ModelUnavailable(self._spec.name, ready.reason)
        if not isinstance(ready, PredictorReady):
            raise WorkerDied(f"the process said {type(ready).__name__} while loading")
        self._post(_resolve, self.ready, ready)

    def _wait(self, process: WorkerProcess) -> None:
        readable = wait_readable((self._queue.arrived.fileno(), self._stop.fileno(), process.death_fd), math.inf)
        if self._stop.fileno() in readable:
            raise Stopped
        if process.death_fd in readable:
            raise WorkerDied("the process died while idle")

    def _compute(self, process: WorkerProcess, number: int) -> None:
        self._taken = self._queue.take()
        if not self._taken:
            return
        limit = self._config.batch_timeout
        process.send(Batch(number, tuple(pending.request for pending in self._taken), self._config.threads()), limit)
        result = process.receive("a batch", limit, time.monotonic())
        if isinstance(result, PredictorCrashed):
            raise WorkerDied(f"the batch failed: {result.text}")
        if not isinstance(result, BatchResult) or result.number != number:
            raise WorkerDied("the process answered something else")
        taken, self._taken = self._taken, []
        self._post(_answer, taken, result.answers)

    def _end(self, error: WorkerDied) -> None:
        for pending in (*self._taken, *self._queue.close(error)):
            self._post(_fail, pending.answer, WorkerDied(error.message))
        self._post(_fail, self.ready, ModelUnavailable(self._spec.name, error.message))

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)


def _answer(taken: list[_Pending], answers: tuple[Any, ...]) -> None:
    for pending, answer in zip(taken, answers, strict=True):
        _resolve(pending.answer, answer)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
