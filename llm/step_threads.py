"""How many threads a step uses: fewer while other processes want the cores.

A step has hundreds of parallel operations, after each of which its threads wait for each other by spinning: to sleep and be
woken takes as long as a small operation. But where another process has one of the cores, spinning threads use up their share
of time, and every wait is for one that isn't running: a step takes five times as long. There fewer threads, each with
a core, are the faster ones.

It shows in the share of a step's time that the main thread was running: nearly all of it, or about half.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

_CROWDED = 0.75  # a main thread that ran for less of a step waited for others
_PATIENCE = (8, 256)  # steps until more threads are tried: at first; at most, after failed tries in a row


class ThreadChoice:
    """counts: numbers of threads to choose from, the largest first."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self._at = 0
        self._calm = 0  # steps since the last crowded one or the last change
        self._patience, self._most_patience = _PATIENCE

    @property
    def count(self) -> int:
        return self._counts[self._at]

    def observe(self, share: float) -> None:
        """share: of the last step's time, in which the main thread was running."""
        if share < _CROWDED:
            if self._at + 1 < len(self._counts):
                self._at += 1
                self._patience = min(2 * self._patience, self._most_patience)
            self._calm = 0
            return
        self._calm += 1
        if self._calm < self._patience:
            return
        self._calm = 0
        if self._at > 0:
            self._at -= 1
        else:
            self._patience = _PATIENCE[0]


class StepThreads:
    """Applies a ThreadChoice. `use` sets the number of threads of what is computed next."""

    def __init__(self, counts: Sequence[int], use: Callable[[int], None]) -> None:
        self._choice = ThreadChoice(counts)
        self._use = use

    @contextmanager
    def step(self) -> Iterator[None]:
        wall, running = time.perf_counter(), time.thread_time()
        yield
        wall, running = time.perf_counter() - wall, time.thread_time() - running
        before = self._choice.count
        self._choice.observe(running / max(wall, 1e-9))
        if self._choice.count != before:
            self._use(self._choice.count)


def thread_counts(most: int) -> tuple[int, ...]:
    """All, half of them, and so on to one."""
    return (most, *thread_counts(most // 2)) if most > 1 else (1,)
