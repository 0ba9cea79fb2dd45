"""What can't be served rightly is refused at load, in a sentence that says why; and what the workers are forked from."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm.exceptions import ModelRefused
from llm.model_manager import prepare
from llm.model_runner import ModelRunner
from tests.integration.conftest import TinyModel
from tests.integration.driver import runner, spec

Damage = Callable[[Path], None]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "a bloom model, whose attention can't be replaced by a paged one"),
        ("mamba", "a mamba model, whose attention can't be replaced by a paged one"),
        ("falcon", "can't be loaded: its attention can't be replaced by a paged one"),
        ("minimax", "has 2 layers, and 1 of them have an attention that can be paged"),
        ("doge", "can't run with a paged cache: the attention of this model asks for attention_mask"),
        ("diffllama", "gives other logits with a paged cache than by itself: the relative difference is 0."),
    ],
)
def test_an_architecture_that_would_be_wrong(name: str, reason: str, tiny_model: TinyModel) -> None:
    with pytest.raises(ModelRefused) as refused:
        runner(tiny_model(name))
    assert reason in refused.value.message


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"max_model_len": 1025}, "--max-model-len is 1025, and the model's context is 1024 tokens"),
        ({"kv_cache_bytes": 8191}, "the KV cache of 8191 bytes has no room for one block, which takes 8192 bytes"),
    ],
)
def test_more_than_there_is(asked: dict[str, Any], reason: str, tiny_model: TinyModel) -> None:
    with pytest.raises(ModelRefused) as refused:
        ModelRunner(replace(spec(tiny_model("llama")), **asked), lambda _: None)
    assert refused.value.message == reason


@pytest.mark.parametrize(("asked", "context", "blocks"), [({"max_model_len": 8}, 8, 16), ({"kv_cache_bytes": 8192}, 1024, 1)])
def test_the_least_there_can_be(asked: dict[str, Any], context: int, blocks: int, tiny_model: TinyModel) -> None:
    ready = ModelRunner(replace(spec(tiny_model("llama")), **asked), lambda _: None).ready
    assert (ready.max_model_len, ready.num_blocks) == (context, blocks)


def config(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", {"format": "pt"})

    return damage


def cut_off(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


_UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_off, "can't be loaded: Error while deserializing header: incomplete metadata, file not fully covered"),
        (pickled, "can't be loaded: Error no file named model.safetensors found"),
        (tensors(lambda found: found.pop(_UP)), f"lacks {_UP}"),
        (config(num_hidden_layers=3), "lacks model.layers.2.input_layernorm.weight and 8 more tensors"),
        (tensors(lambda found: found.update({_UP: torch.zeros(8, 8)})), f"has other shapes than its config.json says: {_UP}"),
        (tensors(lambda found: found["model.norm.weight"].fill_(torch.nan)), "gives other logits with a paged cache"),
        (config(num_attention_heads=3), "The hidden size (64) is not a multiple of the number of attention heads (3)"),
        (config(hidden_act="nope"), "can't be loaded: transformers doesn't know 'nope'"),
        (config(model_type="nope"), "`nope`"),
        (config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized"),
    ],
)
def test_a_checkpoint_that_is_damaged_or_unknown(damage: Damage, reason: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model("llama"), folder)
    damage(folder)
    with pytest.raises(ModelRefused) as refused:
        runner(folder)
    assert reason in refused.value.message
    assert "\n" not in refused.value.message


def test_a_pickled_checkpoint_is_refused_by_name_before_any_worker(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_model("llama"), folder)
    pickled(folder)
    with pytest.raises(ModelRefused, match=r"pytorch_model\.bin, a pickle, which can run any code"):
        prepare(str(folder), tmp_path, lambda _: None)


def test_what_workers_are_forked_from_has_one_thread_and_no_cuda_and_workers_import_little_more(
    tiny_model: TinyModel,
) -> None:
    """A fork copies only the thread that forks, and no CUDA context. torch's compiler and sympy would take seven seconds of a
    start, and of each restart."""
    script = f"""
import gc, os, llm.preload, sys, torch
print(len(os.listdir("/proc/self/task")), torch.cuda.is_initialized(), "transformers" in sys.modules, gc.isenabled())
from tests.integration.driver import runner
from pathlib import Path
runner(Path({str(tiny_model("gemma3"))!r}))
runner(Path({str(tiny_model("gpt2"))!r}))
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert ran.stdout.split() == ["1", "False", "True", "True", "False", "False"]


def test_whoever_holds_a_stand_in_gets_the_real_module_through_it() -> None:
    script = """
import sys
from llm.light_imports import light_imports
with light_imports():
    import sympy as held
    from torch.fx.experimental import symbolic_shapes
    stood_in = "sympy.core" not in sys.modules
    equal = symbolic_shapes.sym_eq
    asked_in_passing = (equal((2, 3), [2, 3]), equal((2,), (2, 3)), symbolic_shapes.guard_or_false(True))
assert "sympy" not in sys.modules
import sympy
print(stood_in, asked_in_passing == (True, False, True), isinstance(held.Integer(2), held.Basic), held.Basic is sympy.Basic)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.split() == ["True"] * 4
