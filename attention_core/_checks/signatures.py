"""What remembers that arguments were checked: their signature, of types, shapes, dtypes, devices and options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import fields
from fractions import Fraction
from numbers import Real
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from .._backend import is_compiling, is_of_eager_type, registered_name
from .arguments import is_flag

Checked = TypeVar("Checked")
_PLAIN = frozenset((bool, int, float, Fraction, str, type(None), ModuleType))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_MAX_SIGNATURES = 1024
_FACTS = ("shape", "dtype", "device", "committed", "layout")  # of an array, so far as its class has them
_fact_getters: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def once_per_signature(check: Callable[..., Checked]) -> Callable[..., Checked]:
    """Let arguments be checked once for each signature: types, shapes, dtypes, devices and options.

    ``check(array=..., **arguments)`` raises what is wrong, from these facts alone, and returns what it found out. The
    first argument is an array. For the same signature, what it returned is returned again, without a check. Nothing
    is remembered while a function is traced.
    """
    known: dict[Any, Checked] = {}

    @functools.wraps(check)
    def checked(**arguments: Any) -> Checked:
        signature = None if is_compiling(next(iter(arguments.values()))) else _signature(arguments.values())
        if signature is None:
            return check(**arguments)
        key = (*arguments, signature)  # by name: callers give different options
        result = known.get(key)
        if result is None:
            result = check(**arguments)
            remember(known, key, result, most=_MAX_SIGNATURES)
        return result

    return checked


def remember(known: dict[Any, Any], key: Any, value: Any, *, most: int) -> None:
    """Keep a value by its key, and drop the oldest of more than so many; other threads may do so at the same time."""
    while len(known) >= most:
        known.pop(next(iter(tuple(known)), None), None)
    known[key] = value


def _signature(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """What checks may look at, to be compared; ``None`` where something is traced, or not known to be static."""
    parts = list(values)
    kinds = tuple(map(type, parts))  # 1, 1.0 and True are equal, and not the same
    for index, kind in enumerate(kinds):
        if kind in _PLAIN:
            continue
        part, getter = parts[index], _fact_getters.get(kind)
        if getter is not None:  # of an array, which if it is nested has no shape
            facts = None if getattr(part, "is_nested", False) else getter(part)
        else:
            facts = _signature(part) if isinstance(part, tuple) else _facts(part, kind)
        if facts is None:
            return None
        parts[index] = facts
    return kinds, tuple(parts)


def _facts(value: Any, kind: Any) -> Any:
    """What checks may look at of a value that is no plain number, text or module."""
    if hasattr(value, "dtype"):
        if isinstance(value, Real) or is_flag(value):  # a number of NumPy
            return value
        if not is_of_eager_type(value) or getattr(value, "is_nested", False):
            return None
        _fact_getters[kind] = attrgetter(*(name for name in _FACTS if hasattr(value, name)))
        return _fact_getters[kind](value)
    if kind in _FUNCTIONS:
        return getattr(value, "__code__", None)
    return _signature([getattr(value, field.name) for field in fields(kind)]) if registered_name(kind) else None
