"""A model is found, converted once, and never replaced under those who read it; what can't be one is refused by its name."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm import model_manager
from llm.channel import Stopped, Wakeup
from llm.exceptions import ModelRefused
from llm.model_manager import prepare
from llm.model_preparation import prepare_model
from tests.unit.gguf_for_tests import tensors, write

_ROOT = Path(__file__).parents[2]


def nothing(_: str) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


class TestConversion:
    def test_it_happens_once(self, source: Path, cache: Path) -> None:
        told: list[str] = []
        folder = prepare(str(source), cache, told.append)
        assert names(folder) == [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "source.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        assert told[0] == f"converting {folder.name}, once, into cache/"
        assert told[-1] == "converting the weights: 100%"
        seen, cached = len(told), cache.stat()
        assert prepare(str(source), cache, told.append) == folder
        assert len(told) == seen
        assert cache.stat().st_mtime_ns == cached.st_mtime_ns, "a cache that can't be written serves what it holds"

    def test_a_file_that_changed_is_converted_beside_the_old_one_which_a_running_service_may_read(
        self, source: Path, cache: Path
    ) -> None:
        first = prepare(str(source), cache, nothing)
        before = weights(first)
        write(source, weights=tensors(seed=1))
        second = prepare(str(source), cache, nothing)
        assert weights(first) == before
        assert weights(second) != before

    def test_files_of_one_name_do_not_share_a_conversion(self, source: Path, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        other = write(tmp_path / "other" / source.name, weights=tensors(seed=1))
        shutil.copystat(source, other)
        assert weights(prepare(str(source), cache, nothing)) != weights(prepare(str(other), cache, nothing))

    def test_of_two_at_the_same_time_the_first_to_end_stays(self, source: Path, cache: Path) -> None:
        others: list[tuple[Path, int]] = []

        def meanwhile(_: str) -> None:
            if not others:
                folder = prepare(str(source), cache, nothing)
                others.append((folder, folder.stat().st_ino))

        folder = prepare(str(source), cache, meanwhile)
        assert others == [(folder, folder.stat().st_ino)]
        assert names(cache) == [folder.name]

    def test_of_many_processes_all_find_it_whole(self, source: Path, cache: Path) -> None:
        command = [sys.executable, "-m", "llm.model_manager", "--model", str(source), "--cache", str(cache)]
        running = [subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        answers = {process.communicate()[0].splitlines()[-1] for process in running}
        assert [process.returncode for process in running] == [0] * 4
        [folder] = cache.iterdir()
        assert answers == {f"folder: {folder}"}
        assert (folder / "source.json").is_file()

    def test_an_older_format_is_converted_again(self, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = prepare(str(source), cache, nothing)
        (folder / "left over").touch()
        monkeypatch.setattr(model_manager, "_FORMAT", model_manager._FORMAT + 1)
        assert prepare(str(source), cache, nothing) == folder
        assert "left over" not in names(folder)
        assert names(cache) == [folder.name]

    def test_a_killed_one_leaves_nothing_that_is_taken_for_a_model_and_is_cleared_away(self, source: Path, cache: Path) -> None:
        script = f"""
import os
from pathlib import Path
from llm.model_manager import prepare
prepare({str(source)!r}, Path({str(cache)!r}), lambda text: os.kill(os.getpid(), 9) if "%" in text else None)
"""
        died = subprocess.run([sys.executable, "-c", script], cwd=_ROOT, check=False)
        assert died.returncode == -signal.SIGKILL
        [left] = names(cache)
        assert left.startswith(".tiny-")
        folder = prepare(str(source), cache, nothing)
        assert names(cache) == [folder.name]

    def test_what_a_user_has_put_in_its_place_is_left_alone(self, cache: Path) -> None:
        theirs = cache / "SmolLM2-135M-Instruct"
        theirs.mkdir(parents=True)
        (theirs / "model.safetensors").write_bytes(b"theirs")
        with pytest.raises(ModelRefused, match=r"SmolLM2-135M-Instruct was not written by a conversion"):
            prepare(None, cache, nothing)
        assert weights(theirs) == b"theirs"
        assert names(cache) == [theirs.name]


def checkpoint(folder: Path, config: Any = None, *files: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {}))
    for file in files:
        (folder / file).touch()
    return folder


class TestFolder:
    def test_it_is_read_where_it_is(self, tmp_path: Path, cache: Path) -> None:
        folder = checkpoint(tmp_path / "mine", {"architectures": ["GPT2LMHeadModel"]}, "tokenizer.json", "a.safetensors")
        assert prepare(str(folder), cache, nothing) == folder
        assert not cache.exists()

    @pytest.mark.parametrize(
        ("config", "files", "reason"),
        [
            (None, ("a.safetensors",), "mine has no tokenizer.json"),
            (None, ("tokenizer.json",), "mine has no *.safetensors"),
            (
                {"architectures": ["BertForMaskedLM"]},
                ("tokenizer.json", "a.safetensors"),
                "mine is a BertForMaskedLM, which is no causal language model",
            ),
        ],
    )
    def test_what_is_missing_or_no_language_model_is_named(
        self, config: Any, files: tuple[str, ...], reason: str, tmp_path: Path, cache: Path
    ) -> None:
        with pytest.raises(ModelRefused) as refused:
            prepare(str(checkpoint(tmp_path / "mine", config, *files)), cache, nothing)
        assert refused.value.message == reason

    def test_without_a_config(self, tmp_path: Path, cache: Path) -> None:
        with pytest.raises(ModelRefused, match=r"has no config\.json"):
            prepare(str(tmp_path), cache, nothing)


class TestNoModel:
    @pytest.mark.parametrize("model", ["nothing", "./nothing", "/no/such/folder", "~/nothing", "a/b/c"])
    def test_neither_here_nor_the_name_of_one_on_the_hub(self, model: str, cache: Path) -> None:
        with pytest.raises(ModelRefused) as refused:
            prepare(model, cache, nothing)
        assert refused.value.message == f"there is no folder or file {model}"

    def test_a_file_of_another_kind(self, tmp_path: Path, cache: Path) -> None:
        (tmp_path / "model.onnx").touch()
        with pytest.raises(ModelRefused, match=r"model\.onnx is neither a folder nor a \.gguf file"):
            prepare(str(tmp_path / "model.onnx"), cache, nothing)

    def test_the_package_with_the_default_model_is_not_installed(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_manager, "_EMBEDDED", ("no_such_package", "a.gguf", "a"))
        with pytest.raises(ModelRefused, match="no_such_package with the default model is not installed; run `uv sync`"):
            prepare(None, cache, nothing)

    def test_the_hub_does_not_give_it(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ModelRefused, match=r"someone/something is no local folder, and the hub doesn't give it: \S"):
            prepare("someone/something", cache, nothing)


class TestInAProcessOfItsOwn:
    @pytest.fixture
    def stop(self) -> Iterator[Wakeup]:
        wakeup = Wakeup()
        yield wakeup
        wakeup.close()

    def test_a_relative_name_is_relative_to_where_the_user_stands(
        self, source: Path, cache: Path, stop: Wakeup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(source.parent)
        told: list[str] = []
        folder = prepare_model(source.name, Path(cache.name), told.append, stop)
        assert folder.parent == cache
        assert told[-1] == "converting the weights: 100%"

    def test_its_refusal_is_ours(self, cache: Path, stop: Wakeup) -> None:
        with pytest.raises(ModelRefused) as refused:
            prepare_model("nothing", cache, nothing, stop)
        assert refused.value.message == "there is no folder or file nothing"

    def test_its_crash_is_a_refusal_with_the_last_words(self, source: Path, tmp_path: Path, stop: Wakeup) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ModelRefused, match=r"preparing the model failed: .*Error.*file"):
            prepare_model(str(source), tmp_path / "file", nothing, stop)

    def test_it_ends_when_asked_to_stop(self, source: Path, cache: Path, stop: Wakeup) -> None:
        with pytest.raises(Stopped):
            prepare_model(str(source), cache, lambda _: stop.set(), stop)
