"""Attention whose sequence is shared by ranks, checked as any other: on every rank, with the same arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attention_conformance.run.finding import Finding
from attention_conformance.run.subjects import check_subject
from attention_conformance.subjects.subject import Subject
from attention_core import Causal, KeyLengths, Shards, SlidingWindow, shard, unshard
from attention_core.backend import array_namespace, on_device_of

__all__ = ["check_sharded", "whole_of"]

AttentionFunction = Callable[..., Any]
BY_POSITION = Causal, KeyLengths, SlidingWindow
"""Masks that hold nothing of the queries."""


def check_sharded(subject: Subject, shards: Shards, **asked: Any) -> list[Finding]:
    """Check an attention of which each rank holds a part of the sequence.

    Each rank calls this, in a group that it has started, and gets the same findings. The subject's function takes the
    rows of its rank, as `attention_core.shard` cuts them, and a keyword ``shards``. That has the group, the split, and
    the length without padding. A mask is over the whole, and a bias has the rows of this rank. The function returns
    the output of its rows. Gradients are those of PyTorch.

    Parameters
    ----------
    subject : Subject
    shards : Shards
        The group, and how rows are split; lengths are those of the cases.
    **asked
        As in `check_subject`.

    Returns
    -------
    list of Finding
        Cases with other numbers of queries than keys are refused, unless ranks share out both evenly.

    Raises
    ------
    ValueError
        As in `check_subject`.
    """
    axis = (subject.layout or "BHSD").index("S") - len(subject.layout or "BHSD")
    return check_subject(replace(subject, function=whole_of(subject.function, shards, axis=axis)), **asked)


def whole_of(attention: AttentionFunction, shards: Shards, /, *, axis: int = -2) -> AttentionFunction:
    """An attention of shards as one of whole arrays, which are the same on all ranks, as the result is."""

    def whole(query: Any, key: Any, value: Any, /, **options: Any) -> Any:
        if options.pop("return_weights", False):
            raise NotImplementedError("weights are not returned of shards")
        tools, rows = _Tools(query), query.shape[axis]
        told = _told(shards, query, key, axis)
        is_merged = shards.strategy == "merge"
        bias = options.get("bias")
        has_rows = bias is not None and len(bias.shape) > 1 and bias.shape[-2] > 1
        if told.length not in (None, rows) and not is_merged:
            fill = told.length - rows
            query, options["mask"] = _padded(query, axis, fill), _padded_mask(options.get("mask"), rows, fill)
            bias = _padded(bias, -2, fill) if has_rows else bias
        if bias is not None:
            options["bias"] = tools.cut(bias, told, -2) if has_rows and not is_merged else tools.same(bias, told)
        if options.get("sinks") is not None:
            options["sinks"] = tools.same(options["sinks"], told)
        parts = [tools.cut(x, told, axis) for x in (key, value)]
        result = attention(query if is_merged else tools.cut(query, told, axis), *parts, shards=told, **options)
        if is_merged:
            return result
        outputs = result if isinstance(result, tuple) else (result,)
        axes = (axis if x is None or len(x.shape) == len(query.shape) else -1 for x in outputs)
        found = [
            None if x is None else tools.join(x, told, at)[(..., slice(rows), *(slice(None),) * (-at - 1))]
            for x, at in zip(outputs, axes, strict=True)
        ]
        if not isinstance(result, tuple):
            return found[0]
        return type(result)(*found) if hasattr(result, "_fields") else tuple(found)

    signature = inspect.signature(attention)
    parameters = [each for name, each in signature.parameters.items() if name != "shards"]
    whole.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    whole.__name__ = getattr(attention, "__name__", "attention")
    return whole


def _told(shards: Shards, query: Any, key: Any, axis: int) -> Shards:
    """The shards of arrays of these lengths.

    Raises
    ------
    NotImplementedError
        When keys would have to be padded to the queries, or few queries to all keys, or there is nothing to share.
    """
    rows, columns = query.shape[axis], key.shape[axis]
    if not (rows and columns):
        raise NotImplementedError("there is no position to share")
    if shards.strategy == "merge" or rows == columns:
        return shards._replace(length=columns)
    told = shards._replace(length=None)
    if any(unshard(shard(x, told, axis=axis), told, axis=axis).shape[axis] != x.shape[axis] for x in (query, key)):
        if not columns / 16 < rows < columns:
            raise NotImplementedError(f"{rows} queries and {columns} keys are not shared out evenly")
        return shards._replace(length=columns)
    return told


def _padded(x: Any, axis: int, count: int) -> Any:
    """An array with so many zeros behind it."""
    xp = array_namespace(x)
    dims = list(x.shape)
    dims[axis] = count
    return xp.concat([x, xp.zeros(tuple(dims), dtype=x.dtype, **on_device_of(x))], axis=axis)


def _padded_mask(mask: Any, rows: int, count: int) -> Any:
    """A mask for more queries, which see no key of an array."""
    if mask is None or isinstance(mask, BY_POSITION):
        return mask
    if hasattr(mask, "shape"):
        return _padded(mask, -2, count) if len(mask.shape) > 1 and mask.shape[-2] == rows else mask
    raise NotImplementedError(f"a {type(mask).__name__} for fewer queries than keys")


class _Tools:
    """Cutting and joining arrays that all ranks hold alike, with gradients where PyTorch wants them."""

    def __init__(self, like: Any) -> None:
        self._functions = _differentiated() if type(like).__module__.partition(".")[0] == "torch" else None

    def cut(self, x: Any, shards: Shards, axis: int) -> Any:
        """The rows of this rank; the gradient is that of all rows."""
        return self._functions[0].apply(x, shards, axis) if self._functions else shard(x, shards, axis=axis)

    def join(self, x: Any, shards: Shards, axis: int) -> Any:
        """All rows; the gradient is that of the rows of this rank, as all ranks have the same loss."""
        return self._functions[1].apply(x, shards, axis) if self._functions else unshard(x, shards, axis=axis)

    def same(self, x: Any, shards: Shards) -> Any:
        """What all ranks use; the gradient is the sum of their parts."""
        return self._functions[2].apply(x, shards) if self._functions else x


@functools.cache
def _differentiated() -> tuple[Any, Any, Any]:
    torch = importlib.import_module("torch")

    class Cut(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(context: Any, x: Any, shards: Shards, axis: int) -> Any:
            context.told = shards._replace(length=x.shape[axis]), axis
            return shard(x, shards, axis=axis).clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            shards, axis = context.told
            return unshard(gradient.contiguous(), shards, axis=axis), None, None

    class Join(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(context: Any, x: Any, shards: Shards, axis: int) -> Any:
            context.told = shards, axis
            return unshard(x.contiguous(), shards, axis=axis)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            shards, axis = context.told
            return shard(gradient, shards, axis=axis), None, None

    class Same(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(context: Any, x: Any, shards: Shards) -> Any:
            context.group = shards.group
            return x.view_as(x)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            total = gradient.contiguous().clone()
            torch.distributed.all_reduce(total, group=context.group)
            return total, None

    return Cut, Join, Same
