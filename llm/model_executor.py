"""The model's worker, seen from the engine: given steps, watched, ended, started again.

    engine thread                                   worker
    execute(batch) -- StepRequest, task pipe    ->  forward, sample
                   <- StepResult, result pipe   --

A step that raises, hangs or takes its process with it is WorkerDied; what to do about that is the engine's to say.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from llm.channel import Wakeup
from llm.exceptions import ModelRefused, WorkerDied
from llm.forkserver import Forkserver
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
from llm.worker_process import WorkerProcess
from llm.workload_manager import ScheduledBatch, ScheduledSequence

MODEL_WORKER = "llm.model_worker:run_worker"


class ModelExecutor:
    """Used by the engine's thread only. `stop` ends every wait with Stopped.

    `entry` is what a worker runs, "module:function".
    """

    def __init__(
        self,
        forkserver: Forkserver,
        *,
        stop: Wakeup,
        step_timeout: float,
        load_timeout: float,
        report: Callable[[str], None],
        set_up_logging: Callable[[], None],
        entry: str = MODEL_WORKER,
    ) -> None:
        self._forkserver = forkserver
        self._stop = stop
        self._step_timeout = step_timeout
        self._load_timeout = load_timeout
        self._report = report
        self._set_up_logging = set_up_logging
        self._entry = entry
        self._generation = 0
        self._step = 0
        self._worker: WorkerProcess | None = None

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
        began = time.monotonic()
        self._worker = WorkerProcess.start(
            self._forkserver,
            self._entry,
            self._set_up_logging,
            dataclasses.replace(spec, generation=self._generation),
            stop=self._stop,
            timeout=self._load_timeout,
        )
        while True:
            message = self._receive("loading the model", self._load_timeout, began)
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
        self._running_worker().send(request, self._step_timeout)
        sent()
        result = self._receive(f"step {self._step}", self._step_timeout, time.monotonic())
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

    def _running_worker(self) -> WorkerProcess:
        if self._worker is None:
            raise WorkerDied("no worker runs")
        return self._worker

    def _receive(self, what: str, limit: float, since: float) -> Any:
        """The next message of this generation."""
        while True:
            message = self._running_worker().receive(what, limit, since)
            if message.generation == self._generation:
                return message


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
