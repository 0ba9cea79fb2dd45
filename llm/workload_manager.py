"""Which sequences run next, and how many tokens each: pure logic over sequences and blocks.

There is no prefill mode and no decode mode. Each sequence has known tokens and computed tokens, and a step lets the
computed ones catch up: by one where only the last token is new, by a chunk where a prompt is. A preempted sequence,
one whose worker died and one that found its prefix in the cache differ only in how much is left to catch up with.

Order is (priority, arrival). The first in that order can always run: it may take the blocks of all the others, and
nobody is admitted whose tokens could never fit. So nobody starves, and nothing is skipped to let a smaller one pass.

(The idea of known and computed tokens is vLLM v1's; a suspect's trial is ours.)
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from llm.block_manager import BlockManager
from llm.messages import StepResult
from llm.sequence import FinishReason, Sequence, SequenceStatus

SUSPECT = 2  # workers that died over a sequence before it is tried alone
HEAP_SLACK = 64


@dataclass(slots=True)
class ScheduledSequence:
    sequence: Sequence
    num_tokens: int
    new_blocks: tuple[int, ...] = ()
    admitted: bool = False  # the worker knows nothing of it yet


@dataclass(slots=True)
class ScheduledBatch:
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    forget: tuple[int, ...] = ()  # what the worker may drop before it computes
    preempted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sequence got a token. `finish` is set where that ends it: its length, an end token or a stop token."""

    sequence: Sequence
    token_id: int
    finish: FinishReason | None
    stop_token: bool  # one of params.stop_token_ids


class WorkloadManager:
    """`max_num_batched_tokens` bounds a step; it is at least max_num_seqs, so that every running sequence gets a token."""

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, eos_token_ids: frozenset[int]
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError("a step must have room for one token of every sequence")
        self.blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._running: list[Sequence] = []  # in order
        self._waiting: dict[int, Sequence] = {}
        self._queue: list[tuple[tuple[int, float, int], Sequence]] = []  # heap over _waiting; may hold finished ones
        self._deadlines: list[tuple[float, int, Sequence]] = []  # heap; may hold finished ones
        self._suspects: dict[int, Sequence] = {}
        self._forget: list[int] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def on_trial(self) -> bool:
        """Steps go to one suspect alone: a death now is that sequence's doing, not the worker's."""
        return bool(self._suspects)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def sequences(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting.values()

    def add(self, sequence: Sequence) -> None:
        if sequence.deadline != math.inf:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.seq_id, sequence))
        self._wait(sequence)

    def next_deadline(self) -> float:
        """Monotonic seconds; infinite where no sequence has one."""
        while self._deadlines and self._deadlines[0][2].status is SequenceStatus.FINISHED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def expire(self, now: float) -> list[Sequence]:
        """Ends the sequences whose deadline has passed, running or waiting, and returns them."""
        expired = []
        while self.next_deadline() <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            self.finish(sequence)
            expired.append(sequence)
        return expired

    def get_next_batch(self, now: float) -> ScheduledBatch:
        """The next step. Empty only where there is no work. Blocks are taken; nothing is marked as computed yet."""
        batch = ScheduledBatch()
        if self._suspects:
            self._schedule_alone(batch)
        else:
            self._schedule_running(batch)
            self._admit_waiting(batch)
        for item in batch.scheduled:
            if item.sequence.first_scheduled is None:
                item.sequence.first_scheduled = now
        batch.forget, self._forget = tuple(self._forget), []
        return batch

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[Sampled]:
        """Takes in a completed step. A sequence that was finished meanwhile is passed over."""
        sampled = []
        for item, row in zip(batch.scheduled, result.rows, strict=True):
            sequence = item.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.num_computed_tokens += item.num_tokens
            self.blocks.index(sequence)
            self._clear_suspicion(sequence)
            if row.token_id is not None:
                sequence.token_ids.append(row.token_id)
                sampled.append(self._judge(sequence, row.token_id))
        return sampled

    def finish(self, sequence: Sequence) -> None:
        """The sequence ends, for whatever reason: its blocks and its slot are free for the next step."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._leave(sequence)
        else:
            del self._waiting[sequence.seq_id]
        self._suspects.pop(sequence.seq_id, None)
        sequence.status = SequenceStatus.FINISHED
        self._drop_finished()

    def requeue_all(self, batch: ScheduledBatch) -> list[Sequence]:
        """The worker died over `batch`: everything starts over from its known tokens, at the head of the queue.

        A sequence over which worker after worker died is tried alone, until it gets past the point of its death. One
        that kills even then is finished and returned: it has failed.
        """
        failed = []
        for item in batch.scheduled:
            sequence = item.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.deaths += 1
            sequence.death_point = max(sequence.death_point, sequence.num_computed_tokens + item.num_tokens)
            if sequence.deaths > SUSPECT:
                failed.append(sequence)
            elif sequence.deaths == SUSPECT:
                self._suspects[sequence.seq_id] = sequence
        for sequence in reversed(self._running.copy()):
            self._leave(sequence)
            self._wait(sequence)
        for sequence in failed:
            self.finish(sequence)
        self._forget.clear()
        self.blocks.forget_contents()
        return failed

    def check(self) -> None:
        """Raises AssertionError where blocks are lost, held by nobody, or a sequence stands in two places."""
        self.blocks.check()
        held = {block for sequence in self._running for block in sequence.block_table}
        if len(held) != self.blocks.num_used:
            raise AssertionError(f"{self.blocks.num_used} blocks are used, {len(held)} are held")
        if any(sequence.block_table for sequence in self._waiting.values()):
            raise AssertionError("a waiting sequence holds blocks")
        if len(self._running) > self._max_num_seqs:
            raise AssertionError("more sequences run than may")

    def _schedule_running(self, batch: ScheduledBatch) -> None:
        """One token for each that only has its last one to compute; the rest of the budget to prompts, in order."""
        prompts = self._max_num_batched_tokens - sum(1 for s in self._running if s.num_uncomputed_tokens == 1)
        at = 0
        while at < len(self._running):
            sequence = self._running[at]
            tokens = 1 if sequence.num_uncomputed_tokens == 1 else min(sequence.num_uncomputed_tokens, prompts)
            if tokens == 0:
                at += 1
                continue
            while not self.blocks.can_append(sequence):
                victim = self._running[-1]
                self._preempt(victim, batch)
                if victim is sequence:
                    return
            if sequence.num_uncomputed_tokens > 1:
                prompts -= tokens
            batch.scheduled.append(ScheduledSequence(sequence, tokens, self.blocks.append(sequence)))
            at += 1

    def _admit_waiting(self, batch: ScheduledBatch) -> None:
        """In order, as long as a slot, budget and blocks are left. One block per running sequence stays in reserve, so
        that an admission isn't undone by the next token of somebody else."""
        budget = self._max_num_batched_tokens - batch.num_tokens
        while budget > 0 and not batch.preempted and len(self._running) < self._max_num_seqs:
            sequence = self._head()
            if sequence is None or _waits_for_its_parent(sequence):
                return
            if not self.blocks.can_allocate(sequence, reserve=len(self._running)):
                return
            budget -= self._admit(sequence, budget, batch)

    def _schedule_alone(self, batch: ScheduledBatch) -> None:
        """A suspect gets steps of its own until it is cleared or has failed; the others keep their places."""
        sequence = min(self._suspects.values(), key=lambda s: s.order)
        if sequence.status is SequenceStatus.RUNNING:
            tokens = min(sequence.num_uncomputed_tokens, self._max_num_batched_tokens)
            batch.scheduled.append(ScheduledSequence(sequence, tokens, self.blocks.append(sequence)))
            return
        while len(self._running) >= self._max_num_seqs or not self.blocks.can_allocate(sequence):
            self._preempt(self._running[-1], batch)
        self._admit(sequence, self._max_num_batched_tokens, batch)

    def _admit(self, sequence: Sequence, budget: int, batch: ScheduledBatch) -> int:
        del self._waiting[sequence.seq_id]
        self.blocks.allocate(sequence)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        self._running.sort(key=lambda s: s.order)
        tokens = min(sequence.num_uncomputed_tokens, budget)
        batch.scheduled.append(ScheduledSequence(sequence, tokens, tuple(sequence.block_table), admitted=True))
        return tokens

    def _preempt(self, sequence: Sequence, batch: ScheduledBatch) -> None:
        self._leave(sequence)
        self._wait(sequence)
        sequence.num_preemptions += 1
        batch.preempted += 1

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.blocks.release(sequence)
        self._forget.append(sequence.seq_id)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self._waiting[sequence.seq_id] = sequence
        heapq.heappush(self._queue, (sequence.order, sequence))

    def _drop_finished(self) -> None:
        """Keeps the heaps within twice what they are for: those who left in the middle would stay for as long as the
        first in line does."""
        if len(self._queue) > 2 * len(self._waiting) + HEAP_SLACK:
            self._queue = [(s.order, s) for s in self._waiting.values()]
            heapq.heapify(self._queue)
        if len(self._deadlines) > 2 * (len(self._waiting) + len(self._running)) + HEAP_SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._deadlines)

    def _head(self) -> Sequence | None:
        while self._queue and self._queue[0][1].seq_id not in self._waiting:
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def _clear_suspicion(self, sequence: Sequence) -> None:
        if sequence.deaths > 0 and sequence.num_computed_tokens >= sequence.death_point:
            sequence.deaths = sequence.death_point = 0
            self._suspects.pop(sequence.seq_id, None)

    def _judge(self, sequence: Sequence, token_id: int) -> Sampled:
        stop_token = token_id in sequence.params.stop_token_ids
        ended = stop_token or (token_id in self._eos_token_ids and not sequence.params.ignore_eos)
        if ended:
            return Sampled(sequence, token_id, FinishReason.STOP, stop_token)
        full = sequence.num_output_tokens >= sequence.max_tokens
        return Sampled(sequence, token_id, FinishReason.LENGTH if full else None, False)


def _waits_for_its_parent(sequence: Sequence) -> bool:
    """A fork is admitted once the prompt of its origin is computed: then it finds the shared blocks by their tokens."""
    parent = sequence.forked_from
    return parent is not None and parent.status is not SequenceStatus.FINISHED and not parent.prompt_computed
