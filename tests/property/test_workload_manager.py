"""Whatever arrives, leaves, dies or waits: no block is lost or held twice, nobody starves, no step is over its budget."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llm.block_manager import BlockManager
from llm.messages import RowResult, StepResult
from llm.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus
from llm.workload_manager import ScheduledBatch, WorkloadManager

BLOCK = 4
EOS = 9


class WorkloadMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(4, 12), max_num_seqs=st.integers(1, 4), budget=st.integers(4, 24))
    def start(self, num_blocks: int, max_num_seqs: int, budget: int) -> None:
        self.capacity = num_blocks * BLOCK
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.blocks = BlockManager(num_blocks, BLOCK)
        self.manager = WorkloadManager(
            self.blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, eos_token_ids=frozenset({EOS})
        )
        self.now = 0.0
        self.alive: dict[int, Sequence] = {}
        self.ended: list[Sequence] = []
        self.known_to_worker: set[int] = set()
        self.next_id = 0

    def add(self, prompt: list[int], max_tokens: int, priority: int, deadline: float, origin: Sequence | None) -> Sequence:
        prompt = prompt[: self.capacity - 1]
        self.next_id += 1
        sequence = Sequence(
            seq_id=self.next_id,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(max_tokens=max_tokens, priority=priority),
            seed=0,
            max_tokens=min(max_tokens, self.capacity - len(prompt)),
            arrival=self.now,
            deadline=deadline,
            forked_from=origin,
        )
        self.alive[sequence.seq_id] = sequence
        self.manager.add(sequence)
        return sequence

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=30),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        patience=st.sampled_from([math.inf, math.inf, 3.0]),
    )
    def arrive(self, prompt: list[int], max_tokens: int, priority: int, patience: float) -> None:
        self.add(prompt, max_tokens, priority, self.now + patience, None)

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20), choices=st.integers(2, 4))
    def arrive_forked(self, prompt: list[int], choices: int) -> None:
        origin = self.add(prompt, 6, 0, math.inf, None)
        for _ in range(choices - 1):
            self.add(prompt, 6, 0, math.inf, origin)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.alive.values(), key=lambda s: s.seq_id)))
        self.manager.finish(sequence)
        self.manager.finish(sequence)
        self.end(sequence)

    @rule(seconds=st.floats(0.1, 4))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for sequence in self.manager.expire(self.now):
            assert sequence.deadline <= self.now
            self.end(sequence)
        assert self.manager.next_deadline() > self.now

    @precondition(lambda self: self.manager.has_work)
    @rule(tokens=st.lists(st.integers(0, EOS), min_size=4, max_size=4))
    def step(self, tokens: list[int]) -> None:
        self.complete(self.scheduled(), tokens)

    @precondition(lambda self: self.manager.has_work)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=4, max_size=4))
    def step_while_one_leaves(self, data: st.DataObject, tokens: list[int]) -> None:
        batch = self.scheduled()
        sequence = data.draw(st.sampled_from([item.sequence for item in batch.scheduled]))
        self.manager.finish(sequence)
        self.end(sequence)
        self.complete(batch, tokens)

    @precondition(lambda self: self.manager.has_work)
    @rule()
    def worker_dies(self) -> None:
        batch = self.scheduled()
        for sequence in self.manager.requeue_all(batch):
            assert sequence.deaths == 3
            self.end(sequence)
        self.known_to_worker.clear()
        assert self.manager.num_running == 0
        assert self.blocks.num_used == 0

    def scheduled(self) -> ScheduledBatch:
        """The next batch, checked against every promise of a batch."""
        batch = self.manager.get_next_batch(self.now)
        assert batch.scheduled, "work, and nothing scheduled"
        assert batch.num_tokens <= self.budget
        assert len(batch.scheduled) <= self.max_num_seqs
        assert len({item.sequence.seq_id for item in batch.scheduled}) == len(batch.scheduled)
        self.known_to_worker -= set(batch.forget)
        for item in batch.scheduled:
            sequence = item.sequence
            assert sequence.status is SequenceStatus.RUNNING
            assert 1 <= item.num_tokens <= sequence.num_uncomputed_tokens
            assert len(sequence.block_table) * BLOCK >= sequence.num_computed_tokens + item.num_tokens
            assert item.admitted == (sequence.seq_id not in self.known_to_worker)
            self.known_to_worker.add(sequence.seq_id)
        if self.manager.on_trial:
            assert len(batch.scheduled) == 1
        return batch

    def complete(self, batch: ScheduledBatch, tokens: list[int]) -> None:
        rows = []
        for item, token in zip(batch.scheduled, tokens, strict=False):
            caught_up = item.num_tokens == item.sequence.num_uncomputed_tokens
            rows.append(RowResult(item.sequence.seq_id, token_id=token if caught_up else None))
        before = {s.seq_id: len(s.token_ids) for s in self.alive.values()}
        for sampled in self.manager.update(batch, StepResult(1, 1, tuple(rows), 0.0)):
            sequence = sampled.sequence
            assert len(sequence.token_ids) == before[sequence.seq_id] + 1
            assert (sampled.finish is FinishReason.STOP) == (sampled.token_id == EOS)
            if sampled.finish is not None:
                self.manager.finish(sequence)
                self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        assert sequence.status is SequenceStatus.FINISHED
        assert not sequence.block_table
        self.ended.append(self.alive.pop(sequence.seq_id))

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()
            assert {s.seq_id for s in self.manager.sequences()} == set(self.alive)
            tables = [block for s in self.alive.values() for block in s.block_table]
            assert 0 not in tables

    def teardown(self) -> None:
        """Nobody starves: left alone, everything ends, in as many steps as there are tokens at most."""
        if not hasattr(self, "manager"):
            return
        for _ in range(40 * (len(self.alive) + 1) * 12):
            if not self.manager.has_work:
                break
            self.complete(self.scheduled(), [0, 1, 2, 0])
        assert not self.alive
        assert self.blocks.num_used == 0
        self.manager.check()


WorkloadMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWorkload = WorkloadMachine.TestCase
