"""The maps between attentions in the framework's own arithmetic, under the names of `_exact_layers`."""

from __future__ import annotations

import math
from typing import Any

from attention_core._gelu import erfc
from attention_core._namespace import rows_at, shape
from attention_core._typing import Array, Namespace
from attention_core.random import drop

__all__ = [
    "add",
    "affine",
    "blend",
    "copies",
    "divide",
    "drop",
    "gelu",
    "lookup",
    "normalize",
    "pooled",
    "spread",
    "unit",
]


def affine(x: Array, weight: Array, bias: Array | None, /, *, xp: Namespace) -> Array:
    r"""Affine map of the channels, :math:`x W + b`: (..., in) -> (..., out)."""
    y = xp.matmul(x, weight)
    return y if bias is None else xp.add(y, bias)


def normalize(x: Array, scale: Array, offset: Array, epsilon: float, /, *, xp: Namespace) -> Array:
    """Normalize the channels."""
    centred = xp.subtract(x, xp.mean(x, axis=-1, keepdims=True))
    centred = xp.subtract(centred, xp.mean(centred, axis=-1, keepdims=True))  # what rounding left of the mean
    variance = xp.mean(xp.multiply(centred, centred), axis=-1, keepdims=True)
    normal = xp.divide(centred, xp.sqrt(xp.add(variance, epsilon)))
    return xp.add(xp.multiply(normal, scale), offset)


def gelu(x: Array, /, *, xp: Namespace) -> Array:
    """Gaussian error linear unit."""
    density = erfc(xp.multiply(x, -math.sqrt(0.5)), xp=xp)
    return xp.multiply(xp.multiply(x, 0.5), density)


def add(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    """Add two arrays."""
    return xp.add(x, y)


def copies(x: Array, count: int, /, *, xp: Namespace) -> tuple[Array, ...]:
    """The same array for each place that uses it."""
    return (x,) * count


def blend(x: Array, y: Array, factor: Array, /, *, xp: Namespace) -> Array:
    r"""An array and a multiple of another, :math:`x + \sigma y`."""
    return xp.add(x, xp.multiply(y, factor))


def lookup(table: Array, ids: Array, dims: tuple[Any, ...], /, *, xp: Namespace) -> Array:
    """Rows of a table, (entries, C), for ids that broadcast to these dimensions: (..., C)."""
    rows = rows_at(table, xp.reshape(ids, (-1,)), axis=0, xp=xp)
    return xp.reshape(rows, (*shape(ids, xp=xp), shape(table, xp=xp)[1]))


def spread(x: Array, dims: tuple[Any, ...], /, *, xp: Namespace) -> Array:
    """The same array for every entry of a batch."""
    return xp.broadcast_to(x, dims)


def pooled(x: Array, /, *, xp: Namespace) -> Array:
    """The largest of places, (..., places, C) -> (..., C)."""
    return xp.max(x, axis=-2)


def unit(x: Array, epsilon: float, /, *, xp: Namespace) -> Array:
    r"""A vector (1, C) over its norm, :math:`x / (\lVert x \rVert + \epsilon)`."""
    return xp.divide(x, xp.add(xp.sqrt(xp.sum(xp.multiply(x, x))), epsilon))


def divide(x: Array, divisor: Array, /, *, xp: Namespace) -> Array:
    """An array over a number, of shape ()."""
    return xp.divide(x, divisor)
