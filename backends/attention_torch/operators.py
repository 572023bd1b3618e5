"""Operations with a gradient of their own as operators of PyTorch's, which compilers and exports do not look into.

The functions of an operation, and what is known of a call before its arrays, travel with it as text: the `repr` of
nested tuples, in which classes and functions stand by name. A function without a name that can be imported is
remembered in this process alone.
"""

from __future__ import annotations

import ast
import functools
import importlib
import types
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch.library import custom_op

from attention_core.backend import Operation

__all__ = ["attend", "remember", "spelled"]

PROCESS = uuid.uuid4().hex
_named: dict[str, Any] = {}  # classes and functions by the names that stand for them


def spelled(*recipe: Any) -> str:
    """The fields of an `Operation`, the class of a plan, and its fields, as text: compilers hand on plain values."""
    return repr(tuple(map(_spelled, recipe)))


spelled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile runs it and does not trace it


def _spelled(part: Any) -> Any:
    if isinstance(part, tuple):
        return _spelled(type(part)), *map(_spelled, part)
    if part is None or isinstance(part, bool | int | float):
        return part
    importable = isinstance(part, type | types.FunctionType) and "<" not in part.__qualname__
    name = f"{part.__module__}:{part.__qualname__}" if importable else f"{PROCESS}:{id(part)}"
    _named[name] = part
    return name


@functools.lru_cache(maxsize=256)
def _recipe(text: str) -> tuple[Operation, Any]:
    fields = list(map(_resolved, ast.literal_eval(text)))
    count = len(Operation._fields)
    return Operation(*fields[:count]), fields[count](*fields[count + 1 :])


def _resolved(part: Any) -> Any:
    if isinstance(part, tuple):
        kind, *fields = map(_resolved, part)
        return tuple(fields) if kind is tuple else kind(*fields)
    if not isinstance(part, str) or part in _named:
        return _named[part] if isinstance(part, str) else part
    module, _, name = part.partition(":")
    if part == "builtins:tuple":
        return tuple
    if not module.startswith("attention_core."):  # nothing else is imported because some file asks for it
        raise ValueError(f"expected masks and score modifications of attention_core in an exported program; got {part}")
    return getattr(importlib.import_module(module), name)


@custom_op("attention_core::attend", mutates_args=())  # type: ignore[untyped-decorator]
def attend(arrays: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
    """Compute the results of an operation."""
    operation, plan = _recipe(text)
    return [result.contiguous() for result in operation.forward(plan, tuple(arrays), _backend())]


@attend.register_fake  # type: ignore[untyped-decorator]
def _(arrays: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
    operation, plan = _recipe(text)
    return list(operation.empty(plan, tuple(arrays), _backend()))


@custom_op("attention_core::attend_backward", mutates_args=())  # type: ignore[untyped-decorator]
def attend_backward(arrays: Sequence[torch.Tensor], results: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
    """Compute the gradients of the arrays of floating point, of results and their cotangents."""
    operation, plan = _recipe(text)
    middle = len(results) // 2
    ends = tuple(results[:middle]), tuple(results[middle:])
    gradients = operation.backward(plan, tuple(arrays), *ends, _backend())
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


@attend_backward.register_fake  # type: ignore[untyped-decorator]
def _(arrays: Sequence[torch.Tensor], results: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
    return [
        torch.empty_like(array, memory_format=torch.contiguous_format) for array in arrays if array.is_floating_point()
    ]


@custom_op("attention_core::remember", mutates_args=())  # type: ignore[untyped-decorator]
def remember(x: torch.Tensor) -> torch.Tensor:
    """Copy what is written over before going backward: a clone, compilers would take once more, and too late."""
    return x.clone()


@remember.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backend() -> Any:
    from attention_torch.backend import backend  # noqa: PLC0415 (which imports this module)

    return backend
