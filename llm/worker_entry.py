"""How a worker process begins, whatever it computes: its logs, its signals, its end with the parent's.

Imports nothing heavy: the API process names the function that a worker runs, and only the worker imports it.
"""

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PR_SET_PDEATHSIG = 1
PARENT_PID = "SERVICE_PARENT_PID"  # environment variable

WorkerMain = Callable[[Any, Connection, Connection], None]


def begin_worker(entry: str, set_up_logging: Callable[[], None], spec: Any, tasks: Connection, results: Connection) -> None:
    """`entry` is "module:function", called with (spec, tasks, results)."""
    # Ctrl-C and a service manager's SIGTERM reach the whole group; when a worker ends is its parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    set_up_logging()
    module, _, function = entry.partition(":")
    main: WorkerMain = getattr(importlib.import_module(module), function)
    main(spec, tasks, results)


def _end_with_parent() -> None:
    """Under a forkserver neither PDEATHSIG nor the end of the pipe tells a worker that its parent has died; this does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def die_with_parent() -> None:
    """For a direct child (the forkserver, the preparation of a model): killed when the thread that started it ends.

    The parent leaves its id in the environment, by which one that died before this is called is noticed too. Linux only;
    elsewhere such a child ends when it next looks at its pipe.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.environ.get(PARENT_PID) not in {None, str(os.getppid())}:
            os._exit(1)
