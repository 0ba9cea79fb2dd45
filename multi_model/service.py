"""The multi-model side as the service holds it: the catalogue's file, the manager, and the service's own model as one entry.

It is built before there is an event loop, and costs nothing until a model is asked for.
"""

import contextlib
import dataclasses
import logging
import os
import uuid
from collections.abc import Callable

from llm.config import EngineConfig
from llm.exceptions import QuartetError
from llm.forkserver import Forkserver
from llm.llm import LLMEngine
from llm.observer import NullObserver
from multi_model.config import ModelsConfig
from multi_model.engine import FRAMEWORKS, Surroundings, build_worker, estimated_bytes, imports_of
from multi_model.image_references import ImageReader
from multi_model.manager import ModelManager
from multi_model.memory import footprint
from multi_model.residency import Limits
from multi_model.store import Catalogue, Entry, read_catalogue
from multi_model.workers.base import Worker
from multi_model.workers.language_model import LanguageModelWorker
from multi_model.workers.process import ProcessConfig

log = logging.getLogger(__name__)


class Models:
    """`own`: the entry of the service's own model: pinned, and loaded by the service itself."""

    def __init__(
        self,
        config: ModelsConfig,
        engine_config: EngineConfig,
        engine: LLMEngine,
        forkserver: Forkserver,
        set_up_logging: Callable[[], None],
    ) -> None:
        self.predict_timeout = config.predict_timeout  # seconds
        self.images = ImageReader(config.image_root, config.max_image_bytes, config.max_images_bytes)
        self._config, self._engine, self._forkserver = config, engine, forkserver
        processes = ProcessConfig(
            forkserver, set_up_logging, self._threads, load_timeout=config.load_timeout, batch_timeout=config.batch_timeout
        )

        def another(source: str, dtype: str) -> LLMEngine:
            changed = dataclasses.replace(engine_config, model=source, dtype=dtype, max_model_len=None)
            return LLMEngine(changed, NullObserver(), forkserver, set_up_logging=set_up_logging)

        self._surroundings = Surroundings(
            processes,
            another,
            device=config.device,
            catalogue_folder=config.catalogue.parent if config.catalogue else config.model_cache,
            model_cache=config.model_cache,
            kv_cache_bytes=engine_config.kv_cache_bytes or engine_config.kv_cache_limit,
            max_pixels=config.max_image_pixels,
        )
        self.own = _own_entry(engine.state().model)
        self.manager = ModelManager(
            Limits(config.budget, config.max_models), build=self._build, estimate=self._estimate, overhead=self._overhead
        )

    def read_catalogue(self) -> tuple[str, ...]:
        """What is wrong with it, in sentences; what is right holds from now on."""
        if self._config.catalogue is None:
            found = Catalogue()
        else:
            try:
                found = read_catalogue(self._config.catalogue, FRAMEWORKS)
            except (OSError, ValueError) as error:
                log.error("the catalogue can't be read, so nothing of it has changed: %s", error)
                return (str(error),)
        others = tuple(entry for entry in found.entries if self.own.name != entry.name)
        faults = list(found.faults)
        if len(others) < len(found.entries):
            faults.append(f"{self.own.name}: is the service's own model")
        for fault in faults:
            log.error("left out of the catalogue: %s", fault)
        self.manager.use(Catalogue((self.own, *others)))
        self._forkserver.also_import(imports_of(others))
        return tuple(faults)

    async def hold_own(self) -> None:
        """Books the service's own model as soon as it is loaded."""
        with contextlib.suppress(QuartetError):  # whoever started the service is told why it could not be loaded
            await self._engine.started()
            await self.manager.load(self.own, self._config.load_timeout)

    def _build(self, entry: Entry) -> Worker:
        if entry is self.own:
            return LanguageModelWorker(entry.name, self._engine, own=True)
        return build_worker(entry, self._surroundings)

    def _estimate(self, entry: Entry) -> int:
        if entry is self.own:
            return 0  # it is there already
        return estimated_bytes(entry, self._surroundings)

    def _overhead(self) -> int:
        """The API process and the forkserver."""
        pids = [os.getpid(), *([self._forkserver.pid] if self._forkserver.pid else [])]
        return footprint(pids).private

    def _threads(self) -> int:
        """Those that compute share the processors."""
        busy = sum(self.manager.status(entry).in_use > 0 for entry in self.manager.entries() if entry is not self.own)
        busy += self._engine.state().running > 0
        return max(1, self._config.threads // max(1, busy))


def _own_entry(name: str) -> Entry:
    return Entry.model_validate(
        {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"quartet:{name}")),
            "name": name,
            "type": "text-generation",
            "framework": "quartet",
            "description": "The service's own model",
            "pinned": True,
        }
    )
