"""What the engine is at: its status for display, and the gate that a new request passes or is refused at."""

import enum
import threading
from dataclasses import dataclass

from llm.exceptions import Draining, EngineDead, Loading, QuartetError
from llm.messages import Ready


class EngineStatus(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"  # a worker died; requests are taken and wait
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineState:
    """A snapshot for display. Who decides asks the engine itself."""

    status: EngineStatus
    reason: str
    model: str
    folder: str | None
    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    restarts: int
    worker_pid: int | None
    ready: Ready | None


class Gate:
    """Any thread. Once draining, it stays shut; once dead, it says why for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.status = EngineStatus.LOADING
        self.reason = "starting"

    def check(self) -> None:
        """Raises what a new request is refused with: Loading, Draining or EngineDead."""
        error = self.refusal()
        if error is not None:
            raise error

    def refusal(self) -> QuartetError | None:
        match self.status:
            case EngineStatus.LOADING:
                return Loading(self.reason)
            case EngineStatus.DRAINING:
                return Draining()
            case EngineStatus.DEAD:
                return EngineDead(self.reason)
            case _:
                return None

    def report(self, reason: str) -> None:
        """Progress within a status."""
        with self._lock:
            if self.status in {EngineStatus.LOADING, EngineStatus.RECOVERING}:
                self.reason = reason

    def load(self) -> None:
        self._become(EngineStatus.READY, "ready", from_=EngineStatus.LOADING)

    def recover(self, reason: str) -> None:
        self._become(EngineStatus.RECOVERING, reason, from_=EngineStatus.READY)

    def resume(self) -> None:
        if self.status is EngineStatus.RECOVERING:
            self._become(EngineStatus.READY, "ready", from_=EngineStatus.RECOVERING)

    def drain(self) -> None:
        with self._lock:
            if self.status is not EngineStatus.DEAD:
                self.status, self.reason = EngineStatus.DRAINING, "shutting down"

    def give_up(self, reason: str) -> None:
        with self._lock:
            if self.status is not EngineStatus.DRAINING:
                self.status, self.reason = EngineStatus.DEAD, reason

    def _become(self, status: EngineStatus, reason: str, from_: EngineStatus) -> None:
        with self._lock:
            if self.status is from_:
                self.status, self.reason = status, reason
