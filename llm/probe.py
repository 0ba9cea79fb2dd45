"""What is tried at a model's first load on this machine: that it is right with our cache, in whole and in chunks, and
whether its rows have the same bits either way.

A model that isn't right is refused: in a random tiny model even a wrong one picks the same tokens most of the time, so
logits are compared, not tokens.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from llm.batch import Row
from llm.messages import ProbeReport

# Of the norm of all logits. In half precision two right ways differ by the roundings of every layer: 0.016 was seen.
_TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.06, torch.float16: 0.01}
_LENGTHS = (150, 37)  # tokens of the two prompts; the first needs a second tile of keys
_CUTS = ((64, 22), (65, 23), (101, 24), (150, 37))  # how far each is computed after each step


class Runner(Protocol):
    model: PreTrainedModel
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    vocab_size: int

    def allocate(self, num_blocks: int) -> None: ...

    def forward(self, rows: Sequence[Row]) -> torch.Tensor: ...

    @property
    def backend(self) -> "_Backend": ...


class _Backend(Protocol):
    block_size: int


@torch.inference_mode()
def probe(
    runner: Runner, name: str, row_tiles: tuple[int, ...], thread_counts: tuple[int, ...], *, invariant: bool
) -> ProbeReport:
    """Two random prompts, packed and in chunks over scattered blocks, against the model alone.

    invariant: whether a row may be expected to have the same bits in every batch.
    """
    lengths = [min(length, runner.max_model_len) for length in _LENGTHS]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(runner.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    size = runner.backend.block_size
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator) + 1
    tables = [part.tolist() for part in torch.split(order, counts)]
    runner.allocate(sum(counts))
    packed = _in_chunks(runner, prompts, tables)
    expected = [plain_logits(runner.model, prompt, runner.device)[:, : runner.vocab_size] for prompt in prompts]
    difference = max(float((ours - plain).norm() / plain.norm()) for ours, plain in zip(packed, expected, strict=True))
    same = invariant and all(
        torch.equal(runner.forward([Row(prompt, 0, table, 0)]), logits)
        for prompt, table, logits in zip(prompts, tables, packed, strict=True)
    )
    return ProbeReport(
        name, row_tiles, thread_counts, same, difference if math.isfinite(difference) else math.inf, _TOLERANCE[runner.dtype]
    )


def _in_chunks(runner: Runner, prompts: list[list[int]], tables: list[list[int]]) -> list[torch.Tensor]:
    """-> the logits of each prompt's every token: [tokens, vocab_size]"""
    done = [0] * len(prompts)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for ends in _CUTS:
        rows = [
            Row(prompt[start : min(end, len(prompt))], start, table, 0)
            for prompt, start, end, table in zip(prompts, done, ends, tables, strict=True)
            if start < len(prompt)
        ]
        if not rows:  # a context shorter than the first cut
            break
        logits = torch.split(runner.forward(rows), [len(row.token_ids) for row in rows])
        unfinished = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]
        for i, part in zip(unfinished, logits, strict=True):
            parts[i].append(part)
            done[i] += len(part)
    return [torch.cat(part) for part in parts]


def plain_logits(model: PreTrainedModel, token_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """The model by itself, with transformers' own attention: [tokens, rows of the head] float32."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        output = model(input_ids=torch.tensor([list(token_ids)], device=device), use_cache=False)
    finally:
        model.set_attn_implementation(ours)
    logits: torch.Tensor = output.logits[0]
    return logits.float()
