"""How arrays lie in memory: the same numbers with other strides, offsets and neighbours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from attention_conformance.problem import NumpyArray

View = Callable[[Any, Any], Any]
"""From the stored array, and its namespace, to the array."""


def _contiguous(array: NumpyArray) -> tuple[NumpyArray, View]:
    return np.array(array, order="C"), lambda x, xp: x  # of a number, one without axes


def _exchanged(array: NumpyArray, axis: int) -> tuple[NumpyArray, View]:
    """An axis and the one behind it in the other order: heads and positions, or positions and channels."""
    if array.ndim < -axis:
        return _contiguous(array)
    return np.ascontiguousarray(np.moveaxis(array, axis, axis + 1)), lambda x, xp: xp.moveaxis(x, axis, axis + 1)


def _within(array: NumpyArray, shape: tuple[int, ...], *index: Any) -> tuple[NumpyArray, View]:
    """A part of a larger buffer, whose other elements are NaN."""
    storage = np.full(shape, True if array.dtype == bool else np.nan, dtype=array.dtype)
    storage[index] = array
    return storage, lambda x, xp: x[index]


def _every_second(array: NumpyArray) -> tuple[NumpyArray, View]:
    """Every second element of the last axis."""
    return _within(array, (*array.shape[:-1], 2 * array.shape[-1]), ..., slice(None, None, 2))


def _padded(array: NumpyArray) -> tuple[NumpyArray, View]:
    """Rows that are longer in memory than they are."""
    return _within(array, (*array.shape[:-1], array.shape[-1] + 5), ..., slice(array.shape[-1]))


def _part(array: NumpyArray) -> tuple[NumpyArray, View]:
    """The first rows of a longer buffer."""
    *leading, rows, width = array.shape
    return _within(array, (*leading, 2 * rows + 3, width), ..., slice(rows), slice(None))


def _offset(array: NumpyArray) -> tuple[NumpyArray, View]:
    """One element after the start of its buffer."""
    storage, view = _within(array.ravel(), (array.size + 1,), slice(1, None))
    return storage, lambda x, xp: xp.reshape(view(x, xp), array.shape)


def _expanded(array: NumpyArray, axis: int) -> tuple[NumpyArray, View]:
    """An axis with a stride of 0, as of samples that are expanded, or heads that share one; its elements are equal."""
    shape = array.shape
    return np.ascontiguousarray(array.take([0], axis)), lambda x, xp: xp.broadcast_to(x, shape)


def _far(array: NumpyArray) -> tuple[NumpyArray, View]:
    """Rows 2**20 elements apart in a buffer of zeros, most of whose pages are never touched."""
    rows, width = array.shape[-2:]
    wide = np.zeros((rows, 2**20 + width), dtype=array.dtype)
    wide[:, :width] = array[0, 0]
    return wide, lambda x, xp: x[None, None, :, :width]


def _interleaved(array: NumpyArray) -> tuple[NumpyArray, View]:
    """The middle of three arrays that lie packed, as (B, S, 3, H, D); the others hold NaN."""
    if array.ndim != 4:
        return _contiguous(array)
    batch, heads, rows, width = array.shape
    packed = array.transpose(0, 2, 1, 3)
    storage, view = _within(packed, (batch, rows, 3, heads, width), slice(None), slice(None), 1, ...)
    return storage, lambda x, xp: xp.permute_dims(view(x, xp), (0, 2, 1, 3))


MEMORY: dict[str, Callable[[NumpyArray], tuple[NumpyArray, View]]] = {
    "contiguous": _contiguous,
    "permuted": functools.partial(_exchanged, axis=-3),
    "transposed": functools.partial(_exchanged, axis=-2),
    "strided": _every_second,
    "padded": _padded,
    "part": _part,
    "offset": _offset,
    "expanded": functools.partial(_expanded, axis=0),
    "shared": functools.partial(_expanded, axis=1),
    "interleaved": _interleaved,
    "far": _far,
}
"""Kinds of memory; names of shapes begin the word for theirs so."""

EQUAL = ("expanded", "shared", "far")
"""Those of arrays whose samples, or heads, are equal."""


def stored(array: NumpyArray, kind: str, axes: tuple[int, ...] | None) -> tuple[NumpyArray, View]:
    """The array to be stored, and its view; contiguous arrays lie in the order of the kernel's axes."""
    if kind != "contiguous" or axes is None or array.ndim != len(axes):
        return MEMORY[kind](array)
    back = tuple(int(each) for each in np.argsort(axes))
    return np.ascontiguousarray(array.transpose(axes)), lambda x, xp: xp.permute_dims(x, back)
