"""Attention whose sequence is shared by ranks, checked as any other: on every rank, with the same arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attention_conformance.launch.subject import Subject
from attention_conformance.measure.finding import Finding
from attention_conformance.run.kernels import check_subject
from attention_core import Causal, KeyLengths, Shards, SlidingWindow, shard, unshard
from attention_core.backend import array_namespace, get_backend, on_device_of
from attention_core.scores import ScoreMod

AttentionFunction = Callable[..., Any]
Move = Callable[..., Any]
Axes = tuple[int | None, ...]
MASKS = "mask", "attn_mask"
BY_POSITION = Causal, KeyLengths, SlidingWindow
"""Masks that hold nothing of the queries."""


def check_sharded(subject: Subject, shards: Shards, **asked: Any) -> list[Finding]:
    """Check an attention of which each rank holds a part of the sequence.

    Each rank calls this, in a group that it has started, and gets the same results. The kernel's function takes the
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
        rows, even = query.shape[axis], _evenly(shards, query, key, axis)
        is_merged = shards.strategy == "merge"
        named = {"query": query, "key": key, "value": value}
        named |= {name: options[name] for name in ("bias", "sinks") if options.get(name) is not None}
        mod = options.get("score_mod")
        of_mod = mod.arrays if isinstance(mod, ScoreMod) else ()
        named |= {f"score_mod {index}": array for index, array in enumerate(of_mod)}
        axes: dict[str, int | None] = {**dict.fromkeys(named), "query": axis, "key": axis, "value": axis, "bias": -2}
        if "bias" in named and (len(named["bias"].shape) < 2 or named["bias"].shape[-2] == 1):
            axes["bias"] = None
        if is_merged:
            axes |= {"query": None, "bias": None}
        elif even.length not in (None, rows):
            fill = even.length - rows
            options |= {name: _padded_mask(options[name], rows, fill) for name in MASKS if name in options}
            rows_of = {"query": axis} | ({"bias": -2} if "bias" in named and axes["bias"] else {})
            named |= {name: _padded(named[name], at, fill) for name, at in rows_of.items()}
        parts = dict(
            zip(
                named,
                _moved(shard, unshard, tuple(named.values()), even, tuple(axes[name] for name in named)),
                strict=True,
            )
        )
        if isinstance(mod, ScoreMod):
            shared = tuple(parts.pop(f"score_mod {index}") for index in range(len(of_mod)))
            options["score_mod"] = ScoreMod(mod.function, shared, mod.num_heads)
        arrays = [parts.pop(name) for name in ("query", "key", "value")]
        result = attention(*arrays, shards=even, **options | parts)
        if is_merged:
            return result
        outputs = result if isinstance(result, tuple) else (result,)
        ends = [axis if len(x.shape) == len(query.shape) else -1 for x in outputs if x is not None]
        joined = _moved(unshard, shard, tuple(x for x in outputs if x is not None), even, tuple(ends))
        wholes = iter([x[(..., slice(rows), *(slice(None),) * (-at - 1))] for x, at in zip(joined, ends, strict=True)])
        results: list[Any] = [None if x is None else next(wholes) for x in outputs]
        if not isinstance(result, tuple):
            return results[0]
        return type(result)(*results) if hasattr(result, "_fields") else tuple(results)

    signature = inspect.signature(attention)
    parameters = [each for name, each in signature.parameters.items() if name != "shards"]
    whole.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    whole.__name__ = getattr(attention, "__name__", "attention")
    return whole


def _evenly(shards: Shards, query: Any, key: Any, axis: int) -> Shards:
    """The shards of arrays of these lengths.

    Raise NotImplementedError when keys would have to be padded to the queries, or few queries to all keys, or there is
    nothing to share.
    """
    rows, columns = query.shape[axis], key.shape[axis]
    if not (rows and columns):
        raise NotImplementedError("there is no position to share")
    if shards.strategy == "merge" or rows == columns:
        return shards._replace(length=columns)
    even = shards._replace(length=None)
    if any(unshard(shard(x, even, axis=axis), even, axis=axis).shape[axis] != x.shape[axis] for x in (query, key)):
        if not columns / 16 < rows < columns:
            raise NotImplementedError(f"{rows} queries and {columns} keys are not shared out evenly")
        return shards._replace(length=columns)
    return even


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


def _moved(there: Move, back: Move, arrays: tuple[Any, ...], shards: Shards, axes: Axes) -> tuple[Any, ...]:
    """The arrays, those with an axis cut or joined along it. Gradients of PyTorch go back by the inverse.

    Of what is cut, they are those of all ranks. Of what is joined, they are those of this rank, as all have the same
    loss.
    """
    if type(arrays[0]).__module__ == "torch":
        return _step().apply(there, back, shards, axes, *arrays)  # type: ignore[no-any-return]
    return tuple(x if at is None else there(x, shards, axis=at) for x, at in zip(arrays, axes, strict=True))


@functools.cache
def _step() -> Any:
    """A move as one step of PyTorch: all ranks have to take the same steps in the same order."""
    torch: Any = importlib.import_module("torch")
    lent: Any = get_backend("torch").collectives

    class Step(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, there: Move, back: Move, shards: Shards, axes: Axes, *arrays: Any) -> Any:
            context.move = back, shards, axes
            moved = (x if at is None else there(x, shards, axis=at) for x, at in zip(arrays, axes, strict=True))
            return tuple(x.clone() for x in moved)

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            back, shards, axes = context.move

            def moved(gradient: Any, at: int | None) -> Any:
                if gradient is None or at is not None:
                    return None if gradient is None else back(gradient, shards, axis=at)
                return lent.total(gradient, lent.name_of(shards.group))

            return None, None, None, None, *map(moved, gradients, axes)

    return Step
