"""Runs the model manager in a process of its own: reading and converting a checkpoint takes memory that should return."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from llm.channel import Stopped, Wakeup, wait_readable
from llm.exceptions import ModelRefused
from llm.worker_entry import PARENT_PID

_ROOT = Path(__file__).parent.parent


def prepare_model(model: str | None, cache: Path, report: Callable[[str], None], stop: Wakeup) -> Path:
    """The folder of a checkpoint that a worker can load (`llm/model_manager.py`). Blocks; `report` gets its progress.

    Raises ModelRefused with the reason, or Stopped.
    """
    command = [sys.executable, "-m", "llm.model_manager", "--cache", str(cache.resolve())]
    if model is not None:
        # A relative folder is relative to where the user stands, not to where our code is.
        command += ["--model", str(Path(model).resolve()) if Path(model).exists() else model]
    with subprocess.Popen(  # noqa: S603 - no shell, our own command
        command,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {PARENT_PID: str(os.getpid())},
    ) as child:
        try:
            lines = _follow(child, report, stop)
        finally:
            child.kill()
    answers = dict(line.split(": ", 1) for line in lines if line.startswith(("folder: ", "refused: ")))
    if "folder" in answers:
        return Path(answers["folder"])
    raise ModelRefused(answers.get("refused") or f"preparing the model failed: {lines[-1] if lines else 'no reason given'}")


def _follow(child: "subprocess.Popen[bytes]", report: Callable[[str], None], stop: Wakeup) -> list[str]:
    """All lines that the child has written when it ends."""
    assert child.stdout is not None  # noqa: S101 - asked for above
    fd, text, lines = child.stdout.fileno(), b"", list[str]()
    while True:
        if stop.fileno() in wait_readable((fd, stop.fileno()), math.inf):
            raise Stopped
        piece = os.read(fd, 1 << 16)
        text += piece
        *whole, text = text.split(b"\n")
        for line in (part.decode(errors="replace") for part in whole):
            lines.append(line)
            if line.startswith("progress: "):
                report(line.removeprefix("progress: "))
        if not piece:
            child.wait()
            return [line for line in [*lines, text.decode(errors="replace")] if line.strip()]
