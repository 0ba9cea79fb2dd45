"""Stands in for vLLM, which most machines of a developer can't install: the few names that we use, and an answer by script.

The prompt's own tokens come back, again and again, one at a time; what else a prompt can ask for is in `async_llm.py`.
What is true of the real one is tested in tests/gpu/test_vllm_gpu.py.
"""

from dataclasses import dataclass
from typing import Any

__version__ = "stand-in"


@dataclass
class AsyncEngineArgs:
    model: str
    dtype: str
    max_model_len: int | None
    max_num_seqs: int
    gpu_memory_utilization: float
    scheduling_policy: str
    generation_config: str
    enforce_eager: bool
    enable_log_requests: bool


class SamplingParams:
    def __init__(self, **parameters: Any) -> None:
        self.__dict__.update(parameters)
