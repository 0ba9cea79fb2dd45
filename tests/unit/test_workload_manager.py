"""What the scheduler promises, case by case."""

import math

import pytest

from llm.block_manager import BlockManager
from llm.messages import RowResult, StepResult
from llm.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus
from llm.workload_manager import Sampled, ScheduledBatch, WorkloadManager

EOS = 2


def make(
    seq_id: int, prompt: int | list[int], *, max_tokens: int = 8, priority: int = 0, deadline: float = math.inf, **params: int
) -> Sequence:
    token_ids = [100 * seq_id + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(
        seq_id=seq_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(max_tokens=max_tokens, priority=priority, **params),  # type: ignore[arg-type]
        seed=0,
        max_tokens=max_tokens,
        arrival=float(seq_id),
        deadline=deadline,
    )


def manager(num_blocks: int = 100, *, max_num_seqs: int = 4, budget: int = 64, block_size: int = 4) -> WorkloadManager:
    return WorkloadManager(
        BlockManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        eos_token_ids=frozenset({EOS}),
    )


def plan(batch: ScheduledBatch) -> list[tuple[int, int]]:
    return [(item.sequence.seq_id, item.num_tokens) for item in batch.scheduled]


def run(workload: WorkloadManager, token: int = 7) -> list[tuple[int, int]]:
    """One step that samples `token` for everybody who caught up; those that end are finished."""
    batch = workload.get_next_batch(0.0)
    complete(workload, batch, token)
    return plan(batch)


def complete(workload: WorkloadManager, batch: ScheduledBatch, token: int = 7) -> list[Sampled]:
    rows = tuple(
        RowResult(item.sequence.seq_id, token if item.num_tokens == item.sequence.num_uncomputed_tokens else None)
        for item in batch.scheduled
    )
    sampled = workload.update(batch, StepResult(1, 1, rows, 0.0))
    for one in sampled:
        if one.finish:
            workload.finish(one.sequence)
    return sampled


def test_a_long_prompt_is_computed_in_chunks_beside_running_sequences() -> None:
    workload = manager(budget=16)
    workload.add(make(1, 3))
    assert run(workload) == [(1, 3)]
    workload.add(make(2, 40))
    assert run(workload) == [(1, 1), (2, 15)]
    assert run(workload) == [(1, 1), (2, 15)]
    assert run(workload) == [(1, 1), (2, 10)]
    assert run(workload) == [(1, 1), (2, 1)]


def test_a_slot_that_is_freed_in_one_step_is_filled_in_the_next() -> None:
    workload = manager(max_num_seqs=2)
    for i in (1, 2, 3):
        workload.add(make(i, 2, max_tokens=2))
    assert run(workload) == [(1, 2), (2, 2)]
    assert run(workload) == [(1, 1), (2, 1)]
    assert run(workload) == [(3, 2)]


def test_a_smaller_priority_goes_first_and_arrival_decides_among_equals() -> None:
    workload = manager(max_num_seqs=1)
    workload.add(make(1, 2, max_tokens=1))
    workload.add(make(2, 2, max_tokens=1, priority=1))
    workload.add(make(3, 2, max_tokens=1, priority=-1))
    assert [run(workload)[0][0] for _ in range(3)] == [3, 1, 2]


def test_without_a_free_block_the_latest_is_preempted_and_goes_on_with_its_tokens() -> None:
    workload = manager(num_blocks=5, block_size=4)
    first, second = make(1, 7, max_tokens=8), make(2, 6, max_tokens=8)
    workload.add(first)
    workload.add(second)
    run(workload)
    for _ in range(4):
        run(workload)
    assert second.num_preemptions == 1
    tokens = list(second.token_ids)
    while first.status is not SequenceStatus.FINISHED:
        run(workload)
    batch = workload.get_next_batch(0.0)
    assert batch.scheduled[0].admitted
    assert second.token_ids == tokens
    assert second.num_computed_tokens > 0  # its full blocks were still there


def test_a_known_prefix_is_not_computed_again() -> None:
    workload = manager()
    prompt = list(range(10, 23))
    workload.add(make(1, prompt, max_tokens=1))
    assert run(workload) == [(1, 13)]
    workload.add(make(2, prompt, max_tokens=1))
    assert run(workload) == [(2, 1)]
    other = [*prompt[:5], 99, *prompt[6:]]
    third = make(3, other, max_tokens=1)
    workload.add(third)
    assert run(workload) == [(3, 9)]
    assert third.num_cached_tokens == 4


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt() -> None:
    workload = manager()
    prompt = list(range(10, 23))
    workload.add(make(1, prompt, max_tokens=1))
    run(workload)
    workload.add(make(2, prompt, max_tokens=1, prompt_logprobs=0))
    assert run(workload) == [(2, 13)]


def test_a_fork_waits_for_its_origin_and_shares_its_blocks() -> None:
    workload = manager(budget=8)
    prompt = list(range(10, 22))
    origin, fork = make(1, prompt), make(2, prompt)
    fork.forked_from = origin
    workload.add(origin)
    workload.add(fork)
    assert run(workload) == [(1, 8)]
    assert run(workload) == [(1, 4)]
    assert run(workload) == [(1, 1), (2, 4)]
    assert fork.num_cached_tokens == 8
    assert fork.block_table[:2] == origin.block_table[:2]
    workload.check()


def test_what_has_expired_never_costs_a_step() -> None:
    workload = manager(max_num_seqs=1)
    workload.add(make(1, 2))
    late = make(2, 2, deadline=5.0)
    workload.add(late)
    run(workload)
    assert workload.next_deadline() == 5.0
    assert workload.expire(4.9) == []
    assert workload.expire(5.0) == [late]
    assert late.status is SequenceStatus.FINISHED
    assert workload.num_waiting == 0
    assert workload.next_deadline() == math.inf


@pytest.mark.parametrize(
    ("params", "token", "expected"),
    [
        ({}, EOS, (FinishReason.STOP, False)),
        ({"ignore_eos": True}, EOS, (None, False)),
        ({"stop_token_ids": (7,)}, 7, (FinishReason.STOP, True)),
        ({"max_tokens": 1}, 7, (FinishReason.LENGTH, False)),
        ({}, 7, (None, False)),
    ],
)
def test_what_ends_a_sequence(params: dict[str, int], token: int, expected: tuple[FinishReason | None, bool]) -> None:
    workload = manager()
    workload.add(make(1, 2, **params))
    (sampled,) = complete(workload, workload.get_next_batch(0.0), token)
    assert (sampled.finish, sampled.stop_token) == expected


def test_a_dead_worker_costs_nobody_a_token_and_empties_the_prefix_index() -> None:
    workload = manager()
    first, second = make(1, 6), make(2, 6)
    workload.add(first)
    workload.add(second)
    run(workload)
    tokens = [list(first.token_ids), list(second.token_ids)]
    assert workload.requeue_all(workload.get_next_batch(0.0)) == []
    assert [first.token_ids, second.token_ids] == tokens
    batch = workload.get_next_batch(0.0)
    assert plan(batch) == [(1, 7), (2, 7)]
    assert all(item.admitted for item in batch.scheduled)
    assert batch.forget == ()


def test_who_kills_worker_after_worker_is_tried_alone_and_fails_alone() -> None:
    workload = manager()
    good, bad = make(1, 6), make(2, 6)
    workload.add(good)
    workload.add(bad)
    for _ in range(2):
        assert workload.requeue_all(workload.get_next_batch(0.0)) == []
    assert workload.on_trial
    assert run(workload) == [(1, 6)]  # past the point of its death: cleared
    assert good.deaths == 0
    batch = workload.get_next_batch(0.0)
    assert plan(batch) == [(2, 6)]
    assert workload.requeue_all(batch) == [bad]
    assert not workload.on_trial
    assert run(workload) == [(1, 7)]
    workload.check()


def test_a_step_that_stays_before_the_point_of_death_clears_nobody() -> None:
    """A sequence that kills at a later token must not be forgiven for computing its first chunk again and again."""
    workload = manager(budget=8)
    bad = make(1, 20)
    workload.add(bad)
    for _ in range(2):
        assert run(workload) == [(1, 8)]
        assert run(workload) == [(1, 8)]
        assert workload.requeue_all(workload.get_next_batch(0.0)) == []  # the third chunk kills
    assert run(workload) == [(1, 8)]
    assert run(workload) == [(1, 8)]
    assert workload.on_trial
    assert workload.requeue_all(workload.get_next_batch(0.0)) == [bad]


def test_the_worker_is_told_once_what_it_may_forget() -> None:
    workload = manager()
    sequence = make(1, 2)
    workload.add(sequence)
    workload.add(make(2, 2))
    run(workload)
    workload.finish(sequence)
    assert workload.get_next_batch(0.0).forget == (1,)
    assert workload.get_next_batch(0.0).forget == ()


def test_sequences_that_leave_from_the_middle_of_the_queue_are_not_kept() -> None:
    workload = manager(max_num_seqs=1)
    workload.add(make(1, 2, max_tokens=1000))
    for i in range(2, 2000):
        sequence = make(i, 2, deadline=1e9)
        workload.add(sequence)
        workload.finish(sequence)
    assert len(workload._queue) < 200
    assert len(workload._deadlines) < 200


def test_a_step_needs_room_for_every_sequence() -> None:
    with pytest.raises(ValueError, match="room"):
        manager(max_num_seqs=8, budget=4)
