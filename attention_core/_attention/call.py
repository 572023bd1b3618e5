"""One call of attention as its implementations receive it, and the steps that all of them share."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from attention_core._arrays import (
    Array,
    Namespace,
    compute_dtype_name,
    dtype_name,
    on_device_of,
    positions,
    shape,
    upcast,
)
from attention_core._backend import Backend
from attention_core.masks import Mask, Positions
from attention_core.random import Dropout, kept_at


class Attention(NamedTuple):
    """Result of attention, with what was asked for beside the output; the rest is ``None``."""

    output: Array
    weights: Array | None = None
    logsumexp: Array | None = None


class Call(NamedTuple):
    """The arguments of a call, checked.

    Attributes
    ----------
    query, key, value : Array, shapes (..., H, M, D), (..., G, N, D) and (..., G, N, E)
    xp : array namespace
    backend : Backend
        Of the library of the arrays.
    mask : Mask or Array of bool or None
    bias : Array or None
    scale, softcap : float or Array or None
    score_mod : callable or None
    dropout : Dropout or None
    starts : tuple of int or Array
        Positions of the first query and of the first key.
    arithmetic : {"fast", "reproducible"}
    """

    query: Array
    key: Array
    value: Array
    xp: Namespace
    backend: Backend
    mask: Mask | Array | None = None
    bias: Array | None = None
    scale: float | Array | None = None
    softcap: float | Array | None = None
    score_mod: Callable[..., Array] | None = None
    dropout: Dropout | None = None
    starts: tuple[Any, Any] = (0, 0)
    arithmetic: str = "fast"


def upcast_call(call: Call) -> Call:
    """The call with 16-bit arrays in the type of the computation, float32."""
    if compute_dtype_name(call.query.dtype) == dtype_name(call.query.dtype):
        return call
    arrays = upcast((call.query, call.key, call.value, call.bias), xp=call.xp)
    return call._replace(query=arrays[0], key=arrays[1], value=arrays[2], bias=arrays[3])


def group_size(query: Array, key: Array, xp: Namespace) -> Any:
    """How often a key/value head is repeated: an integer, or a 0-d array where heads are counted only when running."""
    heads, groups = shape(query, xp=xp)[-3], shape(key, xp=xp)[-3]
    return 1 if isinstance(heads, int) and heads == groups else heads // groups


def scale_query(query: Array, scale: float | Array | None, xp: Namespace) -> Array:
    """The query times the scale, so that scores that fit do not overflow on the way."""
    return xp.multiply(query, default_scale(query, xp) if scale is None else number_like(scale, query, xp))


def default_scale(query: Array, xp: Namespace) -> float | Array:
    """One over the root of the head dimension."""
    width = shape(query, xp=xp)[-1]
    if isinstance(width, int) or not hasattr(width, "dtype"):
        return width**-0.5
    inverse = xp.divide(1.0, xp.sqrt(xp.astype(width, xp.float64)))  # as precise as a Python float
    return xp.astype(inverse, query.dtype)


def number_like(number: float | Array, like: Array, xp: Namespace) -> float | Array:
    """A number in the type of an array."""
    return float(number) if isinstance(number, Real) else xp.astype(number, like.dtype)


def modify_scores(
    scores: Array,
    softcap: float | Array | None,
    score_mod: Callable[..., Array] | None,
    at: Positions | None,
    xp: Namespace,
) -> Array:
    r"""Scores after the cap, :math:`c \tanh(s / c)`, and after a function of score and positions."""
    if softcap is not None:
        softcap = number_like(softcap, scores, xp)
        scores = xp.multiply(xp.tanh(xp.divide(scores, softcap)), softcap)
    return scores if score_mod is None else score_mod(scores, *at)  # type: ignore[misc]


def score_positions(query: Array, key: Array, starts: tuple[Any, Any], xp: Namespace) -> Positions:
    """Where the scores of query and key stand."""
    *leading, heads, _, _ = shape(query, xp=xp)
    entries = xp.arange(leading[0] if len(leading) == 1 else math.prod(leading), dtype=xp.int32, **on_device_of(query))
    batch = xp.reshape(entries, (*leading, 1, 1, 1) if leading else ()) if len(leading) != 1 else entries
    for _ in range(3 if len(leading) == 1 else 0):  # an axis of open length is not even named
        batch = xp.expand_dims(batch, axis=-1)
    row, column = (
        _offset_by(start, positions(shape(array, xp=xp)[-2], array, xp=xp), xp)
        for array, start in zip((query, key), starts, strict=True)
    )
    return Positions(
        batch,
        xp.reshape(positions(heads, query, xp=xp), (heads, 1, 1)),
        xp.expand_dims(row, axis=-1),
        column,
    )


def _offset_by(start: Any, counted: Array, xp: Namespace) -> Array:
    if isinstance(start, int):
        return counted if start == 0 else xp.add(counted, start)
    return xp.add(counted, xp.astype(start, xp.int32))


def apply_dropout(weights: Array, dropout: Dropout | None, at: Positions | None, heads: Any, xp: Namespace) -> Array:
    """Weights with some of them 0, for which `gain` makes up."""
    if dropout is None or dropout.rate == 0 or at is None:
        return weights
    sample = xp.add(xp.multiply(at.batch, heads), at.head)
    return xp.where(kept_at(dropout, sample, at.query, at.key, xp=xp), weights, 0.0)


def dropout_scale(dropout: Dropout | None) -> float:
    """What the average is multiplied by to make up for dropped weights."""
    return 1.0 if dropout is None else 1 / (1 - dropout.rate)


def repeat_kv(x: Array, times: Any, /, *, xp: Namespace) -> Array:
    """Repeat every key/value head for the query heads that share it, in order: 0, 0, 1, 1 and so on."""
    return x if isinstance(times, int) and times == 1 else xp.repeat(x, times, axis=-3)
