"""One worker process with a pipe in each direction, as seen from the thread that gives it work: started from the forkserver,
watched, ended.

    the owner's thread                                worker
    send(task)                   -- task pipe    ->
                 receive(...)   <- result pipe   --
    receive waits on the result pipe, the worker's pidfd and the owner's stop, all at once: a death is noticed when it happens

Both pipes are made anew with each worker, and the parent closes the child's ends: nothing of a dead worker is met again.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from llm.channel import ChannelError, ChannelTimeout, Receiver, Sender, Stopped, Wakeup, Woken, wait_readable
from llm.exceptions import WorkerDied
from llm.forkserver import Forkserver
from llm.worker_entry import begin_worker

_END_SECONDS = 1.0  # for a killed process to be gone


class WorkerProcess:
    """Used by one thread, but for `kill` and `pid`. `stop` ends every wait with Stopped."""

    def __init__(self, process: ForkServerProcess, sender: Sender, receiver: Receiver, stop: Wakeup) -> None:
        assert process.pid is not None  # noqa: S101 - it was started
        self.pid = process.pid
        self._sender, self._receiver = sender, receiver
        self._stop = stop
        self._process = process
        try:
            # The forkserver's word on its children ends with the forkserver; the kernel's doesn't.
            self._pidfd: int | None = os.pidfd_open(self.pid)
        except (OSError, AttributeError):
            self._pidfd = None
        # multiprocessing joins its children at exit, and this one ignores the signal that it sends them before.
        atexit.register(self.kill)

    @classmethod
    def start(
        cls,
        forkserver: Forkserver,
        entry: str,
        set_up_logging: Callable[[], None],
        spec: Any,
        *,
        stop: Wakeup,
        timeout: float,
    ) -> "WorkerProcess":
        """Returns when the process runs. entry: what it runs, "module:function" (`llm/worker_entry.py`); timeout: seconds.

        Raises WorkerDied where it could not be started, or Stopped.
        """
        context = multiprocessing.get_context("forkserver")
        task_reader, task_writer = context.Pipe(duplex=False)
        result_reader, result_writer = context.Pipe(duplex=False)
        arguments = (entry, set_up_logging, spec, task_reader, result_writer)
        process = context.Process(target=begin_worker, args=arguments, name="worker", daemon=True)
        ours, theirs = (task_writer, result_reader), (task_reader, result_writer)
        ended = Wakeup()
        starting = forkserver.start(process)
        starting.add_done_callback(lambda _: ended.set())
        readable = wait_readable((ended.fileno(), stop.fileno()), timeout)
        if ended.fileno() not in readable:
            starting.add_done_callback(lambda start: _undo(start, process, (*ours, *theirs), ended))
            if readable:
                raise Stopped
            forkserver.kill()  # it hangs
            raise WorkerDied(f"the worker could not be started within {timeout:.0f} s")
        error = starting.result()
        _close(theirs)
        ended.close()
        if error is not None:
            _close(ours)
            raise WorkerDied(f"the worker could not be started: {error}")
        return cls(process, Sender(task_writer), Receiver(result_reader), stop)

    @property
    def death_fd(self) -> int:
        """Readable once the worker has died."""
        return self._process.sentinel if self._pidfd is None else self._pidfd

    def send(self, task: Any, timeout: float) -> None:
        """Raises WorkerDied where the worker takes nothing for that many seconds, or is gone."""
        try:
            self._sender.send(task, timeout)
        except ChannelError as error:
            raise WorkerDied(f"the worker takes nothing: {error}") from error

    def receive(self, what: str, limit: float, since: float) -> Any:
        """The next message, within `limit` seconds after `since` (`time.monotonic()`). Raises WorkerDied where there is none
        or the worker is gone, naming `what` it was at; Stopped."""
        try:
            return self._receiver.receive(since + limit - time.monotonic(), (self._stop.fileno(), self.death_fd))
        except Woken as woken:
            if woken.fd == self._stop.fileno():
                raise Stopped from None
            raise WorkerDied(f"the worker died during {what}") from None
        except ChannelTimeout:
            raise WorkerDied(f"{what} took longer than {limit:g} s") from None
        except ChannelError as error:
            raise WorkerDied(f"the worker died during {what}") from error

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self) -> None:
        """Kills it and waits until it is gone; its handles are closed."""
        atexit.unregister(self.kill)
        self.kill()
        wait_readable((self.death_fd,), _END_SECONDS)
        self._process.join(_END_SECONDS)
        self._process.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._sender.close()
        self._receiver.close()


def _close(pipes: tuple[Connection, ...]) -> None:
    for pipe in pipes:
        pipe.close()


def _undo(
    start: "Future[OSError | EOFError | None]", process: ForkServerProcess, pipes: tuple[Connection, ...], ended: Wakeup
) -> None:
    """A start that nobody waits for any more. Without its pipes and its parent's interest, the process ends."""
    _close(pipes)
    ended.close()
    if start.result() is None:
        process.kill()
        process.join(_END_SECONDS)
        process.close()
