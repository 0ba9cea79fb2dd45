"""From sampled tokens to what the callers get: decoding, stop strings, logprobs, and how each sequence ended."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from llm.delivery import Completion, Delivery, Delta, OutputSink
from llm.exceptions import QuartetError, SequenceFailed
from llm.intake import AdmissionBound, Prepared
from llm.messages import RowResult, StepResult, TokenLogprob
from llm.observer import Observer
from llm.sequence import FinishReason, Sequence
from llm.tokenization import IncrementalDecoder
from llm.workload_manager import Sampled, ScheduledBatch, WorkloadManager

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    decoder: IncrementalDecoder
    truncated: bool
    sink: OutputSink
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    last_token: float | None = None  # monotonic seconds


class Outputs:
    """The sequences in hand and their readers; the engine's thread only. Every sequence that is added ends here, once."""

    def __init__(self, workload: WorkloadManager, delivery: Delivery, bound: AdmissionBound, observer: Observer) -> None:
        self._workload = workload
        self._delivery = delivery
        self._bound = bound
        self._observer = observer
        self._entries: dict[int, _Entry] = {}

    def add(self, prepared: Prepared, sink: OutputSink) -> None:
        sequence = prepared.sequence
        self._entries[sequence.seq_id] = _Entry(sequence, prepared.decoder, prepared.truncated, sink)
        self._workload.add(sequence)

    def take(self, batch: ScheduledBatch, result: StepResult, sampled: Iterable[Sampled]) -> None:
        """What a step computed, after `WorkloadManager.update`. A row that fails ends its own sequence only."""
        tokens = {one.sequence.seq_id: one for one in sampled}
        for item, row in zip(batch.scheduled, result.rows, strict=True):
            entry = self._entries.get(row.seq_id)
            if entry is None:
                continue  # it left while the step ran
            if row.error is not None:
                self._fail(entry, SequenceFailed(f"the model failed on this request: {row.error}"))
                continue
            try:
                self._keep_prompt_logprobs(entry, row, item.num_tokens)
                if row.seq_id in tokens:
                    self._deliver(entry, tokens[row.seq_id], row)
            # Not hidden: the log has the fault, its own caller a 500. Raised here it would end every other sequence, too.
            except Exception:
                log.exception("a token could not be decoded", extra={"request_id": entry.sequence.request_id})
                self._fail(entry, SequenceFailed())

    def fail(self, sequence: Sequence, error: QuartetError) -> None:
        self._fail(self._entries[sequence.seq_id], error)

    def fail_all(self, make_error: Callable[[], QuartetError]) -> None:
        for entry in list(self._entries.values()):
            self._fail(entry, make_error())

    def abort(self, seq_ids: Iterable[int]) -> None:
        """Their reader has left. Those that have ended are passed over."""
        for seq_id in seq_ids:
            entry = self._entries.get(seq_id)
            if entry is not None:
                self._end(entry, FinishReason.ABORT.value)

    def _keep_prompt_logprobs(self, entry: _Entry, row: RowResult, num_tokens: int) -> None:
        """Written by place: a sequence that starts over computes them again."""
        if row.prompt_logprobs:
            start = entry.sequence.num_computed_tokens - num_tokens
            entry.prompt_logprobs[start : start + len(row.prompt_logprobs)] = row.prompt_logprobs

    def _deliver(self, entry: _Entry, sampled: Sampled, row: RowResult) -> None:
        finish, stop_reason, text = self._decode(entry, sampled)
        delta = Delta(text, [sampled.token_id], [row.logprob] if row.logprob else [])
        self._time_token(entry)
        if finish is not None:
            delta.completion = Completion.of(
                entry.sequence, finish, stop_reason, truncated=entry.truncated, prompt_logprobs=entry.prompt_logprobs
            )
            self._end(entry, finish.value)
        self._delivery.add(entry.sink, delta)

    def _decode(self, entry: _Entry, sampled: Sampled) -> tuple[FinishReason | None, int | str | None, str]:
        """A stop string that this token completes ends the sequence, whatever else would end it here."""
        decoder, finish = entry.decoder, sampled.finish
        text = decoder.take(sampled.token_id, finish)
        if decoder.stop_match is not None:
            return FinishReason.STOP, decoder.stop_match, text
        return finish, sampled.token_id if sampled.stop_token else None, text

    def _time_token(self, entry: _Entry) -> None:
        now = time.monotonic()
        self._observer.output_tokens(1)
        if entry.last_token is None:
            sequence = entry.sequence
            if sequence.first_scheduled is not None:
                self._observer.queued(sequence.first_scheduled - sequence.arrival)
            self._observer.prompt_tokens(sequence.num_prompt_tokens, sequence.num_cached_tokens or 0)
            self._observer.first_token(now - sequence.arrival)
        else:
            self._observer.next_token(now - entry.last_token)
        entry.last_token = now

    def _fail(self, entry: _Entry, error: QuartetError) -> None:
        self._end(entry, error.code)
        self._delivery.add(entry.sink, Delta(error=error))

    def _end(self, entry: _Entry, outcome: str) -> None:
        del self._entries[entry.sequence.seq_id]
        self._workload.finish(entry.sequence)
        seconds = time.monotonic() - entry.sequence.arrival
        self._bound.give_back(1, seconds)
        self._observer.finished(outcome, seconds)
