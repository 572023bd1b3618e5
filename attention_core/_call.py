"""One call of attention as its implementations receive it, and the steps that all of them share."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

from attention_core._namespace import beside, dtype_name, is_concrete, positions, shape, wide_name, widen
from attention_core._typing import Array, Namespace
from attention_core.masks import Mask, Positions
from attention_core.random import Dropout, kept_at

__all__ = [
    "Attention",
    "Call",
    "changed_scores",
    "dropped",
    "gain",
    "indices",
    "number_like",
    "repeats",
    "scaled_query",
]


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
    mask : Mask or Array of bool or None
    bias : Array or None
    scale, softcap : float or Array or None
    score_mod : callable or None
    dropout : Dropout or None
    starts : tuple of int or Array
        Positions of the first query and of the first key.
    xp : array namespace
    arithmetic : {"fast", "reproducible"}
    """

    query: Array
    key: Array
    value: Array
    mask: Mask | Array | None
    bias: Array | None
    scale: float | Array | None
    softcap: float | Array | None
    score_mod: Callable[..., Array] | None
    dropout: Dropout | None
    starts: tuple[Any, Any]
    xp: Namespace
    arithmetic: str = "fast"


def widened(call: Call) -> Call:
    """The call with 16-bit arrays in the type of the computation, float32."""
    if wide_name(call.query.dtype) == dtype_name(call.query.dtype):
        return call
    arrays = widen((call.query, call.key, call.value, call.bias), xp=call.xp)
    return call._replace(query=arrays[0], key=arrays[1], value=arrays[2], bias=arrays[3])


def repeats(query: Array, key: Array, xp: Namespace) -> Any:
    """How often a key/value head is repeated: an integer, or a 0-d array where heads are counted only when running."""
    heads, groups = shape(query, xp=xp)[-3], shape(key, xp=xp)[-3]
    return 1 if isinstance(heads, int) and heads == groups else heads // groups


def scaled_query(query: Array, scale: float | Array | None, xp: Namespace) -> Array:
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


def changed_scores(
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


def indices(query: Array, key: Array, starts: tuple[Any, Any], xp: Namespace) -> Positions:
    """Where the scores of query and key stand."""
    *leading, heads, _, _ = shape(query, xp=xp)
    entries = xp.arange(leading[0] if len(leading) == 1 else math.prod(leading), dtype=xp.int32, **beside(query))
    batch = xp.reshape(entries, (*leading, 1, 1, 1) if leading else ()) if len(leading) != 1 else entries
    for _ in range(3 if len(leading) == 1 else 0):  # an axis of open length is not even named
        batch = xp.expand_dims(batch, axis=-1)
    row, column = (
        _from(start, positions(shape(array, xp=xp)[-2], array, xp=xp), xp)
        for array, start in zip((query, key), starts, strict=True)
    )
    return Positions(
        batch,
        xp.reshape(positions(heads, query, xp=xp), (heads, 1, 1)),
        xp.expand_dims(row, axis=-1),
        column,
    )


def _from(start: Any, counted: Array, xp: Namespace) -> Array:
    if isinstance(start, int):
        return counted if start == 0 else xp.add(counted, start)
    return xp.add(counted, xp.astype(start, xp.int32))


def dropped(weights: Array, dropout: Dropout | None, at: Positions | None, heads: Any, xp: Namespace) -> Array:
    """Weights with some of them 0, for which `gain` makes up."""
    if dropout is None or dropout.rate == 0 or at is None:
        return weights
    sample = xp.add(xp.multiply(at.batch, heads), at.head)
    return xp.where(kept_at(dropout, sample, at.query, at.key, xp=xp), weights, 0.0)


def gain(dropout: Dropout | None) -> float:
    """What the average is multiplied by to make up for dropped weights."""
    return 1.0 if dropout is None else 1 / (1 - dropout.rate)


def is_tame(call: Call) -> Array:
    """Whether query, key, value and all their products are finite, to be read once the program runs."""
    xp, scale = call.xp, call.scale
    peaks = [xp.max(xp.abs(array)) for array in (call.query, call.key, call.value)]
    query, key, value = widen(tuple(peaks), xp=xp)
    factor = max(1.0, abs(float(scale)) if isinstance(scale, Real) else 1.0) * call.query.shape[-1]
    products = xp.multiply(xp.multiply(query, factor), key)
    return xp.logical_and(
        xp.less(products, float(xp.finfo(call.query.dtype).max)), xp.less(value, _most_of_values(call.query, xp))
    )


def _most_of_values(query: Array, xp: Namespace) -> float:
    """Values below this times gradients below it are finite, and their sums over 256 channels, too."""
    return float(math.sqrt(xp.finfo(getattr(xp, wide_name(query.dtype))).max)) / 16


def known_tame(call: Call) -> bool:
    """Whether query, key, value and all products are finite, where that can be read."""
    return known_finite((call.query, call.key, call.value), call.scale, call.xp)


def known_to_fit(call: Call) -> bool:
    """Whether all products of queries and keys are finite, with the scale or without, where that can be read."""
    return known_finite((call.query, call.key), call.scale, call.xp)


def known_finite(arrays: tuple[Array, ...], scale: float | Array | None, xp: Namespace) -> bool:
    """Whether arrays and the products of the first two, query and key, are finite, where that can be read.

    Values, the third, are to be so small that products with gradients are finite, too.
    """
    numbers = () if scale is None or isinstance(scale, Real) else (scale,)
    if not all(map(is_concrete, (*arrays, *numbers))) or any(0 in array.shape for array in arrays):
        return False
    ends = xp.stack(
        [end(array) for array in arrays for end in (xp.max, xp.min)]
    )  # read once: an accelerator is slow to
    peaks = [abs(end) for end in (ends.tolist() if hasattr(ends, "tolist") else map(float, ends))]
    factor = 1.0 if scale is None else abs(float(scale.tolist() if hasattr(scale, "tolist") else scale))
    products = max(peaks[:2]) * max(factor, 1.0) * max(peaks[2:4]) * arrays[0].shape[-1]
    fit = all(peak < _most_of_values(arrays[0], xp) for peak in peaks[4:])
    return fit and all(map(math.isfinite, peaks[:4])) and products < float(xp.finfo(arrays[0].dtype).max)
