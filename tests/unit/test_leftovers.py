"""A test that leaves a process or a thread behind fails, and no other test is blamed for it."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.leftovers import MARK, Leftovers

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
PARENT = [sys.executable, "-c", f"import subprocess; p = subprocess.Popen({SLEEPER!r}); print(p.pid, flush=True); input()"]


@pytest.fixture
def leftovers() -> Leftovers:
    return Leftovers("a mark of this test", patience=0.1)


@contextmanager
def sleeper(*, env: dict[str, str] | None = None) -> Iterator[int]:
    with subprocess.Popen(SLEEPER, env=env) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_process_that_a_test_leaves_is_named_once(leftovers: Leftovers) -> None:
    with sleeper() as pid:
        [left] = leftovers.of_test()
        assert left.startswith(f"process {pid}: ")
        assert leftovers.of_test() == []


def test_a_process_of_a_process_counts_too(leftovers: Leftovers) -> None:
    with subprocess.Popen(PARENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        left = leftovers.of_test()
        assert {line.partition(":")[0] for line in left} == {f"process {parent.pid}", f"process {child}"}
        subprocess.run(["kill", str(child)], check=True)
        parent.communicate("\n")


def test_a_process_that_is_about_to_end_is_waited_for() -> None:
    patient = Leftovers("a mark of this test", patience=30.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert patient.of_test() == []


def test_a_thread_that_a_test_leaves_is_named(leftovers: Leftovers) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    thread.start()
    assert leftovers.of_test() == ["thread forgotten"]
    done.set()
    thread.join()


def test_daemon_threads_keep_nobody_from_ending(leftovers: Leftovers) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    assert leftovers.of_test() == []
    done.set()
    thread.join()


def test_what_a_fixture_of_a_wider_scope_starts_is_nobodys_fault(leftovers: Leftovers) -> None:
    with leftovers.wider_setup():
        parent = subprocess.Popen(PARENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        pool = ThreadPoolExecutor(1)
    with parent, pool:
        assert parent.stdout is not None
        child = parent.stdout.readline()  # started later, by the fixture's process
        pool.submit(time.monotonic).result()
        assert leftovers.of_test() == []
        subprocess.run(["kill", child.strip()], check=True)
        parent.communicate("\n")


def test_a_pool_of_a_test_is_named(leftovers: Leftovers) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="forgotten") as pool:
        pool.submit(time.monotonic).result()
        assert leftovers.of_test() == ["thread forgotten_0"]


def test_at_the_end_of_the_session_an_orphan_is_found(leftovers: Leftovers) -> None:
    """Its parent has ended: it is nobody's child any more."""
    script = f"import subprocess; print(subprocess.Popen({SLEEPER!r}, stdout=subprocess.DEVNULL).pid)"
    env = {MARK: "a mark of this test"}
    parent = subprocess.run([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True, check=True)
    orphan = parent.stdout.strip()
    assert leftovers.of_test() == []
    assert any(line.startswith(f"process {orphan}: ") for line in leftovers.of_session())
    subprocess.run(["kill", orphan], check=True)


def test_looking_is_cheap(leftovers: Leftovers) -> None:
    """It is done after each test."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        leftovers.of_test()
        times.append(time.perf_counter() - began)
    assert min(times) < 0.02
