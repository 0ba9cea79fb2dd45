"""Drives a ModelRunner without an engine: sequences that arrive at any time, computed in any chunks, packed together."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer

from llm.batch import Row
from llm.messages import WorkerSpec
from llm.model_runner import ModelRunner

_BLOCK = 16


def spec(folder: Path, dtype: str = "float32", threads: int = 1, device: str = "cpu") -> WorkerSpec:
    return WorkerSpec(
        generation=1,
        folder=str(folder),
        num_tokens=Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(),
        dtype=dtype,
        device=device,
        threads=threads,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        max_model_len=None,
        kv_cache_bytes=None,
        kv_cache_limit=256 << 20,
        batch_invariant=True,
        probe=None,
        probe_records=None,
    )


def runner(folder: Path, dtype: str = "float32", *, threads: int = 1, device: str = "cpu") -> ModelRunner:
    return ModelRunner(spec(folder, dtype, threads, device), lambda _: None)


@dataclass(eq=False)
class Running:
    prompt: list[int]
    blocks: list[int]
    wanted: int  # new tokens
    known: list[int] = field(default_factory=list)
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)  # [vocab] of each new token

    def __post_init__(self) -> None:
        self.known = list(self.prompt)


def blocks_for(tokens: int) -> int:
    return -(-tokens // _BLOCK)


def scattered(model: ModelRunner, prompts: Sequence[list[int]], wanted: int, rng: random.Random) -> list[Running]:
    """Sequences whose blocks lie anywhere in the cache."""
    free = list(range(1, model.ready.num_blocks + 1))
    rng.shuffle(free)
    made = []
    for prompt in prompts:
        count = blocks_for(len(prompt) + wanted)
        made.append(Running(list(prompt), [free.pop() for _ in range(count)], wanted))
    return made


def generate(model: ModelRunner, sequences: Sequence[Running], batch: int, chunks: Sequence[int], rng: random.Random) -> None:
    """Greedy. At most `batch` run at once; another joins now and then; a prompt is computed in chunks of random sizes."""
    waiting, running = list(sequences), list[Running]()
    while waiting or running:
        while waiting and len(running) < batch and (not running or rng.random() < 0.5):
            running.append(waiting.pop(0))
        step(model, [(one, rng.choice(chunks)) for one in running])
        running = [one for one in running if len(one.logits) < one.wanted]


def step(model: ModelRunner, chunks: Sequence[tuple[Running, int]]) -> None:
    """One forward; who catches up gets the most likely token."""
    rows, caught_up = [], []
    for one, size in chunks:
        end = min(one.computed + size, len(one.known))
        tokens = one.known[one.computed : end]
        last = end == len(one.known)
        rows.append(Row(tokens, one.computed, one.blocks, len(tokens) - 1 if last else len(tokens)))
        one.computed = end
        if last:
            caught_up.append(one)
    for one, logits in zip(caught_up, model.forward(rows), strict=True):
        one.logits.append(logits)
        one.known.append(int(logits.argmax()))
