"""Request bodies: JSON read strictly, so that what is odd in it is a refusal and never a surprise later."""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from llm.exceptions import InvalidRequest

MAX_CONTAINERS = 100_000  # arrays and objects in one body: a hundred times the memory of their two brackets
MAX_VALUES = 2_000_000
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)', re.DOTALL)  # never looks at a byte twice


def parse_json(body: bytes) -> Any:
    """Raises JSONDecodeError also for what the library accepts or meets otherwise: bytes that aren't UTF-8, a key that
    is there twice, nesting beyond the interpreter's depth, an integer of thousands of digits, and for a body of so many
    values that reading it would hold up the event loop.

    NaN and infinities pass: the models refuse them by the field's name.
    """
    _check_size(body)
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("not UTF-8", "", error.start) from error
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # the interpreter's bound on digits
        raise json.JSONDecodeError("an integer has too many digits", "", 0) from error


def _check_size(body: bytes) -> None:
    few_strings = body.count(b'"') <= 2 * MAX_VALUES
    if few_strings and (_within_size(body) or _within_size(_STRING.sub(b"", body))):
        return
    sentence = f"more than {MAX_CONTAINERS} arrays and objects, or than {MAX_VALUES} values"
    raise json.JSONDecodeError(sentence, "", 0)


def _within_size(body: bytes) -> bool:
    return body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS and body.count(b",") <= MAX_VALUES


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise json.JSONDecodeError(f"the key {key[:100]!r} is there twice", "", 0)
            seen.add(key)
    return found


class JsonRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is JSON. A body that says it is something else is refused; one that says nothing is tried."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self.body_field is not None and kind and not (kind == "application/json" or kind.endswith("+json")):
                raise InvalidRequest("content-type", "the body must be JSON: send content-type: application/json")
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
