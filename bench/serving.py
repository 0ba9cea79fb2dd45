"""Starts our server for a measurement: `python main.py` on a free port, its process tree, its end."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
_START_SECONDS = 300
_END_SECONDS = 45
_POLL_SECONDS = 0.02  # adds at most this to a measured start


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: psutil.Popen
    started: float  # time.monotonic

    def get(self, path: str) -> dict[str, Any]:
        """A JSON answer, whatever its status."""
        return ask(self.url + path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return ask(self.url + path, body)

    def wait_ready(self) -> float:
        """Seconds from the start until a request would be taken. Raises RuntimeError where the process ends before."""
        while time.monotonic() < self.started + _START_SECONDS:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode} before it was ready")
            with contextlib.suppress(OSError):
                if self.get("/ready").get("status") == "ready":
                    return time.monotonic() - self.started
            time.sleep(_POLL_SECONDS)
        raise RuntimeError(f"the server was not ready within {_START_SECONDS} s")

    def worker_pid(self) -> int:
        return int(self.get("/health")["worker_pid"])


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})  # noqa: S310 - our own address
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
            text = answer.read()
    except urllib.error.HTTPError as error:
        text = error.read()
    told: dict[str, Any] = json.loads(text)
    return told


@contextlib.contextmanager
def serving(*settings: str, log: Path | None = None) -> Iterator[Server]:
    """A server with these settings, ended by SIGTERM at the end. Its log goes to `log`, or nowhere."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "main.py", "--port", str(port), "--log-format", "text", *settings]
    with open(log or os.devnull, "w") as stream:
        started = time.monotonic()
        process = psutil.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield Server(f"http://127.0.0.1:{port}", process, started)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait()
