"""The forkserver: the process that imports torch and the model classes once, and that every worker is forked from.

A process has one (multiprocessing keeps it), so whoever starts workers is given this one object.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

from llm.worker_entry import PARENT_PID

_PRELOAD = ["llm.forkserver_guard", "llm.preload"]
_KILL_SECONDS = 0.05  # between two attempts on a forkserver that is just being started


class Forkserver:
    """Any thread."""

    def __init__(self) -> None:
        # One thread for good: the forkserver lives no longer than the thread that starts it (`llm/forkserver_guard.py`).
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="worker-start")
        self._closed = threading.Event()
        self._imports: tuple[str, ...] = ()

    @property
    def pid(self) -> int | None:
        pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        return pid

    def also_import(self, modules: Sequence[str]) -> None:
        """Modules that workers will want beside a language model's. Holds for a forkserver that is started after this."""
        self._imports = tuple(modules)

    def begin(self) -> None:
        """Has it begin its imports, where it hasn't, and returns at once."""
        self._starter.submit(self._ensure_running)

    def start(self, process: ForkServerProcess) -> "Future[OSError | EOFError | None]":
        """Done when the process has been forked, or with the error where the forkserver is gone. It forks when its imports
        are done."""
        return self._starter.submit(self._start, process)

    def kill(self) -> None:
        """One that is still importing wouldn't see that it isn't wanted any more. The next start makes another."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends it. Workers end with the process that started them, not with this."""
        self._closed.set()
        last = self._starter.submit(_nothing)
        while wait((last,), _KILL_SECONDS).not_done:
            self.kill()
        self.kill()
        self._starter.shutdown()
        forkserver._forkserver._stop()  # type: ignore[attr-defined]

    def _start(self, process: ForkServerProcess) -> OSError | EOFError | None:
        try:
            self._ensure_running()
            process.start()
        except (OSError, EOFError) as error:
            return error
        return None

    def _ensure_running(self) -> None:
        if self._closed.is_set():
            raise EOFError("it is closed")
        multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *self._imports])
        os.environ[PARENT_PID] = str(os.getpid())
        forkserver.ensure_running()


def _nothing() -> None:
    return None
