"""What the image would run starts outside Docker, too: its files, its environment, its command, its health check."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.image_for_tests import command, environment, health_command, lay_out


def test_the_images_command_serves_and_its_health_check_sees_it(tmp_path: Path) -> None:
    lay_out(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paths = {name: str(tmp_path / "cache") for name in ("QUARTET_MODEL_CACHE", "HF_HOME")}
    env = os.environ | environment() | paths | {"QUARTET_PORT": str(port), "PATH": os.environ["PATH"]}
    python = [sys.executable]

    def healthy() -> bool:
        check = python + health_command()[1:]
        return subprocess.run(check, env=env, cwd=tmp_path, capture_output=True, check=False, timeout=30).returncode == 0

    assert command()[0] == health_command()[0] == "python"
    assert not healthy()
    with subprocess.Popen(python + command()[1:], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            deadline = time.monotonic() + 30
            while not healthy():
                assert time.monotonic() < deadline
                assert server.poll() is None
        finally:
            server.send_signal(signal.SIGTERM)
        _, told = server.communicate(timeout=30)
    assert server.returncode == 0, told
