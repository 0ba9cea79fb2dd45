"""One loaded model and its KV cache: a packed batch goes in, the wanted rows of its logits come out.

The cache, per layer:    keys   [kv heads, (1 + num_blocks) * block_size, key size]
                         values [kv heads, (1 + num_blocks) * block_size, value size]

Block b holds the slots b * block_size to (b + 1) * block_size - 1; block 0 takes what padding writes.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import transformers

from llm import step_threads
from llm.attention.base import AttentionBackend, LayerCache, LayerShape, Step, Survey
from llm.attention.dense import DenseBackend
from llm.attention.varlen import VarlenBackend
from llm.batch import Row, pack
from llm.exceptions import ModelRefused
from llm.loading import choose_device, choose_dtype, context_length, end_token_ids, load_model
from llm.messages import ProbeReport, Ready, WorkerSpec
from llm.probe import probe
from llm.probe_records import probe_record
from llm.products import TILES, agreement, pack_weights, padded, tile_products

log = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"dense": DenseBackend, "varlen": VarlenBackend}


class ModelRunner:
    """Raises ModelRefused where the model can't be served rightly here; the message says why."""

    def __init__(self, spec: WorkerSpec, report: Callable[[str], None]) -> None:
        began = time.monotonic()
        torch.set_num_threads(spec.threads)
        torch.set_grad_enabled(False)
        self.device = choose_device(spec.device)
        dtype = choose_dtype(spec.dtype, self.device)
        report("reading the weights")
        self.model = load_model(Path(spec.folder), dtype, self.device)
        self.dtype = dtype
        config = self.model.config
        self.max_model_len = context_length(config, spec.max_model_len)
        self.vocab_size = min(spec.num_tokens, config.vocab_size)
        self.backend: AttentionBackend = DenseBackend()
        self.shapes = self._survey()
        pack_weights(self.model)
        self._caches: dict[int, LayerCache] = {}
        self._row_tiles: tuple[int, ...] = ()
        probed = self._probed(spec, report)
        report("allocating the cache")
        self.backend = BACKENDS[probed.attention_backend]()
        num_blocks, cache_bytes = self._cache_size(spec)
        self.allocate(num_blocks)
        self.ready = Ready(
            generation=spec.generation,
            pid=os.getpid(),
            num_blocks=num_blocks,
            block_size=self.backend.block_size,
            kv_cache_bytes=cache_bytes,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=end_token_ids(Path(spec.folder), config),
            dtype=str(dtype).removeprefix("torch."),
            device=str(self.device),
            threads=spec.threads,
            architecture=type(self.model).__name__,
            probe=probed,
            torch_version=str(torch.__version__),
            transformers_version=str(transformers.__version__),
            seconds=time.monotonic() - began,
        )

    def allocate(self, num_blocks: int) -> None:
        """The cache in use is dropped. Its memory is touched only as blocks are written."""
        slots = (1 + num_blocks) * self.backend.block_size
        self._caches = {layer: LayerCache.zeros(shape, slots, self.dtype, self.device) for layer, shape in self.shapes.items()}

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """The wanted logits of all rows in order: [wanted, vocab_size] float32."""
        packed = pack(rows, self.backend.block_size, partial(padded, tiles=self._row_tiles))
        step = Step(
            torch.from_numpy(packed.slots).to(self.device),
            self._caches,
            self.backend,
            self.backend.prepare(packed, self.device),
        )
        logits = self._call(packed.token_ids.tolist(), packed.positions.tolist(), packed.logits.tolist(), step)
        return logits[: packed.num_wanted, : self.vocab_size].float()

    def _call(self, token_ids: list[int], positions: list[int], wanted: list[int], step: Step | Survey) -> torch.Tensor:
        """-> [wanted, rows of the head] in the model's dtype"""
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=self.device),
            use_cache=False,
            quartet_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _survey(self) -> dict[int, LayerShape]:
        """Which layers cache what. Raises ModelRefused where a layer doesn't come to our attention."""
        survey = Survey({})
        try:
            self._call([0], [0], [0], survey)
        except (ValueError, TypeError) as error:
            raise ModelRefused(f"{type(self.model).__name__} can't run with a paged cache: {error}") from error
        layers: int = self.model.config.num_hidden_layers
        if len(survey.shapes) != layers:
            raise ModelRefused(
                f"{type(self.model).__name__} has {layers} layers, and {len(survey.shapes)} of them have an attention that "
                "can be paged"
            )
        return survey.shapes

    def _tile(self, row_tiles: tuple[int, ...]) -> None:
        self._row_tiles = row_tiles
        if row_tiles:
            tile_products(self.model, row_tiles)

    def _probed(self, spec: WorkerSpec, report: Callable[[str], None]) -> ProbeReport:
        """By the worker before this one, by an earlier start, or now."""
        record = None
        known = spec.probe
        if known is None and spec.probe_records is not None:
            record = probe_record(Path(spec.probe_records), spec, self.dtype, self.device)
            known = record.find()
        if known is not None:
            self._tile(known.row_tiles)
            return known
        report("testing the model against its own attention")
        found = self._probe(spec)
        if record is not None:
            record.keep(found)
        return found

    def _probe(self, spec: WorkerSpec) -> ProbeReport:
        on_cpu = self.device.type == "cpu"
        thread_counts = step_threads.thread_counts(spec.threads) if on_cpu else (spec.threads,)
        agreed: tuple[int, ...] = ()
        if spec.batch_invariant:
            agreed, thread_counts = agreement(self.model, thread_counts)
        self._tile(agreed or (TILES if on_cpu else ()))
        names = ["varlen", "dense"] if VarlenBackend.usable(self.device, self.dtype) else ["dense"]
        for name in names:
            self.backend = BACKENDS[name]()
            try:
                found = probe(self, name, self._row_tiles, thread_counts, invariant=bool(agreed))
                if found.difference <= found.tolerance:
                    return found
                refusal = (
                    f"{type(self.model).__name__} gives other logits with a paged cache than by itself: the relative "
                    f"difference is {found.difference:.2g}, and {found.tolerance:.2g} is allowed"
                )
            except ValueError as error:
                refusal = f"{type(self.model).__name__} can't run with a paged cache: {error}"
            log.info("attention by the backend %s is not possible: %s", name, refusal)
        raise ModelRefused(refusal)

    def _cache_size(self, spec: WorkerSpec) -> tuple[int, int]:
        """(blocks, bytes). Raises ModelRefused where not one block fits."""
        block = self.backend.block_size * self.dtype.itemsize * sum(s.numbers_per_token for s in self.shapes.values())
        contexts = spec.max_num_seqs * -(-self.max_model_len // self.backend.block_size) * block
        size = min(contexts, spec.kv_cache_limit) if spec.kv_cache_bytes is None else spec.kv_cache_bytes
        num_blocks = size // block
        if num_blocks < 1:
            raise ModelRefused(f"the KV cache of {size} bytes has no room for one block, which takes {block} bytes")
        return num_blocks, size
