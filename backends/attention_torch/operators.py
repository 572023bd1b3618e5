"""Attention in blocks as an operator of PyTorch's, which compilers and exports call and do not look into.

What is known of a call before its arrays travels with it as text: the `repr` of nested tuples, in which classes and
functions stand by name. A function without a name that can be imported is remembered in this process alone.
"""

from __future__ import annotations

import ast
import importlib
import types
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from attention_core import _blockwise
from attention_core._blockwise import Plan
from attention_core.masks import Slot

__all__ = ["attend", "spelled"]

PROCESS = uuid.uuid4().hex
_named: dict[str, Any] = {}  # classes and functions by the names that stand for them


def spelled(*plan: Any) -> str:
    """The fields of a `Plan` as text."""
    return repr(tuple(map(_spelled, plan)))


spelled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile runs it and does not trace it


def _spelled(part: Any) -> Any:
    if isinstance(part, Slot):
        return "slot", *part
    if isinstance(part, tuple):
        return "tuple", *map(_spelled, part)
    if part is None or isinstance(part, bool | int | float):
        return part
    importable = isinstance(part, type | types.FunctionType) and "<" not in part.__qualname__
    name = f"{part.__module__}:{part.__qualname__}" if importable else f"{PROCESS}:{id(part)}"
    _named[name] = part
    return name


def _plan(text: str) -> Plan:
    return Plan(*map(_resolved, ast.literal_eval(text)))


def _resolved(part: Any) -> Any:
    if isinstance(part, tuple):
        marker, *rest = part
        fields = map(_resolved, rest)
        return Slot(*fields) if marker == "slot" else tuple(fields)
    if not isinstance(part, str) or part in _named:
        return _named[part] if isinstance(part, str) else part
    module, _, name = part.partition(":")
    if part == "builtins:tuple":
        return tuple
    if not module.startswith("attention_core."):  # nothing else is imported because some file asks for it
        raise ValueError(f"expected masks and score modifications of attention_core in an exported program; got {part}")
    return getattr(importlib.import_module(module), name)


@torch.library.custom_op("attention_core::attend", mutates_args=())  # type: ignore[untyped-decorator]
def attend(arrays: Sequence[torch.Tensor], plan: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute output and logsumexp."""
    output, logsumexp = _blockwise.forward(_plan(plan), tuple(arrays), _backend())
    return output.contiguous(), logsumexp.contiguous()


@attend.register_fake  # type: ignore[untyped-decorator]
def _(arrays: Sequence[torch.Tensor], plan: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _blockwise.empty_results(_plan(plan), tuple(arrays), _backend())


@torch.library.custom_op("attention_core::attend_backward", mutates_args=())  # type: ignore[untyped-decorator]
def attend_backward(arrays: Sequence[torch.Tensor], results: Sequence[torch.Tensor], plan: str) -> list[torch.Tensor]:
    """Compute the gradients of the arrays of floating point, of results and their cotangents."""
    output, logsumexp, *cotangents = results
    gradients = _blockwise.backward(_plan(plan), tuple(arrays), (output, logsumexp), tuple(cotangents), _backend())
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


@attend_backward.register_fake  # type: ignore[untyped-decorator]
def _(arrays: Sequence[torch.Tensor], results: Sequence[torch.Tensor], plan: str) -> list[torch.Tensor]:
    return [
        torch.empty_like(array, memory_format=torch.contiguous_format) for array in arrays if array.is_floating_point()
    ]


def _backend() -> Any:
    from attention_torch.backend import backend  # noqa: PLC0415 (which imports this module)

    return backend
