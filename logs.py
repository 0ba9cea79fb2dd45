"""The one logging configuration, of every process: text or JSON lines, each with the id of the request it belongs to."""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TextIO

FORMATS = ("auto", "text", "json")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

# What every record has; anything else came by `extra=` and is told as well.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "color_message", "taskName"}


def configure(level: str, format: str, role: str, stream: TextIO | None = None) -> None:
    """Everything any library logs in this process goes to `stream` (standard error) in one form.

    level: a name of the logging module, in any case. format: "text", "json", or "auto": text on a terminal.
    role: which process this is ("api", "worker"), in every line. A process without the request's context, as the
    worker, says `extra={"request_id": ...}`.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_TextFormatter(role) if is_text(format, stream) else _JsonFormatter(role))
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel(max(logging.WARNING, root.level))  # its progress is told in our words


def is_text(format: str, stream: TextIO) -> bool:
    return format == "text" or (format == "auto" and stream.isatty())


def announcer(format: str) -> Callable[[str], None]:
    """How a person at the terminal is told something: a bare line on standard output, or a log line among the others."""
    if is_text(format, sys.stderr):
        return _write_line
    return logging.getLogger("quartet").info


def _write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _add_request_id(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = request_id.get()
    return True


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class _TextFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {role} %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        own = getattr(record, "request_id", None)
        return _encodable(f"{text} [{own}]" if own else text)


class _JsonFormatter(logging.Formatter):
    """One line each: time (UTC), level, role, logger, request_id, message, what `extra=` gave, exception."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "request_id": getattr(record, "request_id", None),
            "message": record.getMessage(),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _USUAL)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # all ASCII: any text can be written
