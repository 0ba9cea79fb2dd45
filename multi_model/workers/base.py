"""What the manager asks of a model, whatever it is and wherever it runs."""

from typing import Any, Protocol


class Worker(Protocol):
    """One resident model. Belongs to an event loop, and never blocks it."""

    labels: tuple[str, ...]

    async def load(self) -> None:
        """Raises ModelUnavailable with the reason; then nothing of it is left."""

    async def died(self) -> None:
        """Returns when it has ended without being told to."""

    async def measure(self) -> int:
        """Bytes that it takes now, with what it has reserved."""

    async def predict(self, request: Any) -> Any:
        """Raises InvalidRequest for its `param`, or WorkerDied."""

    async def unload(self) -> None:
        """Returns when its memory is free again. A second call does nothing."""
