"""The README's made parts are up to date, and nothing in it that could be run escapes being run."""

import re

from endpoints import router
from scripts.readme import README, agrees, blocks, stable, with_outputs, with_table
from settings import settings_table

TEXT = README.read_text()


def test_the_settings_table_is_that_of_the_settings() -> None:
    assert settings_table() in TEXT
    assert with_table(TEXT) == TEXT


def test_every_block_says_what_it_is() -> None:
    """console: run by a test. sh: needs Docker, which no test has. Without a word: a drawing, in which nothing is run."""
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in fences} == {"console", "sh", ""}
    for kind, content in fences:
        if kind == "sh":
            assert all(line.startswith("docker ") for line in content.splitlines())
        if kind == "":
            assert not re.search(r"\b(curl|uv|python|pip) ", content)


def test_every_endpoint_is_shown() -> None:
    asked = {path for block in blocks(TEXT) for command in block for path in re.findall(r":8000(/\w+)", command.text)}
    offered = {getattr(route, "path", "") for route in router.routes}
    assert offered <= asked


def test_every_command_shows_what_comes_back() -> None:
    silent = re.compile(r"&$|^kill |uv run pytest$")
    for block in blocks(TEXT):
        for command in block:
            assert command.output or silent.search(command.text), command.text


def test_written_outputs_are_read_back() -> None:
    made = [[f"out {i} {j}" for j, _ in enumerate(block)] for i, block in enumerate(blocks(TEXT))]
    written = with_outputs(TEXT, made)
    assert [[command.output for command in block] for block in blocks(written)] == made
    assert [[command.text for command in block] for block in blocks(written)] == [
        [command.text for command in block] for block in blocks(TEXT)
    ]


def test_what_changes_from_run_to_run_is_not_compared() -> None:
    assert agrees('{"seed":7,"x":-0.5}', '{"seed":123,"x":1.5e-7}')
    assert agrees("…\n[  0.1 s] loading", "noise\n[ 12.0 s] loading")
    assert agrees("…\n[ 1.0 s] 25%\n[ 1.1 s] 100%\nready", "[ 7.0 s] 100%\nready")
    assert agrees('data: {"token": "a"}\n\ndata: {"token": "b"}\n\nevent: done', 'data: {"token": "ab"}\n\nevent: done')
    assert agrees('{"reason":"died","worker_pid":null}', '{"reason":"it died","worker_pid":7}')
    assert stable("torch 2.14.0+cu130") == stable("torch 2.15.1")


def test_what_does_not_change_is_compared() -> None:
    assert not agrees('{"seed":7}', '{"sead":7}')
    assert not agrees("one line", "one line\nand another")
    assert not agrees("…\nsecond\nfirst", "first\nsecond")
    assert not agrees('{"generated_text":" Paris."}', '{"generated_text":" London."}')
    assert not agrees('data: {"token": "a"}', 'event: error\ndata: {"error": "a"}')
