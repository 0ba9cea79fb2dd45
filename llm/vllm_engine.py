"""The optional second engine: vLLM's AsyncLLM in a process of its own, behind the same `submit`.

The API process imports neither vLLM nor torch: whether both are there is found out from files and module specs. The
process is started by the first request; one that dies is started again by the next request.
"""

import asyncio
import importlib.util
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from llm.config import VllmConfig
from llm.delivery import OutputSink
from llm.exceptions import DeadlineExceeded, Draining, Loading, VllmUnavailable
from llm.intake import AdmissionBound, Intake
from llm.submission import GenerationRequest, Output, Submission
from llm.vllm_messages import VllmSpec, check_supported
from llm.vllm_process import Entry, VllmProcess

_MAX_WAITING = 256  # sequences beyond those that vLLM runs at once
_STOP_SECONDS = 1.8


class VllmEngine:
    """Used from one event loop. `folder`: the prepared checkpoint, None while there is none yet."""

    def __init__(self, config: VllmConfig, folder: Callable[[], str | None]) -> None:
        self._config = config
        self._folder = folder
        self._bound = AdmissionBound(config.max_num_seqs + _MAX_WAITING, config.max_num_seqs)
        self._process: VllmProcess | None = None
        self._draining = False

    async def submit(self, request: GenerationRequest) -> Submission:
        """Queues all sequences of a request, or none; the first request waits for vLLM's start.

        Raises VllmUnavailable saying what is missing or has failed, Loading while there is no checkpoint yet, Draining,
        QueueFull, DeadlineExceeded, or what is wrong with the request.
        """
        arrival = time.monotonic()
        self._check_open()
        check_supported(request.params)
        count = len(request.prompts) * request.params.n
        with self._bound.taken(count):
            process = self._running()
            intake = await _started(process, request.params.timeout)
            prepared = await asyncio.to_thread(intake.prepare, request, arrival)
            loop = asyncio.get_running_loop()
            entries = [Entry(one, OutputSink(loop)) for one in prepared]
            process.take_in(entries)
        outputs = tuple(Output(str(uuid.uuid4()), entry.sink) for entry in entries)
        seq_ids = [one.sequence.seq_id for one in prepared]
        return Submission(outputs, lambda: process.abort(seq_ids))

    async def drain(self, grace: float) -> bool:
        """Takes no more requests. True when all that were taken have ended, within `grace` seconds."""
        self._draining = True
        return await self._bound.empty(grace)

    async def close(self) -> None:
        """What still runs ends with Draining. Takes under 2 s; a second call does nothing."""
        self._draining = True
        if self._process is not None:
            await asyncio.to_thread(self._process.stop, _STOP_SECONDS)

    def _check_open(self) -> None:
        if self._draining:
            raise Draining()
        reason = unavailable(allow_cpu=self._config.allow_cpu)
        if reason is not None:
            raise VllmUnavailable(reason)

    def _running(self) -> VllmProcess:
        """Without an await: requests that come together share one start."""
        if self._process is None or self._process.ended:
            folder = self._folder()
            if folder is None:
                raise Loading("its checkpoint is being prepared")
            config = self._config
            spec = VllmSpec(
                folder=str(Path(folder).resolve()),
                dtype=config.dtype,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                gpu_memory_fraction=config.gpu_memory_fraction,
                on_cpu=not _has_gpu(),
            )
            self._process = VllmProcess(spec, config.start_timeout, self._bound)
        return self._process


async def _started(process: VllmProcess, seconds: float | None) -> Intake:
    """The start goes on where a caller gives up."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(asyncio.wrap_future(process.ready))
    except TimeoutError:
        raise DeadlineExceeded(seconds or 0.0) from None


def unavailable(*, allow_cpu: bool) -> str | None:
    """What is missing for vLLM on this machine; None where nothing is."""
    if not allow_cpu and not _has_gpu():
        return "there is no NVIDIA GPU"
    if importlib.util.find_spec("vllm") is None:
        return "the package vllm is not installed (uv sync --extra vllm)"
    return None


def _has_gpu() -> bool:
    """By the driver's device files; an empty CUDA_VISIBLE_DEVICES, or -1, hides them."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))
