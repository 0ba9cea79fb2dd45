"""Every setting once: name, type, default, unit, bounds, help. From the command line, or the environment as QUARTET_NAME."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import ByteSize, JsonValue, ValidationError
from pydantic import Field as PydanticField
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from llm.config import EngineConfig, VllmConfig
from multi_model.config import ModelsConfig
from resources import cpu_budget, memory_limit

PREFIX = "QUARTET_"
_KIB, _MIB = 2**10, 2**20
_LARGEST = 2**50  # bytes
_INT32 = 2**31 - 1
_BUDGET_SHARE = 0.7  # of the memory there is
_KV_CACHE_SHARE = 0.25  # of the budget


def _setting(default: Any, help: str, *, unit: str = "", shown: str = "", **bounds: Any) -> Any:
    """shown: what stands for a default that depends on the machine, or on another setting."""
    about: dict[str, JsonValue] = {"help": help, "unit": unit, "shown": shown}
    text = help + (f" [{unit}]" if unit else "") + (f"; absent: {shown}" if shown else "")
    return PydanticField(default, description=text, json_schema_extra=about, **bounds)


Device = Annotated[str, PydanticField(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")]


@dataclass(frozen=True, slots=True)
class HttpConfig:
    host: str
    port: int
    model_alias: str | None  # the name the model was configured by
    max_connections: int
    max_body_bytes: int
    max_prompts: int
    request_timeout: float | None  # seconds
    keep_alive_seconds: float
    drain_seconds: float
    log_prompts: bool


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str
    format: str


class Settings(BaseSettings):
    """Quartet, an LLM serving service. Sizes take units (2GiB, 500MB). Each setting is also read from QUARTET_NAME."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        cli_prog_name="main.py",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    host: str = _setting("127.0.0.1", "Address to listen at", min_length=1)
    port: int = _setting(8000, "Port to listen at; 0: any free one", unit="port", ge=0, le=65535)
    max_connections: int = _setting(512, "Open connections at most", unit="connections", ge=1, le=65536)
    max_body_bytes: ByteSize = _setting(ByteSize(32 * _MIB), "Largest request body", unit="bytes", ge=_KIB, le=2**30)
    max_prompts: int = _setting(256, "Prompts in one request at most", unit="prompts", ge=1, le=4096)
    request_timeout: float | None = _setting(
        None, "Ceiling of every request's own timeout", unit="seconds", shown="none", gt=0, le=86400
    )
    keep_alive_seconds: float = _setting(
        15.0, "A waiting stream gets a comment line this often", unit="seconds", ge=0.05, le=3600
    )
    drain_seconds: float = _setting(
        30.0, "Time that running requests have to finish after SIGTERM", unit="seconds", ge=0, le=86400
    )
    model: str | None = _setting(
        None, "Model to serve: a folder, a GGUF file, or a name on the hub", shown="the embedded SmolLM2"
    )
    model_cache: Path = _setting(Path("model_cache"), "Folder of prepared models")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting("auto", "Number format of weights and cache")
    device: Device = _setting("auto", "Device of the model: auto, cpu, cuda or cuda:N")
    max_num_seqs: int = _setting(4, "Sequences in one batch at most", unit="sequences", ge=1, le=1024)
    max_queue: int = _setting(256, "Sequences that may wait beyond those", unit="sequences", ge=0, le=1_000_000)
    max_model_len: int | None = _setting(
        None, "Context: prompt and answer of one sequence", unit="tokens", shown="the model's own", ge=1, le=_INT32
    )
    max_num_batched_tokens: int = _setting(
        512, "Tokens that one step computes at most; longer prompts come in chunks", unit="tokens", ge=1, le=1_048_576
    )
    memory_budget: ByteSize | None = _setting(
        None, "Memory for all that is resident", unit="bytes", shown="70% of the memory limit", ge=_MIB, le=_LARGEST
    )
    catalogue: Path | None = _setting(None, "File that lists the models of /predict and /models", shown="none")
    max_models: int | None = _setting(
        None,
        "Models of the catalogue that are loaded at once, beside the memory budget",
        unit="models",
        shown="any",
        ge=1,
        le=1000,
    )
    predict_timeout: float = _setting(
        30.0, "A request to a model of the catalogue waits and runs this long at most", unit="seconds", gt=0, le=86400
    )
    image_root: Path | None = _setting(
        None, "Folder of the images that requests may name by a path", shown="none: only images in requests"
    )
    max_image_bytes: ByteSize = _setting(ByteSize(20 * _MIB), "Largest image file", unit="bytes", ge=1, le=2**30)
    max_image_pixels: int = _setting(50_000_000, "Largest image, width times height", unit="pixels", ge=1, le=1_000_000_000)
    kv_cache_bytes: ByteSize | None = _setting(
        None,
        "KV cache of the model",
        unit="bytes",
        shown="what max-num-seqs contexts need, at most 25% of the memory budget",
        ge=_KIB,
        le=_LARGEST,
    )
    threads: int | None = _setting(None, "Threads that compute", unit="threads", shown="the CPU quota", ge=1, le=1024)
    tokenizer_threads: int | None = _setting(
        None, "Threads that tokenize", unit="threads", shown="the CPU quota, at most 4", ge=1, le=64
    )
    batch_invariant: bool = _setting(True, "Bit-equal answers whatever else is in the batch; off is faster on some CPUs")
    step_timeout: float = _setting(60.0, "A step that takes longer counts as a dead worker", unit="seconds", gt=0, le=86400)
    load_timeout: float = _setting(600.0, "A load that takes longer has failed", unit="seconds", gt=0, le=86400)
    max_restarts: int = _setting(
        5, "Workers started in a row without one completed step, before giving up", unit="restarts", ge=0, le=1000
    )
    vllm_on_cpu: bool = _setting(False, "Let /generate_vllm run where there is no GPU")
    vllm_gpu_memory_fraction: float = _setting(0.3, "Share of the GPU's memory that vLLM may take", unit="fraction", gt=0, le=1)
    vllm_start_timeout: float = _setting(600.0, "A start of vLLM that takes longer has failed", unit="seconds", gt=0, le=86400)
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Least level that is logged")
    log_format: Literal["auto", "text", "json"] = _setting("auto", "Form of the log; auto: text on a terminal, else JSON lines")
    log_prompts: bool = _setting(False, "Log the prompts, too")

    def http(self) -> HttpConfig:
        return HttpConfig(
            host=self.host,
            port=self.port,
            model_alias=self.model,
            max_connections=self.max_connections,
            max_body_bytes=self.max_body_bytes,
            max_prompts=self.max_prompts,
            request_timeout=self.request_timeout,
            keep_alive_seconds=self.keep_alive_seconds,
            drain_seconds=self.drain_seconds,
            log_prompts=self.log_prompts,
        )

    def log(self) -> LogConfig:
        return LogConfig(self.log_level, self.log_format)

    def engine(self) -> EngineConfig:
        cpus = cpu_budget()
        return EngineConfig(
            model=self.model,
            model_cache=self.model_cache,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads or cpus,
            tokenizer_threads=self.tokenizer_threads or min(4, cpus),
            max_num_seqs=self.max_num_seqs,
            max_queue=self.max_queue,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_bytes=self.kv_cache_bytes,
            kv_cache_limit=int(_KV_CACHE_SHARE * self._budget()),
            batch_invariant=self.batch_invariant,
            step_timeout=self.step_timeout,
            load_timeout=self.load_timeout,
            max_restarts=self.max_restarts,
        )

    def models(self) -> ModelsConfig:
        return ModelsConfig(
            catalogue=self.catalogue,
            budget=self._budget(),
            max_models=self.max_models,
            device=self.device,
            model_cache=self.model_cache,
            threads=self.threads or cpu_budget(),
            load_timeout=self.load_timeout,
            batch_timeout=self.step_timeout,
            predict_timeout=self.predict_timeout,
            image_root=self.image_root,
            max_image_bytes=self.max_image_bytes,
            max_images_bytes=self.max_body_bytes,
            max_image_pixels=self.max_image_pixels,
        )

    def _budget(self) -> int:
        return self.memory_budget or int(_BUDGET_SHARE * memory_limit())

    def vllm(self) -> VllmConfig:
        return VllmConfig(
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            allow_cpu=self.vllm_on_cpu,
            gpu_memory_fraction=self.vllm_gpu_memory_fraction,
            start_timeout=self.vllm_start_timeout,
        )


def parse(arguments: Sequence[str]) -> Settings:
    """Command line before environment. Anything wrong or unknown is told on standard error; then SystemExit(2)."""
    for name in os.environ:
        if name.upper().startswith(PREFIX) and name.upper().removeprefix(PREFIX).lower() not in Settings.model_fields:
            _refuse(f"there is no setting {name} (see --help)")
    try:
        return CliApp.run(Settings, cli_args=list(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        _refuse(f"{_flag(name)} ({PREFIX}{name.upper()}): {first['msg']}")


def _refuse(sentence: str) -> NoReturn:
    sys.stderr.write(f"main.py: error: {sentence}\n")
    raise SystemExit(2)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_table() -> str:
    """Markdown for the README: the same on every machine."""
    lines = ["| setting | default | unit | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        about: dict[str, Any] = extra if isinstance(extra, dict) else {}
        lines.append(f"| `{_flag(name)}` | {about['shown'] or _shown(field.default)} | {about['unit']} | {about['help']} |")
    return "\n".join(lines) + "\n"


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    return f"{default:g}" if isinstance(default, float) else str(default)
