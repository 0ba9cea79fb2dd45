"""Start and end of the service: what is told, how it stops, and with which exit code."""

import asyncio
import contextlib
import os
import shlex
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
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

import main
from connections import Connection
from llm.engine_state import EngineStatus
from llm.exceptions import ModelRefused
from server import Server, listen, url_of
from tests.unit.engine_for_tests import ScriptedEngine

ROOT = Path(__file__).parents[2]
ASKED = {"prompt": "one two"}


@dataclass
class Told:
    lines: list[str] = field(default_factory=list)
    spoke: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, text: str) -> None:
        self.lines.append(text)
        self.spoke.set()

    async def until(self, part: str) -> str:
        async with asyncio.timeout(5):
            while True:
                for line in self.lines:
                    if part in line:
                        return line
                self.spoke.clear()
                await self.spoke.wait()


@dataclass
class Running:
    url: str
    task: asyncio.Task[int]
    told: Told

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        if not self.task.done():
            os.kill(os.getpid(), number)

    async def exit_code(self, seconds: float) -> int:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self.task)


@asynccontextmanager
async def serving(app: FastAPI, drain_seconds: float = 30.0) -> AsyncIterator[Running]:
    """The real server on a free port in this very process: its signal handlers are there until it has ended."""
    listener = listen("127.0.0.1", 0)
    told = Told()
    server = Server(
        app, app.state.services, listener, drain_seconds=drain_seconds, max_connections=4, say=told.say, hurry=lambda: None
    )
    running = Running(url_of(listener), asyncio.create_task(server.run(time.monotonic())), told)
    try:
        yield running
    finally:
        while not running.task.done():
            running.signal()
            await asyncio.wait((running.task,), timeout=0.2)
        listener.close()


async def test_idle_it_ends_at_once_though_connections_are_open(app: FastAPI, engine: ScriptedEngine) -> None:
    async with serving(app) as running, httpx.AsyncClient(base_url=running.url) as client:
        await running.told.until("serving")
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
    async with serving(app) as running, httpx.AsyncClient(base_url=running.url) as client:
        await running.told.until("serving")
        batch = asyncio.create_task(client.post("/basic_generate", json=ASKED))
        await engine.begin(0, "")
        feeding = asyncio.create_task(engine.begin(1, "a"))
        async with client.stream("POST", "/generate_stream", json=ASKED) as stream:
            await feeding
            pass_on = stream.aiter_text()
            assert '"a"' in await anext(pass_on)
            running.signal(number)
            await asyncio.wait_for(engine.draining.wait(), 0.1)
            assert (await client.get("/ready")).status_code == 503
            refused = await client.post("/generate", json={"prompts": ["x"]})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            await asyncio.sleep(0.3)  # uvicorn looks at its flag every 0.1 s: a listener told to close would be closed now
            async with httpx.AsyncClient(base_url=running.url) as newcomer:
                assert (await newcomer.get("/health")).status_code == 200
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
        serving(app, drain_seconds=0.2 if signals == 1 else 30) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        await running.told.until("serving")
        sending = asyncio.create_task(client.post("/generate_stream", json=ASKED))
        await engine.begin(0, "a")
        running.signal()
        await asyncio.wait_for(engine.draining.wait(), 5)
        if signals == 2:
            running.signal()
        assert await running.exit_code(2) == 0
        body = (await sending).text
        assert '"a"' in body
        assert 'event: error\ndata: {"error": {"code": "draining"' in body


async def test_a_reader_that_reads_nothing_does_not_hold_it_up(app: FastAPI, engine: ScriptedEngine) -> None:
    engine.hold = True
    async with serving(app, drain_seconds=0.1) as running:
        await running.told.until("serving")
        host, port = running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        body = b'{"prompt": "a"}'
        writer.write(b"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await engine.begin(0, "a" * 20_000_000)
        running.signal()
        assert await running.exit_code(2) == 0
        writer.close()


async def test_one_connection_too_many_is_closed_and_the_others_live(app: FastAPI, engine: ScriptedEngine) -> None:
    async with serving(app) as running, httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.get("/health")).status_code == 200
        host, port = running.url.removeprefix("http://").split(":")
        others = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(others[3][0].read(), 5) == b""
        assert (await client.get("/health")).status_code == 200
        others[0][1].close()
        await others[0][1].wait_closed()
        assert (await client.get("/health")).status_code == 200
        for _, writer in others[1:]:
            writer.close()


async def test_a_head_that_never_ends_is_not_waited_for(app: FastAPI) -> None:
    config = uvicorn.Config(app, log_config=None)
    loop = asyncio.get_running_loop()
    state = ServerState()
    server = await loop.create_server(
        lambda: Connection(most=4, head_seconds=0.05, config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nx-slow: ")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert state.connections == set()


async def test_while_the_model_loads_the_listener_is_open_and_it_can_be_stopped(
    app: FastAPI, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.loaded = asyncio.Event()
    engine.become(EngineStatus.LOADING, "reading the weights")
    async with serving(app) as running, httpx.AsyncClient(base_url=running.url) as client:
        await running.told.until("reading the weights")
        refused = await client.post("/generate_stream", json=ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert refused.headers["content-type"] == "application/json"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        running.signal()
        assert await running.exit_code(2) == 0
    assert "can't" not in caplog.text


async def test_each_step_of_the_load_is_told_then_how_to_ask(app: FastAPI, engine: ScriptedEngine) -> None:
    engine.loaded = asyncio.Event()
    engine.become(EngineStatus.LOADING, "reading the weights")
    async with serving(app) as running:
        await running.told.until("reading the weights")
        engine.become(EngineStatus.LOADING, "probing")
        await running.told.until("probing")
        engine.become(EngineStatus.READY)
        engine.loaded.set()
        curl = await running.told.until("curl")
        assert [line[:1] for line in running.told.lines] == ["[", "[", "[", "c"]
        assert running.url in running.told.lines[2]
        assert f"curl -s {running.url}/basic_generate -H 'content-type: application/json' -d '" in curl
        answer = await asyncio.to_thread(subprocess.run, shlex.split(curl), capture_output=True, check=True)
        assert answer.stdout == b'{"generated_text":" The capital of France is"}'


async def test_a_load_that_fails_is_told_and_ends_with_1(
    app: FastAPI, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.load_error = ModelRefused("the weights are cut off")
    async with serving(app) as running:
        assert await running.exit_code(3) == 1
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "the model can't be served: the weights are cut off"
    ]


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


def test_where_all_addresses_are_listened_at_the_url_is_one_to_paste() -> None:
    with listen("0.0.0.0", 0) as listener:  # noqa: S104 - for a moment, and nothing answers
        assert url_of(listener).startswith("http://127.0.0.1:")


def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    with listen("::1", 0) as listener:
        assert url_of(listener).startswith("http://[::1]:")


async def test_requests_that_vllm_answers_are_waited_for_too(app: FastAPI, vllm: ScriptedEngine) -> None:
    vllm.hold, vllm.refusal = True, None
    async with serving(app) as running, httpx.AsyncClient(base_url=running.url) as client:
        await running.told.until("serving")
        asking = asyncio.create_task(client.post("/generate_vllm", json={"prompts": ["one"]}))
        await vllm.begin(0, "a")
        running.signal()
        await asyncio.wait_for(vllm.draining.wait(), 1)
        await asyncio.sleep(0.3)  # uvicorn looks at its flag every 0.1 s: a listener told to close would be closed now
        async with httpx.AsyncClient(base_url=running.url) as newcomer:
            refused = await newcomer.post("/generate_vllm", json={"prompts": ["x"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        vllm.running[0].finish("b")
        assert (await asking).json() == {"generated_texts": ["ab"]}
        assert await running.exit_code(2) == 0


async def test_what_vllm_has_not_answered_by_the_grace_s_end_gets_its_error(app: FastAPI, vllm: ScriptedEngine) -> None:
    vllm.hold, vllm.refusal = True, None
    async with serving(app, drain_seconds=0.1) as running, httpx.AsyncClient(base_url=running.url) as client:
        await running.told.until("serving")
        asking = asyncio.create_task(client.post("/generate_vllm", json={"prompts": ["one"]}))
        await vllm.begin(0, "a")
        running.signal()
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert await running.exit_code(2) == 0
