"""The worker's succession: started, replaced when it dies, and given up when worker after worker achieves nothing."""

import logging
from collections.abc import Callable

from llm.channel import Stopped, Wakeup, wait_readable
from llm.config import EngineConfig
from llm.exceptions import EngineDead, ModelRefused, WorkerDied
from llm.forkserver import Forkserver
from llm.messages import Ready, WorkerSpec
from llm.model_executor import ModelExecutor

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 2.0  # seconds between two attempts
_PROBE_RECORDS = "probed"  # a folder in the model cache


class WorkerSupervisor:
    """The engine's thread only, but for the numbers it shows."""

    def __init__(
        self,
        config: EngineConfig,
        forkserver: Forkserver,
        *,
        stop: Wakeup,
        report: Callable[[str], None],
        set_up_logging: Callable[[], None],
        entry: str,
    ) -> None:
        self._config = config
        self._stop = stop
        self._folder, self._num_tokens = "", 0
        self._fruitless = 0  # deaths since the last completed step that no single sequence is to blame for
        self.restarts = 0
        self.executor = ModelExecutor(
            forkserver,
            stop=stop,
            step_timeout=config.step_timeout,
            load_timeout=config.load_timeout,
            report=report,
            set_up_logging=set_up_logging,
            entry=entry,
        )

    def start(self, folder: str, num_tokens: int) -> Ready:
        """The first worker. Raises ModelRefused, EngineDead after too many attempts, or Stopped."""
        self._folder, self._num_tokens = folder, num_tokens
        return self._start(None)

    def replace(self, known: Ready, death: WorkerDied, *, blamed: bool) -> Ready:
        """`blamed`: it died over a sequence that ran alone, which has paid for it. Raises EngineDead or Stopped."""
        if not blamed:
            self._count(death)
        ready = self._start(known)
        self.restarts += 1
        log.warning("worker %d took over, ready after %.2f s", ready.pid, ready.seconds)
        return ready

    def progress_made(self) -> None:
        self._fruitless = 0

    def _start(self, known: Ready | None) -> Ready:
        while True:
            try:
                return self.executor.start(self._spec(known))
            except WorkerDied as death:
                self._count(death)
            except ModelRefused as refusal:
                if known is None:
                    raise
                self._count(WorkerDied(refusal.message))
            if wait_readable((self._stop.fileno(),), min(0.1 * 2**self._fruitless, _LONGEST_PAUSE)):
                raise Stopped

    def _count(self, death: WorkerDied) -> None:
        self._fruitless += 1
        if self._fruitless > self._config.max_restarts:
            self.executor.end()
            raise EngineDead(f"{self._fruitless} workers in a row died without a completed step; the last: {death.message}")
        log.error("%s; starting another worker", death.message)

    def _spec(self, known: Ready | None) -> WorkerSpec:
        """A later worker has the first one's cache size, so that the blocks are the same, and measures nothing again."""
        config = self._config
        return WorkerSpec(
            generation=0,
            folder=self._folder,
            num_tokens=self._num_tokens,
            dtype=config.dtype,
            device=config.device,
            threads=config.threads,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=step_tokens(config),
            max_model_len=config.max_model_len,
            kv_cache_bytes=known.kv_cache_bytes if known else config.kv_cache_bytes,
            kv_cache_limit=config.kv_cache_limit,
            batch_invariant=config.batch_invariant,
            probe=known.probe if known else None,
            probe_records=str((config.model_cache / _PROBE_RECORDS).resolve()),
        )


def step_tokens(config: EngineConfig) -> int:
    """A step has room for one token of every sequence at least."""
    return max(config.max_num_batched_tokens, config.max_num_seqs)
