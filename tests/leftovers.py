"""What a test leaves behind: processes of this session, and threads that keep the interpreter from ending.

What is there when a test begins isn't the test's; nor is what a fixture of a wider scope starts, then or later. Under the
forkserver nobody can tell whose worker is whose: there, a fixture of a wider scope may have as many as it had.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import thread as pools
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker

import psutil  # type: ignore[import-untyped]

MARK = "TEST_SESSION_MARK"  # environment variable: by it a process is found that has lost its parent


@dataclass(frozen=True, slots=True)
class Seen:
    processes: dict[psutil.Process, int]  # descendants -> parent's id
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> "Seen":
        found: dict[psutil.Process, int] = {}
        for process in psutil.Process().children(recursive=True):
            try:
                found[process] = process.ppid()
            except psutil.NoSuchProcess:
                continue
        return cls(found, frozenset(thread for thread in threading.enumerate() if not thread.daemon))

    def workers(self) -> set[psutil.Process]:
        return {process for process, parent in self.processes.items() if parent == _forkserver_pid()}


class Leftovers:
    """`mark`: the value of MARK in this session's processes. `patience`: seconds for what has been told to end."""

    def __init__(self, mark: str, patience: float = 5.0) -> None:
        self._known = Seen.now()
        self._wider = 0  # fixtures of ours that outlive a test
        self._wider_workers = 0  # that they have had under a forkserver: one that died took their parent away, not them
        self._mark = mark
        self._patience = patience

    @contextmanager
    def wider_setup(self) -> Iterator[None]:
        """What starts meanwhile belongs to a fixture of a wider scope, even where a test is what asked for it."""
        before = Seen.now()
        self._wider += 1
        yield
        after = Seen.now()
        started = {process: parent for process, parent in after.processes.items() if process not in before.processes}
        self._known = Seen(self._known.processes | started, self._known.threads | (after.threads - before.threads))
        self._wider_workers = max(self._wider_workers, len(after.workers()))

    def wider_teardown(self) -> None:
        self._wider -= 1
        if self._wider == 0:
            self._wider_workers = 0

    def of_test(self) -> list[str]:
        """In words, what is new since the last call and doesn't go away by itself. Takes a millisecond where all is well."""
        now = Seen.now()
        left: list[str] = []
        processes, threads = self._new_processes(now), self._new_threads(now)
        if processes or threads:
            left = self._left(processes, threads)
            now = Seen.now()
        self._known = now
        return left

    def of_session(self) -> list[str]:
        """All that is left when every fixture is gone. Ends multiprocessing's own helpers, which nobody else does."""
        now = Seen.now()
        helpers = _helpers()
        marked = [process for process in psutil.process_iter() if self._is_marked(process)]
        processes = {process for process in [*now.processes, *marked] if process.pid not in helpers}
        left = self._left(processes, set(now.threads - {threading.main_thread()}))
        if not left:
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
            resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        return left

    def _left(self, processes: set[psutil.Process], threads: set[threading.Thread]) -> list[str]:
        _, alive = psutil.wait_procs(processes, timeout=self._patience)
        for thread in threads:
            thread.join(self._patience)
        return [*map(_describe, alive), *(f"thread {thread.name}" for thread in threads if thread.is_alive())]

    def _new_processes(self, now: Seen) -> set[psutil.Process]:
        allowed = {process.pid for process in self._known.processes} | _helpers()
        new = {process for process in now.processes if process.pid not in allowed}
        if self._wider and len(now.workers()) <= max(self._wider_workers, len(self._known.workers())):
            new -= now.workers()
        # What a process of a wider scope starts is that one's.
        owners = allowed - _helpers()
        return {process for process in new if not owners & set(_ancestors(process, now))}

    def _new_threads(self, now: Seen) -> set[threading.Thread]:
        new = set(now.threads - self._known.threads)
        # A pool starts its threads when they are first needed, so that of an engine of a wider scope does within a test.
        return {thread for thread in new if not (self._wider and thread in pools._threads_queues)}

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and bool(process.environ().get(MARK) == self._mark)
        except (psutil.Error, OSError):
            return False


def _ancestors(process: psutil.Process, seen: Seen) -> Iterator[int]:
    parents = {child.pid: parent for child, parent in seen.processes.items()}
    pid = process.pid
    while pid in parents:
        pid = parents[pid]
        yield pid


def _helpers() -> set[int | None]:
    return {_forkserver_pid(), resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]


def _forkserver_pid() -> int | None:
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"process {process.pid}"
