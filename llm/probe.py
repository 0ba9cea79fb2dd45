"""What is measured at a model's first load on this machine: that it is right with our cache, and what keeps its rows'
bits the same in every batch.

A model that isn't right is refused: in a random tiny model even a wrong one picks the same tokens most of the time, so
logits are compared, not tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llm.batch import Row
from llm.messages import ProbeReport

_MULTIPLES = (1, 2, 4, 8, 16)  # of rows, that a product may be padded to
_FACTORS = (1, 2, 3, 5, 8)  # multiples of them that are tried
_MOST_ROWS = 64
# Of the largest |logit|. In half precision two right ways differ by several roundings of the hidden state per layer.
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
_LENGTHS = (150, 37)  # tokens of the two prompts; the first needs a second tile of keys
_CUTS = ((64, 22), (101, 23), (150, 37))  # how far each is computed after each step


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
def measure_row_multiple(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """The smallest number of rows such that, padded to a multiple of it, a row of every product of this model has the
    same bits whatever the number of rows."""
    smallest = 1
    for layer in _products(model):
        while smallest < _MULTIPLES[-1] and not _same_rows(layer, smallest, dtype):
            smallest *= 2
    return smallest


def _products(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """One module for each shape of a matrix product."""
    seen = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            shape = (tuple(module.weight.shape), module.bias is None)
            if shape not in seen:
                seen.add(shape)
                yield module


def _same_rows(layer: torch.nn.Module, multiple: int, dtype: torch.dtype) -> bool:
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    inputs = weight.shape[0] if isinstance(layer, Conv1D) else weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _MOST_ROWS, inputs, generator=generator).to(weight.device, dtype)
    expected = layer(rows)
    counts = [multiple * factor for factor in _FACTORS if multiple * factor <= _MOST_ROWS]
    return all(torch.equal(layer(rows[:, :count]), expected[:, :count]) for count in counts)


@torch.inference_mode()
def probe(runner: Runner, name: str, multiple: int, *, invariant: bool) -> ProbeReport:
    """Two random prompts, packed and in chunks over scattered blocks, against the model alone."""
    lengths = [min(length, runner.max_model_len) for length in _LENGTHS]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(runner.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    size = runner.backend.block_size
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator) + 1
    tables = [part.tolist() for part in torch.split(order, counts)]
    runner.allocate(sum(counts))
    packed = _in_chunks(runner, prompts, tables)
    difference, largest = 0.0, 1.0
    for prompt, logits in zip(prompts, packed, strict=True):
        expected = plain_logits(runner.model, prompt, runner.device)[:, : runner.vocab_size]
        difference = max(difference, float((logits - expected).abs().nan_to_num(torch.inf).max()))
        largest = max(largest, float(expected.abs().max()))
    same = invariant and all(
        torch.equal(runner.forward([Row(prompt, 0, table, 0)]), logits)
        for prompt, table, logits in zip(prompts, tables, packed, strict=True)
    )
    return ProbeReport(name, multiple, same, difference, _TOLERANCE[runner.dtype] * largest)


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
