"""A real server in a process of its own, and what a client does with it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
START_SECONDS = 120
Json = dict[str, Any]


@dataclass
class Server:
    process: "subprocess.Popen[bytes]"
    client: httpx.Client
    log: Path

    def health(self) -> Json:
        answer = self.client.get("/health")
        assert answer.status_code == 200
        state: Json = answer.json()
        return state

    def post(self, path: str, body: Json) -> httpx.Response:
        return self.client.post(path, json=body)

    def text(self, prompt: str, **parameters: Any) -> str:
        answer = self.post("/basic_generate", {"prompt": prompt, **parameters})
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["generated_text"]
        return text

    def stream(self, prompt: str, **parameters: Any) -> "Stream":
        return Stream(self.client, {"prompt": prompt, **parameters})

    def wait_ready(self) -> None:
        self.wait_answered("/ready", 200)

    def wait_answered(self, path: str, status: int) -> None:
        self.wait(lambda: self.client.get(path).status_code == status, START_SECONDS)

    def wait_family(self, count: int) -> None:
        self.wait(lambda: len(self.family()) >= count, START_SECONDS)

    def wait_idle(self, seconds: float = 5) -> None:
        """Until nothing runs, waits or holds a block."""
        self.wait(lambda: not any(self.health()[name] for name in ("running", "waiting", "used_blocks")), seconds)

    def wait_running(self, count: int) -> None:
        self.wait(lambda: self.health()["running"] == count, 10)

    def handles(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def family(self) -> list[psutil.Process]:
        api = psutil.Process(self.process.pid)
        return [api, *api.children(recursive=True)]

    def wait(self, holds: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.TransportError):
                if holds():
                    return
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Stream:
    """Server-sent events of /generate_stream, read as they come."""

    def __init__(self, client: httpx.Client, body: Json) -> None:
        self._context = client.stream("POST", "/generate_stream", json=body, timeout=120)

    def __enter__(self) -> Iterator[tuple[str, Json]]:
        self.response = self._context.__enter__()
        assert self.response.status_code == 200, self.response.read()
        return self._events()

    def __exit__(self, *_: object) -> None:
        self._context.__exit__(None, None, None)

    def _events(self) -> Iterator[tuple[str, Json]]:
        event = "message"
        for line in self.response.iter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield event, json.loads(line.removeprefix("data: "))
                event = "message"


def joined(events: Iterator[tuple[str, Json]]) -> str:
    return "".join(data["token"] for event, data in events if event == "message")


@contextlib.contextmanager
def serving(model: Path, folder: Path, *settings: str, wait: bool = True) -> Iterator[Server]:
    """Ends the server by SIGTERM if the test has not, and expects exit code 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / f"server-{port}.log"
    command = [sys.executable, "main.py", "--port", str(port), "--model", str(model), "--model-cache", str(folder), *settings]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUARTET_")}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with (
        log.open("wb") as file,
        subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits) as client,
    ):
        server = Server(process, client, log)
        try:
            if wait:
                server.wait_ready()
            yield server
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(15) == 0, log.read_text()
        finally:
            process.kill()
