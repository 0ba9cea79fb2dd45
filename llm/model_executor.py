"""The worker process, seen from the engine: started from the forkserver, given steps, watched, ended, started again.

    engine thread                                   worker
    execute(batch) -- StepRequest, task pipe    ->  forward, sample
                   <- StepResult, result pipe   --
    waits on the result pipe, the worker's pidfd and the engine's stop, all at once: a death is noticed when it happens

Both pipes are made anew with each worker, and the parent closes the child's ends: nothing of a dead worker is met again.
"""

import atexit
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any

from llm.channel import ChannelError, ChannelTimeout, Receiver, Sender, Stopped, Wakeup, Woken, wait_readable
from llm.exceptions import ModelRefused, WorkerDied
from llm.messages import (
    LoadFailed,
    NewSequence,
    Progress,
    Ready,
    SequenceStep,
    StepRequest,
    StepResult,
    WorkerFailure,
    WorkerSpec,
)
from llm.worker_entry import PARENT_PID, begin_worker
from llm.workload_manager import ScheduledBatch, ScheduledSequence

log = logging.getLogger(__name__)

MODEL_WORKER = "llm.model_worker:run_worker"
_PRELOAD = ["llm.forkserver_guard", "llm.preload"]
_END_SECONDS = 1.0  # for a killed process to be gone
_KILL_SECONDS = 0.05  # between two attempts on a forkserver that is just being started


def _start_forkserver() -> None:
    """Starts the process that imports torch and the model classes, and returns at once. Does nothing where it runs.

    It is killed when the thread that started it ends (`llm/forkserver_guard.py`).
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    os.environ[PARENT_PID] = str(os.getpid())
    forkserver.ensure_running()


def _kill_forkserver() -> None:
    """One that is still importing wouldn't see that it isn't wanted any more."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class _Worker:
    """One process with its two pipes. Its death is seen through `death_fd`."""

    def __init__(self, process: ForkServerProcess, sender: Sender, receiver: Receiver) -> None:
        assert process.pid is not None  # noqa: S101 - it was started
        self.pid = process.pid
        self.sender, self.receiver = sender, receiver
        self._process = process
        try:
            # The forkserver's word on its children ends with the forkserver; the kernel's doesn't.
            self._pidfd: int | None = os.pidfd_open(self.pid)
        except (OSError, AttributeError):
            self._pidfd = None
        # multiprocessing joins its children at exit, and this one ignores the signal that it sends them before.
        atexit.register(self.kill)

    @property
    def death_fd(self) -> int:
        return self._process.sentinel if self._pidfd is None else self._pidfd

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self) -> None:
        """Kills it and waits until it is gone; its handles are closed."""
        atexit.unregister(self.kill)
        self.kill()
        wait_readable((self.death_fd,), _END_SECONDS)
        self._process.join(_END_SECONDS)
        self._process.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self.sender.close()
        self.receiver.close()


class ModelExecutor:
    """Used by the engine's thread only. `stop` ends every wait with Stopped.

    `entry` is what a worker runs, "module:function".
    """

    def __init__(
        self,
        *,
        stop: Wakeup,
        step_timeout: float,
        load_timeout: float,
        report: Callable[[str], None],
        set_up_logging: Callable[[], None],
        entry: str = MODEL_WORKER,
    ) -> None:
        self._stop = stop
        self._step_timeout = step_timeout
        self._load_timeout = load_timeout
        self._report = report
        self._set_up_logging = set_up_logging
        self._entry = entry
        self._generation = 0
        self._step = 0
        self._worker: _Worker | None = None
        # One thread for the executor's whole life: the forkserver lives no longer than the thread that starts it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="worker-start")
        self._starter.submit(_start_forkserver)

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid if self._worker else None

    @property
    def death_fd(self) -> int:
        """Readable once the worker has died."""
        return self._running_worker().death_fd

    def start(self, spec: WorkerSpec) -> Ready:
        """Ends the worker there may be, starts one and waits until it has loaded the model. `spec.generation` is ours.

        Raises ModelRefused, WorkerDied (also for a load over its time limit) or Stopped.
        """
        self.end()
        self._generation += 1
        deadline = time.monotonic() + self._load_timeout
        self._worker = self._fork(dataclasses.replace(spec, generation=self._generation), deadline)
        while True:
            message = self._receive(deadline - time.monotonic(), "loading the model")
            match message:
                case Progress(text=text):
                    self._report(text)
                case Ready():
                    return message
                case LoadFailed(reason=reason):
                    self.end()
                    raise ModelRefused(reason)
                case _:
                    raise WorkerDied(f"the worker said {type(message).__name__} while loading")

    def execute(self, batch: ScheduledBatch, sent: Callable[[], None]) -> StepResult:
        """One step, blocking; `sent` is called when the worker has it. Raises WorkerDied where the worker ended, failed, or
        took longer than a step may; Stopped."""
        self._step += 1
        request = StepRequest(
            self._generation,
            self._step,
            tuple(_new_sequence(item) for item in batch.scheduled if item.admitted),
            tuple(
                SequenceStep(item.sequence.seq_id, item.num_tokens, () if item.admitted else item.new_blocks)
                for item in batch.scheduled
            ),
            batch.forget,
        )
        try:
            self._running_worker().sender.send(request, self._step_timeout)
        except ChannelError as error:
            raise WorkerDied(f"the worker takes no step: {error}") from error
        sent()
        result = self._receive(self._step_timeout, f"step {self._step}")
        if isinstance(result, WorkerFailure):
            raise WorkerDied(f"the step failed: {result.text}")
        if not isinstance(result, StepResult) or result.step != self._step:
            raise WorkerDied("the worker answered something else")
        return result

    def end(self) -> None:
        """Kills the worker, if there is one, and returns when it is gone."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def close(self) -> None:
        """Ends the worker and the forkserver."""
        self.end()
        _kill_forkserver()
        self._starter.shutdown()
        forkserver._forkserver._stop()  # type: ignore[attr-defined]

    def _running_worker(self) -> _Worker:
        if self._worker is None:
            raise WorkerDied("no worker runs")
        return self._worker

    def _fork(self, spec: WorkerSpec, deadline: float) -> _Worker:
        """The forkserver answers when its imports are done, so this is done from a thread that can be left waiting."""
        context = multiprocessing.get_context("forkserver")
        task_reader, task_writer = context.Pipe(duplex=False)
        result_reader, result_writer = context.Pipe(duplex=False)
        arguments = (self._entry, self._set_up_logging, spec, task_reader, result_writer)
        process = context.Process(target=begin_worker, args=arguments, name="model-worker", daemon=True)
        ended = Wakeup()
        start = self._starter.submit(_start, process)
        start.add_done_callback(lambda _: ended.set())
        readable = wait_readable((ended.fileno(), self._stop.fileno()), deadline - time.monotonic())
        while not wait_readable((ended.fileno(),), 0 if ended.fileno() in readable else _KILL_SECONDS):
            _kill_forkserver()
        ended.close()
        task_reader.close()
        result_writer.close()
        error = start.result()
        if error is None:
            return _Worker(process, Sender(task_writer), Receiver(result_reader))
        task_writer.close()
        result_reader.close()
        if self._stop.fileno() in readable:
            raise Stopped
        raise WorkerDied(f"the worker could not be started: {error}")

    def _receive(self, timeout: float, what: str) -> Any:
        """The next message of this generation."""
        worker = self._running_worker()
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = worker.receiver.receive(deadline - time.monotonic(), (self._stop.fileno(), worker.death_fd))
            except Woken as woken:
                if woken.fd == self._stop.fileno():
                    raise Stopped from None
                raise WorkerDied(f"the worker died during {what}") from None
            except ChannelTimeout:
                raise WorkerDied(f"{what} took longer than {timeout:g} s") from None
            except ChannelError as error:
                raise WorkerDied(f"the worker died during {what}") from error
            if message.generation == self._generation:
                return message


def _start(process: ForkServerProcess) -> OSError | EOFError | None:
    """Returns when the forkserver has forked, or the error where it is gone."""
    try:
        _start_forkserver()
        process.start()
    except (OSError, EOFError) as error:
        return error
    return None


def _new_sequence(item: ScheduledSequence) -> NewSequence:
    sequence = item.sequence
    return NewSequence(
        sequence.seq_id,
        sequence.request_id,
        tuple(sequence.token_ids),
        sequence.num_prompt_tokens,
        sequence.num_computed_tokens,
        item.new_blocks,
        sequence.params,
        sequence.seed,
        sequence.bad_word_ids,
    )
