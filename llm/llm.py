"""The engine of one language model: an inbox, one step after another on a daemon thread, and its life from load to close.

    any thread       submit -> tokenized, checked, counted -> inbox
    engine thread    inbox -> WorkloadManager -> ModelExecutor (the worker) -> WorkloadManager -> Outputs -> Delivery
    event loop       Submission <- OutputSink

All refusals happen in `submit`, before anything is queued. What is queued ends with an answer, with the request's own
error, or with the engine's; a worker that dies in between is replaced, and nobody notices.
"""

import asyncio
import logging
import math
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llm.block_manager import BlockManager
from llm.channel import Stopped, Wakeup, wait_readable
from llm.config import EngineConfig
from llm.delivery import Delivery, OutputSink
from llm.engine_state import EngineState, Gate
from llm.exceptions import DeadlineExceeded, Draining, EngineDead, QuartetError, SequenceFailed, WorkerDied
from llm.forkserver import Forkserver
from llm.intake import AdmissionBound, Intake, Prepared
from llm.messages import Ready
from llm.model_executor import MODEL_WORKER
from llm.model_preparation import prepare_model
from llm.observer import Observer
from llm.outputs import Outputs
from llm.submission import GenerationRequest, Output, Submission
from llm.supervisor import WorkerSupervisor, step_tokens
from llm.tokenization import Tokenization
from llm.workload_manager import ScheduledBatch, WorkloadManager

log = logging.getLogger(__name__)

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
_JOIN_SECONDS = 1.8

T = TypeVar("T")


@dataclass(slots=True)
class _Loaded:
    """What exists once the first worker is ready, for good."""

    ready: Ready
    intake: Intake
    workload: WorkloadManager
    outputs: Outputs


class LLMEngine:
    """`set_up_logging` is called in each worker; `worker_entry` is what it runs ("module:function")."""

    def __init__(
        self,
        config: EngineConfig,
        observer: Observer,
        forkserver: Forkserver,
        *,
        set_up_logging: Callable[[], None],
        worker_entry: str = MODEL_WORKER,
    ) -> None:
        self._config = config
        self._observer = observer
        self._forkserver = forkserver
        self._gate = Gate()
        self._stop, self._arrived = Wakeup(), Wakeup()
        self._inbox: deque[Callable[[], None]] = deque()
        self._inbox_lock = threading.Lock()
        self._ended = False  # the thread takes nothing in any more
        self._closed = False  # and its handles are gone
        self._delivery = Delivery()
        self._bound = AdmissionBound(config.max_num_seqs + config.max_queue, config.max_num_seqs)
        self._tokenizing = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._set_up_logging = set_up_logging
        self._worker_entry = worker_entry
        self._thread = threading.Thread(target=self.requests_processing_loop, name="llm-engine", daemon=True)
        self._started: Future[None] = Future()
        self._over: Future[None] = Future()
        self._folder: str | None = None
        self._supervisor: WorkerSupervisor | None = None
        self._loaded: _Loaded | None = None

    # -- for callers, on any event loop

    def start(self) -> None:
        """Starts the engine's thread, which loads the model; returns at once."""
        self._thread.start()

    async def started(self) -> None:
        """Returns when the first worker is ready. Raises ModelRefused, EngineDead, or Draining where it was closed."""
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def over(self) -> None:
        """Returns when the engine has ended, or given up."""
        await asyncio.shield(asyncio.wrap_future(self._over))

    async def submit(self, request: GenerationRequest) -> Submission:
        """Queues all sequences of a request, or none.

        Raises what is wrong with the request (InvalidRequest, ContextLengthExceeded), QueueFull, or why nothing is taken
        (Loading, Draining, EngineDead).
        """
        arrival = time.monotonic()
        loaded = self._open()
        count = len(request.prompts) * request.params.n
        with self._bound.taken(count):
            prepared = await self._off_the_loop(lambda: loaded.intake.prepare(request, arrival))
            self._gate.check()
        loop = asyncio.get_running_loop()
        sinks = [OutputSink(loop) for _ in prepared]
        self._post(lambda: self._take_in(loaded.outputs, prepared, sinks))
        seq_ids = [one.sequence.seq_id for one in prepared]
        outputs = tuple(Output(str(uuid.uuid4()), sink) for sink in sinks)
        return Submission(outputs, lambda: self._post(lambda: loaded.outputs.abort(seq_ids)))

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises InvalidRequest for `prompt`, and Loading or EngineDead."""
        intake = self._open().intake
        return await self._off_the_loop(lambda: intake.tokens(text, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Raises InvalidRequest for `tokens[i]`, and Loading or EngineDead."""
        intake = self._open().intake
        return await self._off_the_loop(lambda: intake.text(token_ids, skip_special_tokens=skip_special_tokens))

    def state(self) -> EngineState:
        loaded, supervisor = self._loaded, self._supervisor
        workload = loaded.workload if loaded else None
        running = workload.num_running if workload else 0
        return EngineState(
            status=self._gate.status,
            reason=self._gate.reason,
            model=EMBEDDED_MODEL if self._config.model is None else Path(self._config.model).name,
            folder=self._folder,
            running=running,
            waiting=max(self._bound.held - running, 0),
            used_blocks=workload.blocks.num_used if workload else 0,
            num_blocks=workload.blocks.num_blocks if workload else 0,
            restarts=supervisor.restarts if supervisor else 0,
            worker_pid=supervisor.executor.worker_pid if supervisor else None,
            ready=loaded.ready if loaded else None,
        )

    async def drain(self, grace: float) -> bool:
        """Takes no more requests. True when all that were taken have ended, within `grace` seconds."""
        self._gate.drain()
        return await self._bound.empty(grace)

    async def close(self) -> None:
        """Ends what still runs with Draining, then the worker and the thread, whatever they are at. Takes under 2 s."""
        self._gate.drain()
        if self._closed:
            return
        self._stop.set()
        self._tokenizing.shutdown(wait=False)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        if not (self._closed or self._thread.is_alive()):
            self._closed = True
            self._stop.close()
            self._arrived.close()

    # -- the engine's thread

    def requests_processing_loop(self) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", str(self._config.tokenizer_threads))  # before the first encoding
        try:
            loaded = self._load()
            while True:
                self._drain_inbox()
                self._expire(loaded)
                if loaded.workload.has_work:
                    self._step(loaded)
                else:
                    self._idle(loaded)
        except Stopped:
            self._give_up(Draining())
        except QuartetError as error:
            log.error("the engine has given up: %s", error.message)
            self._give_up(error)
        except Exception as error:
            log.exception("the engine has failed")
            self._give_up(EngineDead(f"{type(error).__name__} in the engine"))
        finally:
            if self._supervisor is not None:
                self._supervisor.executor.end()
            self._over.set_result(None)

    def _load(self) -> _Loaded:
        """The checkpoint is prepared while the forkserver imports; then the first worker loads it."""
        config = self._config
        self._forkserver.begin()
        self._supervisor = WorkerSupervisor(
            config,
            self._forkserver,
            stop=self._stop,
            report=self._report,
            set_up_logging=self._set_up_logging,
            entry=self._worker_entry,
        )
        folder = prepare_model(config.model, config.model_cache, self._report, self._stop)
        self._folder = str(folder)
        tokenization = Tokenization.load(folder)
        self._report("importing torch and transformers")
        ready = self._supervisor.start(self._folder, tokenization.vocab_size)
        workload = WorkloadManager(
            BlockManager(ready.num_blocks, ready.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=step_tokens(config),
            eos_token_ids=frozenset(ready.eos_token_ids),
        )
        outputs = Outputs(workload, self._delivery, self._bound, self._observer)
        self._loaded = _Loaded(ready, Intake(tokenization, ready), workload, outputs)
        self._gate.load()
        self._started.set_result(None)
        return self._loaded

    def _step(self, loaded: _Loaded) -> None:
        began = time.monotonic()
        batch = loaded.workload.get_next_batch(began)
        try:
            # The last step's tokens go out while the worker computes: their readers would delay what it waits for.
            result = self._supervised().executor.execute(batch, sent=self._delivery.post)
        except WorkerDied as death:
            self._recover(loaded, batch, death)
            return
        sampled = loaded.workload.update(batch, result)
        loaded.outputs.take(batch, result, sampled)
        self._supervised().progress_made()
        self._gate.resume()
        self._observe(loaded, batch, time.monotonic() - began, result.seconds)

    def _idle(self, loaded: _Loaded) -> None:
        """Waits for a request, for the end, or for the worker's death; nothing wakes it in between."""
        executor = self._supervised().executor
        self._delivery.post()
        self._observe_gauges(loaded)
        readable = wait_readable((self._arrived.fileno(), self._stop.fileno(), executor.death_fd), math.inf)
        if self._stop.fileno() in readable:
            raise Stopped
        if executor.death_fd in readable:
            self._recover(loaded, ScheduledBatch(), WorkerDied("the worker died while idle"))
            self._gate.resume()  # nothing is there to step with

    def _recover(self, loaded: _Loaded, batch: ScheduledBatch, death: WorkerDied) -> None:
        """Everything that ran goes back to the head of the queue with its tokens; then there is a new worker."""
        self._gate.recover(f"{death.message}; another worker is starting")
        log.error("a worker died over: %s", ", ".join(item.sequence.request_id for item in batch.scheduled) or "nothing")
        blamed = loaded.workload.on_trial
        for sequence in loaded.workload.requeue_all(batch):
            loaded.outputs.fail(sequence, SequenceFailed())
        self._delivery.post()
        loaded.ready = self._supervised().replace(loaded.ready, death, blamed=blamed)
        self._observer.worker_restarted()

    def _expire(self, loaded: _Loaded) -> None:
        for sequence in loaded.workload.expire(time.monotonic()):
            loaded.outputs.fail(sequence, DeadlineExceeded(sequence.params.timeout or 0))

    def _give_up(self, error: QuartetError) -> None:
        """Everybody who waits is told why. What comes in later is told the same (`_post`)."""
        self._gate.give_up(error.message)
        if not self._started.done():
            self._started.set_exception(error)
        with self._inbox_lock:
            self._ended = True
            self._drain_inbox()
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        if self._loaded is not None:
            self._loaded.outputs.fail_all(lambda: self._gate.refusal() or Draining())
            self._observe_gauges(self._loaded)
        self._delivery.post()

    def _observe(self, loaded: _Loaded, batch: ScheduledBatch, seconds: float, forward_seconds: float) -> None:
        self._observer.step(
            scheduled=len(batch.scheduled), tokens=batch.num_tokens, seconds=seconds, forward_seconds=forward_seconds
        )
        self._observe_gauges(loaded)
        for _ in range(batch.preempted):
            self._observer.preempted()

    def _observe_gauges(self, loaded: _Loaded) -> None:
        workload = loaded.workload
        self._observer.gauges(
            running=workload.num_running,
            waiting=workload.num_waiting,
            used_blocks=workload.blocks.num_used,
            num_blocks=workload.blocks.num_blocks,
        )

    def _take_in(self, outputs: Outputs, prepared: list[Prepared], sinks: list[OutputSink]) -> None:
        for one, sink in zip(prepared, sinks, strict=True):
            outputs.add(one, sink)

    def _drain_inbox(self) -> None:
        self._arrived.clear()
        while self._inbox:
            self._inbox.popleft()()

    def _report(self, text: str) -> None:
        log.debug("%s", text)
        self._gate.report(text)

    def _supervised(self) -> WorkerSupervisor:
        assert self._supervisor is not None  # noqa: S101 - made before the first step
        return self._supervisor

    # -- shared

    def _post(self, command: Callable[[], None]) -> None:
        """Has the engine's thread do something between two steps. Once it has ended, nobody else touches its objects:
        then the caller's thread does it, and whoever came in late is refused."""
        with self._inbox_lock:
            if self._ended:
                command()
                self._refuse_rest()
            else:
                self._inbox.append(command)
                self._arrived.set()

    def _open(self) -> _Loaded:
        """Raises what a new request is refused with."""
        self._gate.check()
        assert self._loaded is not None  # noqa: S101 - set before the gate opens
        return self._loaded

    async def _off_the_loop(self, work: Callable[[], T]) -> T:
        def unless_closed() -> T:
            self._gate.check()
            return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, unless_closed)
        except RuntimeError:
            self._gate.check()  # the pool is shut down: we are closing
            raise
