"""What the engine's parts are told at construction: frozen pieces of the settings."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str | None  # None: the embedded default
    model_cache: Path
    dtype: str  # "auto", "float32", "bfloat16", "float16"
    device: str  # "auto", "cpu", "cuda", "cuda:N"
    threads: int
    tokenizer_threads: int
    max_num_seqs: int
    max_queue: int  # sequences that may wait beyond max_num_seqs
    max_model_len: int | None  # tokens; None: the model's own
    max_num_batched_tokens: int  # tokens a step computes at most
    kv_cache_bytes: int | None
    kv_cache_limit: int  # bytes; bounds the default of kv_cache_bytes
    batch_invariant: bool
    step_timeout: float  # seconds; a step that takes longer counts as a dead worker
    load_timeout: float  # seconds
    max_restarts: int  # in a row without one completed step


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """What the optional vLLM engine is told. It serves the checkpoint that the service's own engine has prepared."""

    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    allow_cpu: bool  # a CPU build of vLLM may serve, too
    gpu_memory_fraction: float
    start_timeout: float  # seconds
