"""Importing transformers, and building a model, without torch's compiler, its distributed tensors and its symbolic algebra.

They are half of the time of a start. They are asked for in passing, and nothing here uses them: decorators for functions
that are not to be compiled (nothing is), a class for building some masks (fetched when one is made), flex attention (we bring
our own), transformers' image processing, and questions about shapes that might be symbols (ours are numbers). Whatever else
is asked for, now or by a later release, brings the real modules: slower, not wrong.
"""

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

_ABSENT = (
    "is_torch_flex_attn_available",
    "is_torch_distributed_available",
    "is_torchvision_available",
    "is_vision_available",
)


def _unchanged(function: Any = None, *_: object, **__: object) -> Any:
    return function or _unchanged


def _as_it_is(known: Any) -> Any:
    return known


def _always(_: object) -> bool:
    return True


def _never(_: object) -> bool:
    return False


def _equal(one: Any, other: Any) -> bool:
    """Two numbers, or two shapes."""
    return tuple(one) == tuple(other) if isinstance(one, tuple | list) else one == other


def _all(*conditions: bool) -> bool:
    return all(conditions)


def _any(*conditions: bool) -> bool:
    return any(conditions)


class _Symbol:
    """Nothing is an instance of it."""


class _Masks:
    """For a class that transformers makes one of while it builds some masks."""

    def __new__(cls) -> Any:
        return importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op").TransformGetItemToIndex()


_STAND_INS: dict[str, dict[str, Any]] = {
    "torch._dynamo": dict.fromkeys(("disable", "allow_in_graph", "disallow_in_graph", "assume_constant_result"), _unchanged),
    "torch._dynamo._trace_wrapped_higher_order_op": {"TransformGetItemToIndex": _Masks},
    "torch._dynamo.utils": {"is_compile_supported": _never},
    "torch.fx.experimental.symbolic_shapes": {
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guarding_hint_or_throw"), _as_it_is),
        **dict.fromkeys(("guard_int", "guard_size_oblivious", "statically_known_true"), _as_it_is),
        "has_guarding_hint": _always,
        "is_nested_int": _never,
        "sym_and": _all,
        "sym_eq": _equal,
        "sym_or": _any,
    },
    "sympy": {"Basic": _Symbol},
}


class _StandIn(types.ModuleType):
    """Has what is asked for in passing. For anything else it makes way for the real module, and whoever holds it still gets
    everything from there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self).update(_STAND_INS[name])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)

    def forget(self) -> None:
        for name in _STAND_INS[self.__name__]:
            vars(self).pop(name, None)


@contextmanager
def light_imports() -> Iterator[None]:
    """For a process's only thread. Does nothing where one of the modules has been imported already."""
    if any(name in sys.modules for name in _STAND_INS):
        yield
        return
    from transformers import utils  # noqa: PLC0415 - takes seconds, for which not every importer of this module asks

    absent: dict[str, Any] = {name: lambda: False for name in _ABSENT}
    sys.modules.update({name: _StandIn(name) for name in _STAND_INS})
    try:
        with patch.multiple(utils, **absent), patch.multiple(utils.import_utils, **absent):
            yield
    finally:
        _remove_stand_ins()


def _remove_stand_ins() -> None:
    for name in _STAND_INS:
        found = sys.modules.get(name)
        if isinstance(found, _StandIn):
            del sys.modules[name]
            found.forget()
