"""Start and end of the service: what is told, how it stops, and with which exit code."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import main
from llm.engine_state import EngineStatus
from llm.exceptions import ModelRefused
from server import Server, listen, url_of
from tests.unit.engine_for_tests import ScriptedEngine

ROOT = Path(__file__).parents[2]
ASKED = {"prompt": "one two"}


@dataclass
class Running:
    url: str
    task: asyncio.Task[int]
    told: list[str] = field(default_factory=list)
    spoke: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, text: str) -> None:
        self.told.append(text)
        self.spoke.set()

    async def until_told(self, part: str) -> str:
        async with asyncio.timeout(5):
            while True:
                for line in self.told:
                    if part in line:
                        return line
                self.spoke.clear()
                await self.spoke.wait()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        if not self.task.done():
            os.kill(os.getpid(), number)

    async def exit_code(self, seconds: float) -> int:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self.task)


@asynccontextmanager
async def serving(app: FastAPI, engine: ScriptedEngine, drain_seconds: float = 30.0) -> AsyncIterator[Running]:
    """The real server on a free port in this very process: its signal handlers are there until it has ended."""
    listener = listen("127.0.0.1", 0)
    told: list[Running] = []
    server = Server(app, engine, listener, drain_seconds=drain_seconds, say=lambda text: told[0].say(text))
    running = Running(url_of(listener), asyncio.create_task(server.run(time.monotonic())))
    told.append(running)
    try:
        yield running
    finally:
        while not running.task.done():
            running.signal()
            await asyncio.wait((running.task,), timeout=0.2)
        listener.close()


async def test_idle_it_ends_at_once_though_connections_are_open(app: FastAPI, engine: ScriptedEngine) -> None:
    async with serving(app, engine) as running, httpx.AsyncClient(base_url=running.url) as client:
        await running.until_told("serving")
        assert (await client.get("/ready")).status_code == 200
        began = time.monotonic()
        running.signal()
        assert await running.exit_code(2) == 0
        assert time.monotonic() - began < 1
        assert engine.closed
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_running_requests_finish_while_new_ones_are_refused(
    app: FastAPI, engine: ScriptedEngine, number: signal.Signals
) -> None:
    engine.hold = True
    async with serving(app, engine) as running, httpx.AsyncClient(base_url=running.url) as client:
        await running.until_told("serving")
        batch = asyncio.create_task(client.post("/basic_generate", json=ASKED))
        await engine.begin(0, "")
        feeding = asyncio.create_task(engine.begin(1, "a"))
        async with client.stream("POST", "/generate_stream", json=ASKED) as stream:
            await feeding
            pass_on = stream.aiter_text()
            assert '"a"' in await anext(pass_on)
            running.signal(number)
            async with asyncio.timeout(0.5):
                while (await client.get("/ready")).status_code == 200:
                    await asyncio.sleep(0)
            refused = await client.post("/generate", json={"prompts": ["x"]})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await client.get("/health")).status_code == 200
            engine.running[1].finish("b")
            rest = "".join([text async for text in pass_on])
            assert '"b"' in rest
            assert "error" not in rest
        assert not running.task.done()
        engine.running[0].finish("c")
        assert (await batch).json() == {"generated_text": "c"}
        assert await running.exit_code(1) == 0


@pytest.mark.parametrize("signals", [1, 2])
async def test_what_outlasts_the_grace_or_a_second_signal_gets_its_error(
    app: FastAPI, engine: ScriptedEngine, signals: int
) -> None:
    engine.hold = True
    async with (
        serving(app, engine, drain_seconds=0.2 if signals == 1 else 30) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        await running.until_told("serving")
        sending = asyncio.create_task(client.post("/generate_stream", json=ASKED))
        await engine.begin(0, "a")
        while engine.status.status is not EngineStatus.DRAINING:
            running.signal()
            await asyncio.sleep(0.02)
        if signals == 2:
            running.signal()
        assert await running.exit_code(2) == 0
        body = (await sending).text
        assert '"a"' in body
        assert 'event: error\ndata: {"error": {"code": "draining"' in body


async def test_a_reader_that_reads_nothing_does_not_hold_it_up(app: FastAPI, engine: ScriptedEngine) -> None:
    engine.hold = True
    async with serving(app, engine, drain_seconds=0.1) as running:
        await running.until_told("serving")
        host, port = running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        body = b'{"prompt": "a"}'
        head = f"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await engine.begin(0, "a" * 20_000_000)
        running.signal()
        assert await running.exit_code(2) == 0
        writer.close()


async def test_while_the_model_loads_the_listener_is_open_and_it_can_be_stopped(app: FastAPI, engine: ScriptedEngine) -> None:
    engine.loaded = asyncio.Event()
    engine.become(EngineStatus.LOADING, "reading the weights")
    async with serving(app, engine) as running, httpx.AsyncClient(base_url=running.url) as client:
        await running.until_told("reading the weights")
        refused = await client.post("/generate_stream", json=ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert refused.headers["content-type"] == "application/json"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        running.signal()
        assert await running.exit_code(2) == 0
        assert not any("can't" in line for line in running.told)


async def test_each_step_of_the_load_is_told_then_how_to_ask(app: FastAPI, engine: ScriptedEngine) -> None:
    engine.loaded = asyncio.Event()
    engine.become(EngineStatus.LOADING, "reading the weights")
    async with serving(app, engine) as running:
        await running.until_told("reading the weights")
        engine.become(EngineStatus.LOADING, "probing")
        await running.until_told("probing")
        engine.become(EngineStatus.READY)
        engine.loaded.set()
        curl = await running.until_told("curl")
        assert [line[:1] for line in running.told] == ["[", "[", "[", "c"]
        assert running.url in running.told[2]
        assert f"curl -s {running.url}/basic_generate -H 'content-type: application/json' -d '" in curl
        answer = await asyncio.to_thread(subprocess.run, curl, shell=True, capture_output=True, check=True)  # noqa: S602
        assert answer.stdout == b'{"generated_text":" The capital of France is"}'


async def test_a_load_that_fails_is_told_and_ends_with_1(app: FastAPI, engine: ScriptedEngine) -> None:
    engine.load_error = ModelRefused("the weights are cut off")
    async with serving(app, engine) as running:
        assert await running.exit_code(3) == 1
        assert running.told == ["the model can't be served: the weights are cut off"]


def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = subprocess.run(
            [sys.executable, "main.py", "--port", str(port)], capture_output=True, text=True, cwd=ROOT, timeout=30, check=False
        )
    assert ran.returncode == 1
    assert ran.stdout == ""
    [sentence] = ran.stderr.splitlines()
    assert str(port) in sentence


def test_two_services_can_not_take_the_same_port() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])


def test_on_windows_it_says_where_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main.main([]) == 1
    [sentence] = capsys.readouterr().err.splitlines()
    assert "WSL2" in sentence
    assert "Docker" in sentence


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")]
)  # noqa: S104, E501
def test_the_url_is_one_to_paste(host: str, url: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    with listen(host, 0) as listener:
        assert url_of(listener).startswith(url)
