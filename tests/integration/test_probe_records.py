"""A model is tested at its first start here, and again only when something that the test depends on has changed."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llm.batch import Row
from llm.exceptions import ModelRefused
from llm.messages import WorkerSpec
from llm.model_runner import ModelRunner
from tests.integration.conftest import TinyModel
from tests.integration.driver import spec

_TESTING = "testing the model against its own attention"


@pytest.fixture
def own_spec(tmp_path: Path, tiny_model: TinyModel) -> WorkerSpec:
    """With a checkpoint that a test may change."""
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "own")
    return dataclasses.replace(spec(folder), probe_records=str(tmp_path / "cache" / "probed"))


def load(asked: WorkerSpec) -> tuple[ModelRunner, bool]:
    """-> and whether it was tested now"""
    reports: list[str] = []
    return ModelRunner(asked, reports.append), _TESTING in reports


def kept(asked: WorkerSpec) -> list[Path]:
    assert asked.probe_records is not None
    return list(Path(asked.probe_records).iterdir())


def test_a_second_start_tests_nothing_and_computes_the_same(own_spec: WorkerSpec) -> None:
    first, tested = load(own_spec)
    assert tested
    second, tested_again = load(own_spec)
    assert not tested_again
    assert second.ready.probe == first.ready.probe
    rows = [Row(list(range(3, 40)), 0, [1, 2, 3], 0), Row([5], 0, [4], 0)]
    assert torch.equal(second.forward(rows), first.forward(rows))


def test_nothing_is_kept_where_nobody_asks_for_it(tiny_model: TinyModel) -> None:
    assert [load(spec(tiny_model("llama")))[1] for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"threads": 2}, {"max_model_len": 64}, {"batch_invariant": False}], ids=str
)
def test_another_way_to_serve_it_is_tested_by_itself(change: dict[str, Any], own_spec: WorkerSpec) -> None:
    other = dataclasses.replace(own_spec, **change)
    assert load(own_spec)[1]
    assert load(other)[1]
    torch.set_num_threads(1)
    assert not load(own_spec)[1]  # both are kept
    assert len(kept(own_spec)) == 2


def weights_written_anew(folder: Path) -> None:
    os.utime(folder / "model.safetensors", (1, 1))


def another_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 1000.0}))


@pytest.mark.parametrize("change", [weights_written_anew, another_config])
def test_a_checkpoint_that_has_changed(change: Callable[[Path], None], own_spec: WorkerSpec) -> None:
    load(own_spec)
    change(Path(own_spec.folder))
    assert load(own_spec)[1]
    assert not load(own_spec)[1]
    assert len(kept(own_spec)) == 1  # in the place of the one before


def test_an_environment_that_makes_the_libraries_choose_other_kernels(
    own_spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(own_spec)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert load(own_spec)[1]


@pytest.mark.parametrize("name", ["checkpoint", "code", "device", "environment", "libraries", "processor", "report", "way"])
def test_each_condition_is_compared(name: str, own_spec: WorkerSpec, caplog: pytest.LogCaptureFixture) -> None:
    load(own_spec)
    (path,) = kept(own_spec)
    text = json.loads(path.read_text())
    assert name in text["conditions"]
    text["conditions"][name] = "as on another machine"
    path.write_text(json.dumps(text))
    with caplog.at_level("INFO"):
        assert load(own_spec)[1]
    assert caplog.messages == [f"the model is tested again, since these have changed after the last time: {name}"]
    assert not load(own_spec)[1]


def cut(text: str) -> str:
    return text[:100]


def emptied(_: str) -> str:
    return ""


def another_thing(_: str) -> str:
    return '["report"]'


def altered(text: str) -> str:
    return text.replace('"row_tiles": [', '"row_tiles": [3,')


@pytest.mark.parametrize("damage", [cut, emptied, another_thing, altered])
def test_a_file_that_is_not_what_was_written(damage: Callable[[str], str], own_spec: WorkerSpec) -> None:
    load(own_spec)
    (path,) = kept(own_spec)
    whole = path.read_text()
    assert damage(whole) != whole
    path.write_text(damage(whole))
    assert load(own_spec)[1]
    assert path.read_text() == whole


def test_where_nothing_can_be_written_the_model_is_served_and_it_is_said(
    own_spec: WorkerSpec, caplog: pytest.LogCaptureFixture
) -> None:
    assert own_spec.probe_records is not None
    Path(own_spec.probe_records).parent.mkdir()
    Path(own_spec.probe_records).write_text("a file in the folder's place")
    assert load(own_spec)[1]
    assert "can't be kept for the next start" in caplog.text


def test_of_a_refused_model_nothing_is_kept(tmp_path: Path, tiny_model: TinyModel) -> None:
    asked = dataclasses.replace(spec(tiny_model("diffllama")), probe_records=str(tmp_path / "probed"))
    for _ in range(2):
        with pytest.raises(ModelRefused, match="gives other logits"):
            load(asked)
    assert not (tmp_path / "probed").exists()
