"""The Dockerfile read as what it says: its instructions, the files it copies, its environment, its commands."""

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def instructions() -> Iterator[tuple[str, str]]:
    """(name, arguments) in order; lines that go on are joined, comments are left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, arguments = line.strip().partition(" ")
            yield name, arguments.strip()


def last_stage() -> list[tuple[str, str]]:
    whole = list(instructions())
    last = max(i for i, (name, _) in enumerate(whole) if name == "FROM")
    return whole[last:]


def last_arguments(name: str) -> str:
    return [arguments for found, arguments in last_stage() if found == name][-1]


def command() -> list[str]:
    words: list[str] = json.loads(last_arguments("CMD"))
    return words


def health_command() -> list[str]:
    words: list[str] = json.loads(last_arguments("HEALTHCHECK").partition("CMD")[2])
    return words


def environment() -> dict[str, str]:
    pairs = [word for name, arguments in last_stage() if name == "ENV" for word in shlex.split(arguments)]
    return dict(pair.split("=", 1) for pair in pairs)


def copied() -> Iterator[tuple[str, str]]:
    """(source pattern, target) of what comes from the repository, all stages."""
    for name, arguments in instructions():
        if name == "COPY" and "--from" not in arguments:
            *sources, target = arguments.split()
            yield from ((source, target) for source in sources)


def lay_out(folder: Path) -> None:
    """The last stage's files from the repository, as the image has them in its working folder."""
    for name, arguments in last_stage():
        if name == "COPY" and "--from" not in arguments:
            *sources, target = arguments.split()
            for path in (found for source in sources for found in sorted(ROOT.glob(source))):
                if path.is_dir():
                    shutil.copytree(path, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(path, folder / target)
