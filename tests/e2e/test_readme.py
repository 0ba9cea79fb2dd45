"""Every command in the README does what the README shows."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.readme import README, ROOT, START, TESTS, Command, Started, agrees, blocks, run, started

BLOCKS = blocks(README.read_text())
OWN = {START, TESTS}  # the server that is asked, and this very run


@pytest.fixture(scope="module")
def server() -> Iterator[Started]:
    with started() as running:
        yield running


def test_the_two_commands_of_a_fresh_machine_come_first() -> None:
    assert [[command.text for command in block] for block in BLOCKS[:2]] == [[START], [TESTS]]
    assert Path(__file__).is_relative_to(ROOT / "tests")


def test_a_start_shows_what_it_does_and_then_what_to_paste(server: Started) -> None:
    [[shown], *_] = BLOCKS
    assert agrees(shown.output, server.told), server.told
    [curl] = [line for line in server.told.splitlines() if line.startswith("curl")]
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "Paris" in answer


@pytest.mark.parametrize("block", [block for block in BLOCKS if block[0].text not in OWN], ids=lambda block: block[0].text[:80])
def test_a_command_gives_what_is_shown(block: list[Command], server: Started, tmp_path: Path) -> None:
    real = run(block, server.port, tmp_path)
    for command, output in zip(block, real, strict=True):
        assert agrees(command.output, output), f"{command.text}\nshown: {command.output}\nreal:  {output}"
    if any('"seed"' in command.text for command in block):
        assert run(block, server.port, tmp_path) == real
