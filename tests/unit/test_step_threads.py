"""Steps use fewer threads while other processes want the cores, and all again when they don't."""

import random

from llm.step_threads import ThreadChoice, thread_counts

ALONE, CROWDED = 0.99, 0.5


def counts(choice: ThreadChoice, shares: list[float]) -> list[int]:
    """The number of threads of the step after each."""
    found = []
    for share in shares:
        choice.observe(share)
        found.append(choice.count)
    return found


def test_a_machine_of_ones_own_is_used_whole() -> None:
    choice = ThreadChoice((4, 2, 1))
    assert choice.count == 4
    assert set(counts(choice, [ALONE] * 1000)) == {4}


def test_each_crowded_step_halves_them_down_to_one() -> None:
    assert counts(ThreadChoice((4, 2, 1)), [CROWDED] * 4) == [2, 1, 1, 1]


def test_they_come_back_after_a_while_without_a_crowd() -> None:
    choice = ThreadChoice((2, 1))
    choice.observe(CROWDED)
    after = counts(choice, [ALONE] * 20)
    assert after.index(2) >= 8
    assert after[-1] == 2


def test_while_even_one_has_to_wait_no_more_are_tried() -> None:
    choice = ThreadChoice((2, 1))
    assert set(counts(choice, [CROWDED] * 1000)) == {1}


def simulated(choice: ThreadChoice, free: int, steps: int) -> float:
    """The share of steps that asked for more threads than there were free cores."""
    too_many = 0
    for _ in range(steps):
        too_many += choice.count > free
        choice.observe(CROWDED if choice.count > free else ALONE)
    return too_many / steps


def test_in_a_lasting_crowd_more_are_tried_ever_more_rarely() -> None:
    choice = ThreadChoice((8, 4, 2, 1))
    simulated(choice, 4, 2000)
    assert simulated(choice, 4, 5000) < 0.005
    assert choice.count == 4


def test_when_a_lasting_crowd_is_gone_all_are_used_and_the_next_crowd_is_nothing_special() -> None:
    choice = ThreadChoice((2, 1))
    simulated(choice, 1, 5000)
    simulated(choice, 2, 600)
    assert choice.count == 2
    choice.observe(CROWDED)
    assert 2 in counts(choice, [ALONE] * 40)


def test_whatever_comes_it_is_one_of_the_counts() -> None:
    rng, choice = random.Random(0), ThreadChoice((6, 3, 1))  # noqa: S311
    assert set(counts(choice, [rng.random() for _ in range(5000)])) == {6, 3, 1}


def test_one_count_stays() -> None:
    assert set(counts(ThreadChoice((3,)), [CROWDED] * 50 + [ALONE] * 50)) == {3}


def test_counts_to_choose_from() -> None:
    assert {most: thread_counts(most) for most in (1, 2, 3, 6, 8)} == {
        1: (1,),
        2: (2, 1),
        3: (3, 1),
        6: (6, 3, 1),
        8: (8, 4, 2, 1),
    }
