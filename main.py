"""The command: parse the settings, build the app, run it, exit code.

Worker processes may import this module again, so it imports nothing heavy itself.
"""

import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from settings import Settings


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    if sys.platform == "win32":
        sys.stderr.write("Quartet needs Linux or macOS: on Windows, run it in WSL2 or Docker.\n")
        return 1
    import settings  # noqa: PLC0415 - see above

    chosen = settings.parse(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # until the server has its own
    return _serve(chosen, started)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _serve(chosen: "Settings", started: float) -> int:
    import asyncio  # noqa: PLC0415 - see above

    import logs  # noqa: PLC0415
    from app import create_app  # noqa: PLC0415
    from containers import build  # noqa: PLC0415
    from server import Server, end_process_soon, listen  # noqa: PLC0415

    log = chosen.log()
    logs.configure(log.level, log.format, "api")
    try:
        listener = listen(chosen.host, chosen.port)
    except OSError as error:
        sys.stderr.write(f"main.py: can't listen at {chosen.host} port {chosen.port}: {error.strerror or error}\n")
        return 1
    with listener:
        services = build(chosen)
        server = Server(
            create_app(services),
            services,
            listener,
            drain_seconds=chosen.drain_seconds,
            max_connections=chosen.max_connections,
            say=logs.announcer(log.format),
            hurry=end_process_soon,
        )
        return asyncio.run(server.run(started))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
