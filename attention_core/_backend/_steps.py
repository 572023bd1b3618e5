"""Public functions that `torch.compile` may take as one step of its program, however it met them first."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, TypeVar

from attention_core._backend._find import get_backend
from attention_core._keywords import untraced

Function = TypeVar("Function", bound=Callable[..., Any])

STEPS: dict[str, tuple[Any, Any]] = {}
"""The functions by name, each with a copy that Dynamo reads as it stands."""

_read: dict[str, Callable[..., Any]] = {}


def may_be_step(function: Function) -> Function:
    """Let Dynamo read, in the place of a function, what the backend of PyTorch says with `read_as`.

    A first call under `torch.compile` loads that backend, as to read all of one attention takes a third of a second.
    """
    marked: Any = function
    name = marked.__name__
    copy = types.FunctionType(marked.__code__, marked.__globals__, name, marked.__defaults__, marked.__closure__)

    def first(*arguments: Any, **options: Any) -> Any:
        _load()
        return _read.get(name, copy)(*arguments, **options)

    STEPS[name], marked._torchdynamo_inline = (function, copy), first
    return function


@untraced
def _load() -> None:
    with contextlib.suppress(ImportError, ValueError):  # then the function itself is read
        get_backend("torch")


def read_as(name: str, function: Callable[..., Any]) -> None:
    """Let Dynamo read this function in the place of the public one of a name."""
    _read[name] = function
