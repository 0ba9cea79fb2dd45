"""Carries out what residency decides: loads, unloads, leases, and the clock that residency doesn't have.

A request leases a model for as long as it uses it. Whatever happens meanwhile, a leased model is not unloaded; only its own
death takes it away.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from llm.exceptions import Draining, InvalidRequest, ModelUnavailable, QuartetError, WorkerDied
from llm.submission import GenerationRequest, Submission
from multi_model.engine import Kind, kind_of
from multi_model.residency import Command, Grant, Limits, Load, Model, ModelState, Refuse, Residency, Unload
from multi_model.store import Catalogue, Entry
from multi_model.workers.base import Worker
from multi_model.workers.language_model import LanguageModelWorker

log = logging.getLogger(__name__)

_TRIES = 2  # of a request whose model dies under it


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A snapshot for display. Times are of `time.monotonic()`."""

    entry: Entry
    state: ModelState
    reason: str
    memory: int  # bytes charged
    in_use: int
    last_use: float
    load_seconds: float | None  # of the last load
    loads: int
    evictions: int
    hits: int
    pinned: bool


@dataclass(slots=True)
class _Slot:
    entry: Entry
    worker: Worker | None = None
    watch: asyncio.Task[None] | None = None
    load_seconds: float | None = None
    hits: int = 0


class Lease:
    """A model in use."""

    def __init__(self, manager: "ModelManager", name: str, worker: Worker | None) -> None:
        self._manager, self._name, self._worker = manager, name, worker
        self._released = False

    @property
    def worker(self) -> Worker:
        """Raises WorkerDied where it has died since it was granted."""
        if self._worker is None:
            raise WorkerDied("it has just ended")
        return self._worker

    def lost(self) -> None:
        """Its user found it dead."""
        if self._worker is not None:
            self._manager.lose(self._name, self._worker)

    def release(self) -> None:
        """A second call does nothing."""
        if not self._released:
            self._released = True
            self._manager.release(self._name)


class ModelManager:
    """On one event loop. build: makes a worker that is not loaded yet; estimate: bytes of an entry before its first load;
    overhead: bytes that the service takes beside its models, measured before each load, in a thread."""

    def __init__(
        self,
        limits: Limits,
        *,
        build: Callable[[Entry], Worker],
        estimate: Callable[[Entry], int],
        overhead: Callable[[], int],
    ) -> None:
        self._residency = Residency(limits)
        self._build, self._estimate, self._overhead = build, estimate, overhead
        self._catalogue = Catalogue()
        self._slots: dict[str, _Slot] = {}
        self._tickets: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._loads: set[asyncio.Task[None]] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._draining = self._closed = False
        self._in_hand = 0  # requests that wait for a lease, or have one
        self._nothing_in_hand = asyncio.Event()

    # -- the catalogue

    def use(self, catalogue: Catalogue) -> None:
        """From now on. What is loaded stays: changes of its entry hold from its next load on, and one that is no longer there
        goes when nobody uses it."""
        entries = {entry.id: entry for entry in catalogue.entries}
        for name in set(self._residency.models) - set(entries):
            self._carry_out(self._residency.discard(name, _now()))
        for name, entry in entries.items():
            slot = self._slots.setdefault(name, _Slot(entry))
            slot.entry = entry
            ttl = math.inf if entry.ttl is None else entry.ttl
            self._residency.add(Model(name, self._estimate(entry), title=entry.name, pinned=entry.pinned, ttl=ttl))
        self._catalogue = catalogue

    def entries(self) -> tuple[Entry, ...]:
        return self._catalogue.entries

    def find(self, model: str) -> Entry:
        """By id or name. Raises ModelNotFound."""
        return self._catalogue.find(model)

    def loaded(self) -> list[str]:
        """Ids, least recently used first."""
        return self._residency.loaded_names()

    def status(self, entry: Entry) -> ModelStatus:
        model, slot = self._residency.models[entry.id], self._slots[entry.id]
        return ModelStatus(
            entry=entry,
            state=model.state,
            reason=model.reason if model.state is ModelState.FAILED else "",
            memory=model.charge,
            in_use=model.in_use,
            last_use=model.last_use,
            load_seconds=slot.load_seconds,
            loads=model.loads,
            evictions=model.evictions,
            hits=slot.hits,
            pinned=model.pinned,
        )

    # -- requests

    async def acquire(self, entry: Entry, seconds: float) -> "Lease":
        """A loaded model, until the lease is released. seconds: to wait for it.

        Raises ModelUnavailable with the reason, ModelNotFound, or Draining.
        """
        if self._draining:
            raise Draining
        self._in_hand += 1
        self._nothing_in_hand.clear()
        try:
            return await self._acquire(entry, seconds)
        except BaseException:  # raised again
            self._let_go()
            raise

    async def _acquire(self, entry: Entry, seconds: float) -> "Lease":
        if self._residency.models[entry.id].state is ModelState.UNLOADED:
            self._carry_out(self._residency.measured_overhead(await asyncio.to_thread(self._overhead), _now()))
        if self._closed:
            raise Draining
        self._catalogue.find(entry.id)  # it may have been taken out meanwhile
        ticket, granted = next(self._numbers), asyncio.get_running_loop().create_future()
        self._tickets[ticket] = granted
        self._carry_out(self._residency.requested(ticket, entry.id, _now()))
        try:
            await self._granted(granted, entry, seconds)
        except BaseException:  # a caller that leaves meanwhile is a CancelledError; whatever it is, it is raised again
            del self._tickets[ticket]
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._carry_out(self._residency.released(entry.id, _now()))
            else:
                self._carry_out(self._residency.withdrawn(ticket, _now()))
            raise
        del self._tickets[ticket]
        slot = self._slots[entry.id]
        slot.hits += 1
        return Lease(self, entry.id, slot.worker)

    @asynccontextmanager
    async def lease(self, entry: Entry, seconds: float) -> AsyncIterator[Worker]:
        """As `acquire`, for as long as the context lasts. Raises WorkerDied, too, where the model has just died."""
        lease = await self.acquire(entry, seconds)
        try:
            yield lease.worker
        except WorkerDied:
            lease.lost()
            raise
        finally:
            lease.release()

    async def _granted(self, granted: "asyncio.Future[None]", entry: Entry, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await granted
        except TimeoutError:
            reason = "there was no room for it in time, as other models are in use"
            if self._residency.models[entry.id].state is ModelState.LOADING:
                reason = "it was not loaded in time"
            raise ModelUnavailable(entry.name, reason, retry_after=1) from None

    async def submit(self, entry: Entry, request: GenerationRequest, seconds: float) -> Submission:
        """Of a language model, which is in use until the submission has ended or its context is left. Raises as `acquire` and
        `LLMEngine.submit`, and InvalidRequest where it is another kind of model."""
        if kind_of(entry) is not Kind.GENERATION:
            raise InvalidRequest("model", f"{entry.name} is no language model")
        lease, loop = await self.acquire(entry, seconds), asyncio.get_running_loop()
        try:
            worker = lease.worker
            assert isinstance(worker, LanguageModelWorker)  # noqa: S101 - its framework's
            submission = await worker.submit(request)
        except BaseException:  # raised again
            lease.release()
            raise

        def leave() -> None:
            submission.abort()
            loop.call_soon_threadsafe(lease.release)

        return Submission(submission.outputs, leave)

    async def predict(self, entry: Entry, request: Any, seconds: float) -> tuple[Any, tuple[str, ...]]:
        """-> its answer, and the labels of its classes.

        Raises what is wrong with the request, or ModelUnavailable, also where the model has died under it twice.
        """
        deadline = _now() + seconds
        for _ in range(_TRIES):
            try:
                async with self.lease(entry, deadline - _now()) as worker, asyncio.timeout(deadline - _now()):
                    return await worker.predict(request), worker.labels
            except WorkerDied as death:
                log.error("%s died under a request: %s", entry.name, death.message)
                reason = death.message
            except TimeoutError:
                raise ModelUnavailable(entry.name, f"it did not answer within {seconds:g} s", retry_after=1) from None
        raise ModelUnavailable(entry.name, f"its process died twice under this request: {reason}", retry_after=1)

    async def load(self, entry: Entry, seconds: float) -> None:
        """Returns when it is there. Raises as `lease`."""
        async with self.lease(entry, seconds):
            return

    def unload(self, entry: Entry) -> None:
        """As soon as nobody uses it."""
        self._carry_out(self._residency.unload(entry.id, _now()))

    def pin(self, entry: Entry, pinned: bool) -> None:
        self._carry_out(self._residency.pin(entry.id, pinned, _now()))

    async def drain(self, grace: float) -> bool:
        """Takes no more requests. True when all that were taken have ended, within `grace` seconds."""
        self._draining = True
        if not self._in_hand:
            return True
        try:
            async with asyncio.timeout(grace):
                await self._nothing_in_hand.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Whoever waits gets Draining; every worker ends."""
        self._draining = self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for granted in self._tickets.values():
            if not granted.done():
                granted.set_exception(Draining())
        workers = [slot.worker for slot in self._slots.values() if slot.worker is not None]
        watches = [slot.watch for slot in self._slots.values() if slot.watch is not None]
        for task in (*self._loads, *watches):
            task.cancel()
        await asyncio.gather(*(worker.unload() for worker in workers), *self._unloads)
        await asyncio.gather(*self._loads, *watches, return_exceptions=True)

    # -- commands

    def _carry_out(self, commands: list[Command]) -> None:
        if self._closed:
            return
        for command in commands:
            match command:
                case Load(model):
                    self._spawn(self._load(model), self._loads)
                case Unload(model):
                    self._spawn(self._unload(model), self._unloads)
                case Grant(ticket, model):
                    if self._tickets[ticket].cancelled():  # its caller is leaving
                        self._carry_out(self._residency.released(model, _now()))
                    else:
                        self._tickets[ticket].set_result(None)
                case Refuse(ticket, error):
                    if not self._tickets[ticket].cancelled():
                        self._tickets[ticket].set_exception(error)
        self._set_timer()

    async def _load(self, name: str) -> None:
        slot, began = self._slots[name], _now()
        worker: Worker | None = None
        try:
            worker = self._build(slot.entry)
            await worker.load()
            charge = await worker.measure()
        except QuartetError as error:
            if worker is not None:
                await worker.unload()
            reason = error.reason if isinstance(error, ModelUnavailable) else error.message
            log.error("%s can't be loaded: %s", slot.entry.name, reason)
            self._carry_out(self._residency.failed(name, reason, _now()))
            return
        except asyncio.CancelledError:
            if worker is not None:
                await worker.unload()
            raise
        slot.worker, slot.load_seconds = worker, _now() - began
        slot.watch = asyncio.create_task(self._watch(name, worker))
        log.info("%s is loaded: %.0f MiB, %.2f s", slot.entry.name, charge / 2**20, slot.load_seconds)
        self._carry_out(self._residency.loaded(name, charge, _now()))

    async def _unload(self, name: str) -> None:
        slot = self._slots[name]
        worker, slot.worker = slot.worker, None
        if slot.watch is not None:
            slot.watch.cancel()
        if worker is not None:
            await worker.unload()
        log.info("%s is unloaded", slot.entry.name)
        self._carry_out(self._residency.unloaded(name, _now()))

    async def _watch(self, name: str, worker: Worker) -> None:
        await worker.died()
        self.lose(name, worker)

    def release(self, name: str) -> None:
        self._carry_out(self._residency.released(name, _now()))
        self._let_go()

    def _let_go(self) -> None:
        self._in_hand -= 1
        if not self._in_hand:
            self._nothing_in_hand.set()

    def lose(self, name: str, worker: Worker) -> None:
        """It has died. Whoever notices says so, before anybody else is given it."""
        slot = self._slots[name]
        if slot.worker is not worker or self._residency.models[name].state is not ModelState.READY:
            return  # known, or being unloaded
        log.error("%s has died; the next request loads it again", slot.entry.name)
        self._carry_out(self._residency.died(name, _now()))
        self._spawn(self._unload(name), self._unloads)

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]]") -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._residency.next_tick(_now())
        if at < math.inf:
            delay = max(at - _now(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._residency.ticked(_now()))


def _now() -> float:
    return time.monotonic()
