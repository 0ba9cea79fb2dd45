"""Dockerfile and compose.yml, as far as they can be proven without Docker.

`scripts/check` runs hadolint over the one and the compose specification's JSON schema over the other.
"""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from settings import Settings
from tests.image_for_tests import ROOT, command, copied, environment, health_command, instructions, last_arguments, lay_out


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return listed.stdout.splitlines()


def services() -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load((ROOT / "compose.yml").read_text())
    return dict(told["services"])


def test_all_that_is_copied_is_in_the_repository() -> None:
    files = tracked()
    for source, _ in copied():
        assert any(fnmatch.fnmatch(file, source) or file.startswith(f"{source}/") for file in files), source


def test_what_is_copied_reaches_the_build() -> None:
    """The ignore file lets through what it names, and nothing else."""
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source for source, _ in copied()} == allowed


def test_the_image_holds_every_package_that_the_service_is_made_of(tmp_path: Path) -> None:
    lay_out(tmp_path)
    packages = {Path(file).parts[0] for file in tracked() if file.endswith("__init__.py")} - {"tests", "bench", "scripts"}
    assert packages <= {path.name for path in tmp_path.iterdir()}
    ran = subprocess.run(
        [sys.executable, *command()[1:], "--help"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert "--max-num-seqs" in ran.stdout
    script = "import app, containers, server, llm.llm, llm.model_preparation"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)


def test_the_image_runs_as_nobody_in_particular_and_writes_only_its_volume() -> None:
    user, _, group = last_arguments("USER").partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert environment()["QUARTET_MODEL_CACHE"] == last_arguments("VOLUME")
    assert environment()["HF_HOME"].startswith(last_arguments("VOLUME"))


def test_the_image_listens_where_it_says() -> None:
    assert environment()["QUARTET_HOST"] == "0.0.0.0"  # noqa: S104 - inside the container
    assert environment()["QUARTET_PORT"] == last_arguments("EXPOSE")
    assert "/health" in health_command()[-1]
    names = {name.removeprefix("QUARTET_").lower() for name in environment() if name.startswith("QUARTET_")}
    assert names <= set(Settings.model_fields)


def test_packages_are_compiled_and_uv_is_pinned() -> None:
    told = dict(instructions())
    assert "UV_COMPILE_BYTECODE=1" in " ".join(arguments for name, arguments in instructions() if name == "ENV")
    assert re.search(r"pip install .*uv==[0-9.]+", " ".join(arguments for name, arguments in instructions() if name == "RUN"))
    assert told["FROM"] == "python:3.11-slim"


def test_no_address_but_this_machine_is_named() -> None:
    for name in ("Dockerfile", "compose.yml", "deploy/install"):
        assert set(re.findall(r"https?://([^/:'\" ]+)", (ROOT / name).read_text())) <= {"127.0.0.1"}


def test_compose_asks_for_a_gpu_unless_the_cpu_is_meant() -> None:
    gpu, cpu = services()["quartet"], services()["quartet-cpu"]
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert "profiles" not in gpu
    assert cpu["profiles"] == ["cpu"]
    assert "deploy" not in cpu
    assert (gpu["build"]["args"]["VARIANT"], cpu["build"]["args"]["VARIANT"]) == ("cuda", "cpu")
    known = {arguments.partition("=")[0] for name, arguments in instructions() if name == "ARG"}
    for service in (gpu, cpu):
        assert set(service["build"]["args"]) <= known


def test_compose_gives_a_stop_time_to_finish() -> None:
    for service in services().values():
        assert int(service["stop_grace_period"].removesuffix("s")) > Settings.model_fields["drain_seconds"].default + 5
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"] == ["CMD", *health_command()]
        assert service["volumes"] == [f"model_cache:{last_arguments('VOLUME')}"]


def test_compose_is_reached_from_this_machine_only_unless_asked_otherwise() -> None:
    for service in services().values():
        assert service["ports"] == ["${BIND_ADDRESS:-127.0.0.1}:${BIND_PORT:-8000}:" + last_arguments("EXPOSE")]


def test_an_unknown_variant_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    script = ["sh", str(ROOT / "deploy/install"), "tpu"]
    ran = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30)
    assert (ran.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "cpu or cuda" in ran.stderr
