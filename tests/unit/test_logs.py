"""Log lines as they are written, in both forms."""

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def written(form: str, level: str = "info", role: str = "api") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level, form, role, stream)
    return stream


def test_json_lines_carry_the_request_and_what_is_said_beside_the_text() -> None:
    stream = written("json")
    token = logs.request_id.set("id-1")
    logging.getLogger("some.library").info("two\nlines é", extra={"status": 200})
    logs.request_id.reset(token)
    logging.getLogger("some.library").warning("no request")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["request_id"], first["status"]) == ("two\nlines é", "id-1", 200)
    assert (first["level"], first["role"], first["logger"]) == ("info", "api", "some.library")
    assert second["request_id"] is None


def test_a_process_without_the_context_names_the_request_itself() -> None:
    stream = written("json", role="worker")
    logging.getLogger("llm.worker").error("failed", extra={"request_id": "id-2"})
    line = json.loads(stream.getvalue())
    assert (line["role"], line["request_id"]) == ("worker", "id-2")


def test_an_exception_is_one_json_line() -> None:
    stream = written("json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception("failed")
    [line] = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_any_text_can_be_logged(form: str) -> None:
    stream = written(form)
    logging.getLogger("x").info("half %s", "\ud83d")
    assert stream.getvalue().encode("utf-8").count(b"\n") == 1


def test_text_lines_end_with_the_request() -> None:
    stream = written("text")
    token = logs.request_id.set("id-3")
    logging.getLogger("x").info("hello")
    logs.request_id.reset(token)
    assert stream.getvalue().endswith("INFO    api x: hello [id-3]\n")


def test_the_level_is_the_least_that_is_written() -> None:
    stream = written("text", "warning")
    logging.getLogger("x").info("unwanted")
    logging.getLogger("x").warning("wanted")
    assert "unwanted" not in stream.getvalue()
    assert "wanted" in stream.getvalue()


def test_libraries_and_warnings_go_the_same_way() -> None:
    stream = written("json")
    logging.getLogger("uvicorn.error").error("from the server")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("from python", stacklevel=1)
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages[0] == "from the server"
    assert "from python" in messages[1]


def test_configuring_again_writes_once() -> None:
    written("json")
    stream = written("json")
    logging.getLogger("x").info("once")
    assert len(stream.getvalue().splitlines()) == 1


def test_auto_is_json_where_nobody_sits() -> None:
    assert not logs.is_text("auto", io.StringIO())
    assert logs.is_text("text", io.StringIO())


def test_a_person_is_told_in_bare_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.announcer("text")("serving at http://127.0.0.1:8000")
    assert capsys.readouterr().out == "serving at http://127.0.0.1:8000\n"
