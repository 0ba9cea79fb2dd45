"""Settings: complete, bounded, told by name when wrong, and each of them of use."""

import re
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ByteSize, ValidationError

from resources import cpu_budget, memory_limit
from settings import Settings, parse, settings_table

NAMES_OTHERS_RELY_ON = {
    "--host": "127.0.0.1",
    "--port": 8000,
    "--model": None,
    "--dtype": "auto",
    "--max-num-seqs": 4,
    "--max-queue": 256,
    "--max-model-len": None,
    "--kv-cache-bytes": None,
    "--memory-budget": None,
    "--max-models": None,
    "--catalogue": None,
    "--image-root": None,
    "--max-body-bytes": 32 * 2**20,
    "--drain-seconds": 30.0,
    "--threads": None,
    "--batch-invariant": True,
}


def test_names_and_defaults_others_rely_on() -> None:
    chosen = parse([])
    for flag, default in NAMES_OTHERS_RELY_ON.items():
        assert getattr(chosen, flag.removeprefix("--").replace("-", "_")) == default


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_help_and_every_number_a_unit_and_bounds(name: str) -> None:
    field = Settings.model_fields[name]
    about = field.json_schema_extra
    assert isinstance(about, dict)
    assert about["help"]
    kinds = {kind for kind in (int, float, ByteSize) if kind.__name__ in re.findall(r"\w+", str(field.annotation))}
    if kinds and field.annotation is not bool:
        bounds = [type(bound) for bound in field.metadata]
        assert about["unit"]
        assert {Ge, Gt} & set(bounds)
        assert {Le, Lt} & set(bounds)
    if field.default is None:
        assert about["shown"]


def test_the_command_line_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_PORT", "9001")
    monkeypatch.setenv("QUARTET_MAX_QUEUE", "7")
    chosen = parse(["--port", "9002"])
    assert (chosen.port, chosen.max_queue) == (9002, 7)


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2 * 2**30), ("500MB", 500_000_000), ("1048576", 2**20)])
def test_sizes_take_units(text: str, size: int) -> None:
    assert parse(["--kv-cache-bytes", text]).engine().kv_cache_bytes == size


@pytest.mark.parametrize(("word", "value"), [("off", False), ("on", True), ("false", False), ("1", True)])
def test_switches_take_words(word: str, value: bool) -> None:
    assert parse(["--batch-invariant", word]).batch_invariant is value


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temprature", "1"], "--temprature"),
        (["--max-num", "1"], "--max-num"),
        (["--port", "99999"], "--port"),
        (["--port", "x"], "QUARTET_PORT"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--drain-seconds", "nan"], "--drain-seconds"),
        (["--drain-seconds", "inf"], "--drain-seconds"),
        (["--dtype", "int8"], "--dtype"),
        (["--device", "tpu"], "--device"),
        (["--kv-cache-bytes", "lots"], "--kv-cache-bytes"),
        (["surplus"], "surplus"),
    ],
)
def test_what_is_wrong_is_named_and_ends_with_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert named in told.splitlines()[-1]
    assert "Traceback" not in told


@pytest.mark.parametrize(("name", "value"), [("QUARTET_PROT", "1"), ("quartet_foo", "1"), ("QUARTET_PORT", "none")])
def test_a_typo_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        parse([])
    assert ended.value.code == 2
    assert name in capsys.readouterr().err


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')} " in told


OTHERS: dict[str, Any] = {
    "host": "0.0.0.0",  # noqa: S104 - never listened at
    "model": "other",
    "model_cache": "elsewhere",
    "dtype": "float16",
    "device": "cuda:1",
    "batch_invariant": False,
    "vllm_on_cpu": True,
    "log_level": "debug",
    "log_format": "json",
    "log_prompts": True,
    "vllm_gpu_memory_fraction": 0.5,
    "memory_budget": 2**30,
    "kv_cache_bytes": 2**25,
    "max_body_bytes": 2**20,
    "tokenizer_threads": 33,
    "catalogue": Path("models.json"),
    "image_root": Path("pictures"),
}


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_reaches_a_part(name: str) -> None:
    usual, changed = parse([]), Settings(**{name: OTHERS.get(name, 77)})
    parts = [(one.http(), one.log(), one.engine(), one.vllm(), one.models()) for one in (usual, changed)]
    assert parts[0] != parts[1]


def test_defaults_follow_what_this_machine_may_use() -> None:
    config = parse([]).engine()
    assert config.threads == cpu_budget()
    assert config.tokenizer_threads == min(4, cpu_budget())
    assert config.kv_cache_limit == int(0.25 * int(0.7 * memory_limit()))
    assert parse(["--memory-budget", "1GiB"]).engine().kv_cache_limit == 2**28


def test_settings_do_not_change() -> None:
    chosen = parse([])
    with pytest.raises(ValidationError):
        chosen.port = 1


def test_the_table_names_every_setting_and_no_machine() -> None:
    table = settings_table()
    assert table == settings_table()
    assert len(table.splitlines()) == 2 + len(Settings.model_fields)
    assert "| `--threads` | the CPU quota | threads |" in table
    assert "| `--max-body-bytes` | 32MiB | bytes |" in table
    assert "None" not in table
