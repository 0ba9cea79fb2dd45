"""The worker's main loop: its table of sequences, built from what each step says is new, and one forward per step."""

import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from llm.batch import Row
from llm.channel import ChannelClosed, Receiver, Sender
from llm.exceptions import ModelRefused
from llm.messages import (
    FromWorker,
    LoadFailed,
    NewSequence,
    Progress,
    RowResult,
    SequenceStep,
    Shutdown,
    StepRequest,
    StepResult,
    TokenLogprob,
    ToWorker,
    WorkerFailure,
    WorkerSpec,
)
from llm.model_runner import ModelRunner
from llm.sampler import Drawn, Sampler
from llm.step_threads import StepThreads

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """What the worker knows of a sequence."""

    new: NewSequence
    token_ids: list[int]
    computed: int
    block_table: list[int]


class ModelWorker:
    def __init__(self, runner: ModelRunner) -> None:
        ready = runner.ready
        self._runner = runner
        self._sampler = Sampler(ready.vocab_size, ready.eos_token_ids, torch.device(ready.device))
        self._known: dict[int, _Known] = {}
        self._threads = StepThreads(ready.probe.thread_counts, torch.set_num_threads)

    def step(self, request: StepRequest) -> StepResult:
        began = time.perf_counter()
        for seq_id in request.forget:
            if self._known.pop(seq_id, None) is not None:
                self._sampler.forget(seq_id)
        for new in request.new:
            self._known[new.seq_id] = _Known(new, list(new.token_ids), new.num_computed_tokens, list(new.block_table))
            self._sampler.add(new)
        rows = [self._row(item) for item in request.scheduled]
        with self._threads.step():
            logits = self._runner.forward(rows)
            results = self._results(request.scheduled, rows, logits)
        return StepResult(request.generation, request.step, results, time.perf_counter() - began)

    def request_ids(self, request: StepRequest) -> list[str]:
        return [known.new.request_id for item in request.scheduled if (known := self._known.get(item.seq_id))]

    def _row(self, item: SequenceStep) -> Row:
        known = self._known[item.seq_id]
        known.block_table += item.new_blocks
        start, end = known.computed, known.computed + item.num_tokens
        if known.new.params.prompt_logprobs is not None and start < known.new.num_prompt_tokens:
            wanted = 0
        else:
            wanted = item.num_tokens - 1 if end == len(known.token_ids) else item.num_tokens
        return Row(known.token_ids[start:end], start, known.block_table, wanted)

    def _results(self, scheduled: tuple[SequenceStep, ...], rows: list[Row], logits: torch.Tensor) -> tuple[RowResult, ...]:
        """logits: [rows wanted, vocab] float32, in order. The last row of each sequence that caught up is sampled."""
        results: list[RowResult] = []
        last: dict[int, int] = {}  # place in results -> row of the logits to sample from
        at = 0
        for item, row in zip(scheduled, rows, strict=True):
            known = self._known[item.seq_id]
            wanted = len(row.token_ids) - row.logits_from
            prompt_logprobs: tuple[TokenLogprob, ...] = ()
            if row.logits_from == 0 and known.new.params.prompt_logprobs is not None:
                prompt_logprobs = self._prompt_logprobs(known, row, logits[at : at + wanted])
            at += wanted
            known.computed += item.num_tokens
            if known.computed == len(known.token_ids):
                last[len(results)] = at - 1
            results.append(RowResult(item.seq_id, prompt_logprobs=prompt_logprobs))
        if last:
            chosen = logits if len(last) == len(logits) else logits[list(last.values())]
            self._draw(scheduled, last, chosen, results)
        return tuple(results)

    def _draw(
        self, scheduled: tuple[SequenceStep, ...], places: Iterable[int], logits: torch.Tensor, results: list[RowResult]
    ) -> None:
        """logits: [places, vocab]"""
        drawn = self._sampler.sample([scheduled[place].seq_id for place in places], logits)
        for place, draw in zip(places, drawn, strict=True):
            results[place] = self._with_draw(results[place], draw)

    def _prompt_logprobs(self, known: _Known, row: Row, logits: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """The logits of position i predict token i + 1, as far as that is still prompt."""
        following = known.token_ids[row.start + 1 : min(row.start + len(row.token_ids) + 1, known.new.num_prompt_tokens)]
        return self._sampler.prompt_logprobs(following, logits[: len(following)], known.new.params.prompt_logprobs or 0)

    def _with_draw(self, result: RowResult, draw: Drawn) -> RowResult:
        if draw.error is not None:
            log.error("a sequence failed: %s", draw.error, extra={"request_id": self._known[result.seq_id].new.request_id})
        elif draw.token_id is not None:
            self._known[result.seq_id].token_ids.append(draw.token_id)
        return RowResult(result.seq_id, draw.token_id, draw.logprob, result.prompt_logprobs, draw.error)


def run_worker(spec: WorkerSpec, tasks: Connection, results: Connection) -> None:
    """Loads the model, says so, and answers steps until told to stop. A step that raises ends the worker: its state is
    not to be trusted any more, and the engine starts another one."""
    receiver, sender = Receiver(tasks), Sender(results)

    def send(message: FromWorker) -> None:
        try:
            sender.send(message)
        except ChannelClosed:
            os._exit(1)  # the parent is gone, or has given this worker up

    try:
        runner = ModelRunner(spec, lambda text: send(Progress(spec.generation, text)))
        worker = ModelWorker(runner)
    except ModelRefused as error:
        send(LoadFailed(spec.generation, error.message))
        return
    send(runner.ready)
    while True:
        request: ToWorker = receiver.receive(math.inf)
        if isinstance(request, Shutdown):
            return
        try:
            result = worker.step(request)
        except Exception as error:
            log.exception("step %d failed; in the batch: %s", request.step, ", ".join(worker.request_ids(request)))
            send(WorkerFailure(spec.generation, request.step, f"{type(error).__name__}: {error}"))
            return
        send(result)
