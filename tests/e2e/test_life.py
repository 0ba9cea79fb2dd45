"""A request's life and the process's, from outside: who leaves, what is killed, how the service ends."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.e2e.server_for_tests import Server, joined, serving

LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}


def gone(family: list[psutil.Process], seconds: float) -> bool:
    """Ended within the time; whether whoever inherits an orphan here has looked at its exit code is not our matter."""
    deadline = time.monotonic() + seconds
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_who_leaves_is_forgotten_within_a_step(server: Server) -> None:
    handles = server.handles()
    for _ in range(10):
        with server.stream("leaves after an event", **LONG) as events:
            next(events)
        server.wait_idle(1)
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/basic_generate", json={"prompt": "leaves unread", **LONG}, timeout=0.1)
        server.wait_idle(1)
    assert '"status": 499' in server.log.read_text() or " 499" in server.log.read_text()
    server.wait(lambda: server.handles() <= handles, 2)


def test_a_killed_worker_costs_no_stream_a_token(tiny: Path, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": f"number {i}", "max_tokens": 150, "ignore_eos": True, "temperature": float(i % 2), "seed": i}
        for i in range(6)
    ]
    with serving(tiny, tmp_path, "--dtype", "float32") as server:
        expected = [server.text(**body) for body in bodies]
        fifth = threading.Event()

        def read(body: dict[str, Any]) -> str:
            pieces = []
            with server.stream(**body) as events:
                for _, data in events:
                    pieces.append(data["token"])
                    if len(pieces) == 5:
                        fifth.set()
            return "".join(pieces)

        with ThreadPoolExecutor(8) as pool:
            for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL):
                fifth.clear()
                texts = [pool.submit(read, body) for body in bodies]
                assert fifth.wait(30)
                os.kill(server.health()["worker_pid"], number)
                late = pool.submit(server.text, **bodies[0])
                assert server.client.get("/health").status_code == 200
                assert [text.result(60) for text in texts] == expected
                assert late.result(60) == expected[0]
        server.wait_idle()
        assert server.health()["restarts"] == 3
        assert server.client.get("/ready").status_code == 200


def test_sigterm_lets_eight_streams_finish(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path, "--max-num-seqs", "8") as server, ThreadPoolExecutor(8) as pool:
        started = threading.Barrier(9)

        def read() -> list[str]:
            with server.stream("drains", details=True, **LONG) as events:
                kinds = [next(events)[0]]
                started.wait(30)
                return [*kinds, *(event for event, _ in events)]

        streams = [pool.submit(read) for _ in range(8)]
        started.wait(30)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 0.5
        while server.client.get("/ready").status_code != 503:
            assert time.monotonic() < deadline
        refused = server.post("/basic_generate", {"prompt": "late"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert all(stream.result(60)[-1] == "done" for stream in streams)
        assert server.process.wait(3) == 0


@pytest.mark.parametrize("grace", [True, False])
def test_the_graces_end_or_a_second_sigterm_ends_at_once(tiny: Path, tmp_path: Path, grace: bool) -> None:
    with serving(tiny, tmp_path, "--drain-seconds", "1" if grace else "30", "--max-model-len", "1024") as server:
        with server.stream("runs too long", **LONG) as events:
            next(events)
            os.kill(server.health()["worker_pid"], signal.SIGSTOP)  # so that it can't finish in time
            server.process.send_signal(signal.SIGTERM)
            if not grace:
                time.sleep(0.1)  # two signals at once would be one
                server.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            *_, (event, data) = events
        assert event == "error"
        assert data["error"]["code"] == "draining"
        assert server.process.wait(3) == 0
        assert time.monotonic() - began < 2 + grace


def test_a_text_that_is_being_tokenized_holds_nobody_up_who_ends_at_once(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path) as server, ThreadPoolExecutor(1) as pool:
        family = server.family()
        busy = psutil.Process(server.process.pid)
        before = busy.cpu_times().user
        asked = pool.submit(server.post, "/tokenize", {"prompt": "a b " * 7_000_000})
        server.wait(lambda: busy.cpu_times().user > before + 1.5, 30)
        for _ in range(2):
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert server.process.wait(5) == 0
        assert time.monotonic() - began < 2
        assert gone(family, 1)
        assert asked.exception() is not None, "it was over before"


def test_sigterm_when_idle_and_when_loading(tiny: Path, tmp_path: Path) -> None:
    for wait in (True, False):
        with serving(tiny, tmp_path, wait=wait) as server:
            if not wait:
                server.wait_answered("/ready", 503)
                refused = server.post("/basic_generate", {"prompt": "early"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
            family = server.family()
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(5) == 0
            assert time.monotonic() - began < 2
            assert gone(family, 1)


def test_a_killed_api_process_leaves_no_process_behind(tiny: Path, tmp_path: Path) -> None:
    for wait in (True, False):
        with serving(tiny, tmp_path, wait=wait) as server:
            if not wait:
                server.wait_family(3)
            family = server.family()
            server.process.kill()
            server.process.wait(2)
            assert gone(family, 2)


def test_a_worker_that_can_not_come_back_is_told_as_such(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with serving(folder, tmp_path, "--max-restarts", "1") as server:
        with server.stream("has begun", **LONG) as events:
            next(events)
            (folder / "model.safetensors").unlink()
            os.kill(server.health()["worker_pid"], signal.SIGKILL)
            *_, (event, data) = events
        assert (event, data["error"]["code"]) == ("error", "engine_dead")
        assert server.client.get("/health").status_code == 500
        assert server.client.get("/ready").status_code == 503
        refused = server.post("/basic_generate", {"prompt": "late"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")


def test_a_full_queue_refuses_at_once_and_counts_exactly(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path, "--max-num-seqs", "1", "--max-queue", "2") as server, ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            streams = [server.stream("takes long", **LONG) for _ in range(3)]
            first = streams[0].__enter__()
            next(first)
            others = [pool.submit(stream.__enter__) for stream in streams[1:]]
            server.wait(lambda: server.health()["waiting"] == 2, 10)
            for _ in range(3):
                began = time.monotonic()
                refused = server.post("/basic_generate", {"prompt": "one too many"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
                assert int(refused.headers["retry-after"]) >= 1
                assert time.monotonic() - began < 0.2
            streams[0].__exit__()
            for other, stream in zip(others, streams[1:], strict=True):
                other.result(60)
                stream.__exit__()
            server.wait_idle()
            refused = server.post("/generate", {"prompts": ["x"] * 10})
            assert refused.status_code == 429
            assert server.text("fits", max_tokens=2) is not None
        late = server.post("/basic_generate", {"prompt": "x", "timeout": 0.05, **LONG})
        assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")


def test_a_huge_prompt_stops_nobody_else(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        huge = [
            pool.submit(server.post, "/basic_generate", {"prompt": text}) for text in ("a b " * 1_250_000, "word " * 200_000)
        ]
        slowest = 0.0
        while not all(request.done() for request in huge):
            began = time.monotonic()
            server.health()
            slowest = max(slowest, time.monotonic() - began)
        assert [request.result().status_code for request in huge] == [400, 400]
        assert slowest < 0.3


def test_one_tokenizer_serves_many_at_once(server: Server) -> None:
    texts = ["x " * (i % 97) + "é日🙂" for i in range(500)]
    alone = [server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in texts[:97]]
    with ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(lambda text: server.post("/tokenize", {"prompt": text}).json()["tokens"], texts))
    assert crowd == [alone[i % 97] for i in range(500)]


def test_a_stream_says_what_the_batch_says(server: Server) -> None:
    for seed in range(60):
        body: dict[str, Any] = {"prompt": "émigré 日本語 🙂", "max_tokens": 64, "temperature": 1, "seed": seed}
        whole = server.text(**body)
        with server.stream(**body) as events:
            pieces = [data["token"] for _, data in events]
        assert "".join(pieces) == whole
        for piece in pieces:
            piece.encode()
            assert "\ufffd" not in piece or "\ufffd" in whole
    with server.stream("a", max_tokens=3) as events:
        assert joined(events) == server.text("a", max_tokens=3)


def test_the_api_process_stays_small_and_loads_no_tensor_library(server: Server) -> None:
    with server.stream("A stream", max_tokens=20) as events:
        assert joined(events)
    assert server.post("/tokenize", {"prompt": "some words"}).status_code == 200
    process = psutil.Process(server.process.pid)
    mapped = {Path(region.path).name.split(".")[0] for region in process.memory_maps()}
    assert "tokenizers" in mapped
    assert not mapped & {"libtorch", "libtorch_cpu", "libtorch_python", "_multiarray_umath"}
    assert process.memory_info().rss < 200e6
