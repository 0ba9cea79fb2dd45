"""What a model's probe has found, kept in the model cache for the next start: it takes seconds, and finds the same while the
checkpoint, the machine, the libraries and our code are the same.

There is a file for each checkpoint and way to serve it, with digests of all that the finding depends on. Where one of them is
another now, the model is probed again and the file is replaced.
"""

import dataclasses
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from llm.messages import ProbeReport, WorkerSpec

log = logging.getLogger(__name__)

_CODE = Path(__file__).parent
# Environment variables by which the libraries choose their kernels.
_CHOOSING = ("ATEN_", "BLIS_", "CUBLAS_", "CUDA_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "TORCH_")
# Lines of /proc/cpuinfo that tell cores, or moments, of one and the same processor apart.
_OF_A_CORE = ("apicid", "bogomips", "core id", "cpu mhz", "initial apicid", "physical id", "processor")


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    path: Path
    conditions: dict[str, str]  # digests by what they are of

    def find(self) -> ProbeReport | None:
        """None where nothing is kept, it isn't whole, or one of the conditions is another now."""
        try:
            kept = json.loads(self.path.read_text())
            found, conditions = kept["report"], kept["conditions"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError) as error:
            log.warning("%s can't be read, so the model is tested again: %s", self.path, error)
            return None
        now = self.conditions | {"report": _digest(found)}
        changed = sorted(name for name in now if conditions.get(name) != now[name])
        if changed:
            log.info("the model is tested again, since these have changed after the last time: %s", ", ".join(changed))
            return None
        log.info("the model was tested by an earlier start: %s", self.path)
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        return ProbeReport(**values)

    def keep(self, report: ProbeReport) -> None:
        """Whole or not at all: where it can't be written, the next start tests the model again."""
        found = dataclasses.asdict(report)
        text = json.dumps({"report": found, "conditions": self.conditions | {"report": _digest(found)}}, indent=2)
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(text)
                part.replace(self.path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            log.warning("what the test of the model found can't be kept for the next start: %s", error)


def probe_record(records: Path, spec: WorkerSpec, dtype: torch.dtype, device: torch.device) -> ProbeRecord:
    """records: the folder that they are kept in."""
    folder = Path(spec.folder).resolve()
    way = [str(folder), str(dtype), str(device), spec.threads, spec.max_model_len, spec.num_tokens, spec.batch_invariant]
    conditions: dict[str, Any] = {
        "way": way,
        "checkpoint": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _files(folder.glob("*"))],
        "code": [(str(path.relative_to(_CODE)), path.read_text()) for path in _files(_CODE.rglob("*.py"))],
        "libraries": [platform.python_version(), torch.__version__, torch.__config__.show(), transformers.__version__],
        "processor": _processor(),
        "device": str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else device.type,
        "environment": sorted(item for item in os.environ.items() if item[0].startswith(_CHOOSING)),
    }
    name = f"{folder.name}-{_digest(way)}.json"
    return ProbeRecord(records / name, {what: _digest(value) for what, value in conditions.items()})


def _files(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.is_file())


def _processor() -> list[str]:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return [platform.machine(), platform.processor()]
    return sorted({line for line in info.read_text().splitlines() if not line.lower().startswith(_OF_A_CORE)})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
