"""The README's parts that are made, not written: the settings table, and the output under each command.

    python -m scripts.readme           writes both, the outputs from a server that it starts
    python -m scripts.readme --table   writes the table only

A ```console block holds commands, each after "$ ", and under each its output. `tests/e2e/test_readme.py` runs the same
commands and compares what doesn't change from run to run.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from settings import settings_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GET_UV = "pip install uv && "
START = GET_UV + "uv run main.py"
TESTS = GET_UV + "uv run pytest"
PORT = 8000
ANYTHING = "…"
_BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"(?<=^<!-- settings: written by scripts/readme\.py -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
_BETWEEN = "\x1e"
_START_SECONDS = 240
_COMMAND_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Command:
    text: str
    output: str  # as the README shows it, without the last line's end


def blocks(readme: str) -> list[list[Command]]:
    return [_commands(match[0]) for match in _BLOCK.finditer(readme)]


def _commands(block: str) -> list[Command]:
    pieces = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    split = (piece.partition("\n") for piece in pieces)
    return [Command(text, output.rstrip("\n")) for text, _, output in split]


def with_table(readme: str) -> str:
    return _TABLE.sub(lambda _: settings_table(), readme)


def with_outputs(readme: str, outputs: list[list[str]]) -> str:
    """The same blocks and commands, with these outputs."""
    each = iter(zip(blocks(readme), outputs, strict=True))

    def written(_: re.Match[str]) -> str:
        commands, told = next(each)
        shown = zip(commands, told, strict=True)
        return "".join(f"$ {command.text}\n" + (f"{output}\n" if output else "") for command, output in shown)

    return _BLOCK.sub(written, readme)


@dataclass(frozen=True, slots=True)
class Started:
    """A server that was started as the README says, at another port and with an empty model cache."""

    port: int
    told: str  # what it wrote until it was ready


@contextlib.contextmanager
def started() -> Iterator[Started]:
    """Raises RuntimeError where it doesn't start; at the end, where it doesn't end with 0 on SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        env = os.environ | {
            "QUARTET_PORT": str(port),
            "QUARTET_MODEL_CACHE": f"{folder}/model_cache",
            "QUARTET_LOG_FORMAT": "text",
        }
        with log.open("w") as stream:
            command = START.removeprefix(GET_UV).split()
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=stream, stderr=stream)  # noqa: S603 - our own
        try:
            yield Started(port, _wait_ready(process, log))
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        if code != 0:
            raise RuntimeError(f"the server ended with {code}:\n{log.read_text()}")


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while "curl" not in (told := log.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{told}")
        time.sleep(0.1)
    return told


def run(commands: list[Command], port: int, folder: Path) -> list[str]:
    """The outputs of one block's commands, run in one shell in `folder`, against the server at `port`."""
    script = f"\nprintf '{_BETWEEN}'\n".join(command.text for command in commands).replace(f":{PORT}", f":{port}")
    shell = ["bash", "-c", script]
    ran = subprocess.run(  # noqa: S603 - what the README says
        shell, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_COMMAND_SECONDS, check=False
    )
    return [output.strip("\n").replace(f":{port}", f":{PORT}") for output in ran.stdout.split(_BETWEEN)]


def stable(output: str) -> str:
    """What is the same at every run, on every machine of the supported kinds.

    Numbers and ids are masked, and what depends on the moment. Pieces of a stream are joined: a slow reader gets fewer.
    Of a generated text the beginning counts: number formats and kinds of CPU round differently.
    """
    output = re.sub(r'(?:^data: \{"token".*\n*)+', _joined, output, flags=re.MULTILINE)
    output = re.sub(r'("generated_texts?": ?\[?")(.{,12})[^"]*', r"\1\2", output)
    output = re.sub(r'"(reason|worker_pid)": ?("[^"]*"|null|\d+)', r'"\1":…', output)
    output = re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "ID", output)
    output = re.sub(r"b?float\d+", "FLOAT", output)
    output = re.sub(r"-?\d+(\.\d+)*(e[-+]?\d+)?(\+\w+)?", "#", output)
    return re.sub(r"[ \t]+", " ", output).strip()


def _joined(events: re.Match[str]) -> str:
    pieces = [json.loads(line.removeprefix("data: "))["token"] for line in events[0].split("\n") if line]
    return "data: " + "".join(pieces)[:12] + "\n"


def agrees(shown: str, real: str) -> bool:
    """Whether the shown lines are among the real ones, in order; where nothing is left out, they are all.

    Lines that differ in numbers only count as one: a slow machine tells its progress in other steps.
    """
    shown_lines, real_lines = ([line for line, _ in groupby(stable(text).splitlines())] for text in (shown, real))
    if ANYTHING not in shown_lines:
        return shown_lines == real_lines
    remaining = iter(real_lines)
    return all(line in remaining for line in shown_lines if line != ANYTHING)


def outputs(readme: str) -> list[list[str]]:
    found = blocks(readme)
    with started() as server, tempfile.TemporaryDirectory() as folder:
        return [
            [_progress(server)] if block[0].text == START else
            [block[0].output] if block[0].text == TESTS else
            run(block, server.port, Path(folder))
            for block in found
        ]  # fmt: skip


def _progress(server: Started) -> str:
    """From our first line on: uv says before it what it downloads."""
    lines = server.told.replace(f":{server.port}", f":{PORT}").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("["))
    return "\n".join([ANYTHING, *lines[first:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    readme = with_table(README.read_text())
    README.write_text(readme if chosen.table else with_outputs(readme, outputs(readme)))


if __name__ == "__main__":
    main()
