"""Messages between two processes over a one-way pipe: no locks, no feeder thread, nothing that a killed process holds.

A multiprocessing.Queue has all of these, and leaves them behind locked when a worker is killed. Here each end has one
owner; the end of a dead peer is seen as ChannelClosed, and a peer that stands still costs no more than a deadline.

    frame:  length of the rest, 8 bytes, big endian | pickled message
"""

import math
import os
import pickle
import select
import struct
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

_LENGTH = struct.Struct(">Q")
_LONGEST = 1 << 30  # bytes; more is no length that we wrote
_PIECE = 1 << 16  # bytes


class ChannelError(Exception):
    pass


class ChannelClosed(ChannelError):
    """The other end is gone."""


class ChannelTimeout(ChannelError):
    """The other end did nothing until the deadline."""


class ChannelBroken(ChannelError):
    """What arrived is no message of ours."""


class Stopped(Exception):
    """The engine is being closed: whoever waits for another process stops waiting."""


class Woken(Exception):
    """One of the other handles waited for became readable; `fd` says which."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.fd = fd


class Wakeup:
    """Ends a wait on handles from another thread. Stays set until cleared."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            return  # full of earlier wake-ups: set already

    def clear(self) -> None:
        try:
            while os.read(self._read, 4096):
                continue
        except BlockingIOError:
            return  # empty

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def wait_readable(fds: Iterable[int], timeout: float) -> list[int]:
    """Those of the handles that are readable or at their end; none after `timeout` seconds (infinity: waits for good)."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(_milliseconds(timeout))]


def _milliseconds(timeout: float) -> int | None:
    return None if math.isinf(timeout) else max(0, math.ceil(timeout * 1000))


class Sender:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        os.set_blocking(connection.fileno(), False)

    def send(self, message: Any, timeout: float = math.inf) -> None:
        """Raises ChannelClosed, or ChannelTimeout where the other end reads nothing for that long."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        deadline = time.monotonic() + timeout
        fd = self._connection.fileno()
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        while left:
            try:
                left = left[os.write(fd, left[:_PIECE]) :]
            except BlockingIOError:
                if not poller.poll(_milliseconds(deadline - time.monotonic())):
                    raise ChannelTimeout(f"nothing was read for {timeout:g} s") from None
            except BrokenPipeError as error:
                raise ChannelClosed from error

    def close(self) -> None:
        self._connection.close()


class Receiver:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffer = bytearray()
        os.set_blocking(connection.fileno(), False)

    def receive(self, timeout: float = math.inf, others: tuple[int, ...] = ()) -> Any:
        """The next message. While none is complete, waits on the `others` too.

        What the peer sent before its end is still returned: of several handles that are readable, ours comes first.
        Raises ChannelClosed, ChannelBroken, ChannelTimeout, or Woken where one of the others became readable.
        """
        deadline = time.monotonic() + timeout
        fd = self._connection.fileno()
        while True:
            message = self._take()
            if message is not None:
                return message
            readable = wait_readable((fd, *others), deadline - time.monotonic())
            if not readable:
                raise ChannelTimeout(f"no message came for {timeout:g} s")
            if fd in readable:
                self._read(fd)
            else:
                raise Woken(readable[0])

    def _read(self, fd: int) -> None:
        piece = os.read(fd, _PIECE)
        if not piece:
            raise ChannelClosed
        self._buffer += piece

    def _take(self) -> Any:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _LONGEST:
            raise ChannelBroken(f"a message of {length} bytes was announced")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return pickle.loads(data)  # noqa: S301 - from a process of ours, over a pipe that nobody else holds
        except Exception as error:
            raise ChannelBroken("a message can't be read") from error

    def close(self) -> None:
        self._connection.close()
