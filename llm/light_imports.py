"""Importing transformers, and building a model, without torch's compiler and its distributed tensors.

They are a third of the time of a start. They are asked for in passing, and nothing here uses them: decorators for functions
that are not to be compiled (nothing is), a class for building some masks (fetched when one is made), flex attention (we bring
our own). Whatever else is asked for, now or by a later release, brings the real modules: slower, not wrong.
"""

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

_ABSENT = ("is_torch_flex_attn_available", "is_torch_distributed_available")


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _unchanged(function: Any = None, *_: object, **__: object) -> Any:
    return function or _unchanged


class _Compiler(_StandIn):
    disable = allow_in_graph = disallow_in_graph = assume_constant_result = staticmethod(_unchanged)


class _Masks(_StandIn):
    class TransformGetItemToIndex:
        def __new__(cls) -> Any:
            return importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op").TransformGetItemToIndex()


_STAND_INS = {
    "torch._dynamo": _Compiler,
    "torch._dynamo._trace_wrapped_higher_order_op": _Masks,
}


@contextmanager
def light_imports() -> Iterator[None]:
    """For a process's only thread. Does nothing where one of the modules has been imported already."""
    if any(name in sys.modules for name in _STAND_INS):
        yield
        return
    from transformers import utils  # noqa: PLC0415 - takes seconds, for which not every importer of this module asks

    absent: dict[str, Any] = {name: lambda: False for name in _ABSENT}
    sys.modules.update({name: kind(name) for name, kind in _STAND_INS.items()})
    try:
        with patch.multiple(utils, **absent), patch.multiple(utils.import_utils, **absent):
            yield
    finally:
        _remove_stand_ins()


def _remove_stand_ins() -> None:
    for name, kind in _STAND_INS.items():
        if isinstance(sys.modules.get(name), kind):
            del sys.modules[name]
