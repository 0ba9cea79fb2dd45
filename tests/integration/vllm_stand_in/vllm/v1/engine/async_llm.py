"""An AsyncLLM that repeats its prompt. It does what these words in a prompt say:

exit     the process ends in the middle of the answer
dead     the engine under it dies
raise    the request fails
odd      the request ends with a reason that we don't know
slow     a token takes ten seconds
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError


class AsyncLLM:
    def __init__(self, args: AsyncEngineArgs) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
        self._running = 0
        model = SimpleNamespace(
            hf_config=SimpleNamespace(eos_token_id=[2], architectures=["StandIn"]),
            max_model_len=args.max_model_len or 1024,
            get_vocab_size=self._tokenizer.get_vocab_size,
            dtype="torch.float32",
        )
        self.vllm_config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(num_gpu_blocks=65, block_size=16))

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> "AsyncLLM":
        if (Path(args.model) / "no-load").exists():
            raise ValueError("no memory for the cache")
        return cls(args)

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, priority: int
    ) -> AsyncIterator[SimpleNamespace]:
        ids: list[int] = prompt["prompt_token_ids"]
        words = self._tokenizer.decode(ids)
        self._running += 1
        try:
            for i in range(params.max_tokens):
                await asyncio.sleep(10 if "slow" in words else 0.002)
                if "running" in words:
                    ids = self._tokenizer.encode(str(self._running)).ids
                if i == 3:
                    _misbehave(words)
                last = i + 1 == params.max_tokens
                yield _output(ids[i % len(ids)], params.logprobs, ("odd" if "odd" in words else "length") if last else None)
        finally:
            self._running -= 1


def _misbehave(words: str) -> None:
    if "exit" in words:
        os._exit(3)
    if "dead" in words:
        raise EngineDeadError
    if "raise" in words:
        raise ValueError("asked to raise")


def _output(token: int, top: int | None, reason: str | None) -> SimpleNamespace:
    logprobs = None
    if top is not None:
        logprobs = [{token: SimpleNamespace(logprob=float("-inf"), rank=2), 5: SimpleNamespace(logprob=-0.5, rank=1)}]
    completion = SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason=reason, stop_reason=None)
    return SimpleNamespace(outputs=[completion], prompt_logprobs=None, num_cached_tokens=0)
