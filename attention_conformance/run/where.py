"""Where the errors of a wrong result are: the worst element, and a map over blocks of queries, keys and heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attention_conformance.oracle.attention import Exact
from attention_conformance.oracle.ulps import errors_of
from attention_conformance.problem import NumpyArray

__all__ = ["Blocks", "Worst", "located"]

MOST_BLOCKS = 32
"""Blocks along an axis of a map, so that a report stays small."""

AXES = {
    "output": ("head", "query"),
    "logsumexp": ("head", "query"),
    "query": ("head", "query"),
    "key": ("head", "key"),
    "value": ("head", "key"),
    "weights": ("query", "key"),
    "bias": ("query", "key"),
}
"""The axes of the map of each result, or of the gradient of each argument."""


@dataclass(frozen=True)
class Worst:
    """The element with the largest error.

    Attributes
    ----------
    result : str
        ``output``, ``weights`` or ``logsumexp``, or the argument whose gradient it is.
    index : tuple of int
    got, expected : float
    """

    result: str
    index: tuple[int, ...]
    got: float
    expected: float


@dataclass(frozen=True)
class Blocks:
    """The largest error of each block of a result.

    Attributes
    ----------
    result : str
    rows, columns : str
        What the axes count: ``head``, ``query`` or ``key``. Heads of the whole batch come one after another.
    block : tuple of int
        Heads, queries or keys in a block, along both axes.
    errors : tuple of tuple of float
        In units in the last place.
    """

    result: str
    rows: str
    columns: str
    block: tuple[int, int]
    errors: tuple[tuple[float, ...], ...]


def located(name: str, got: NumpyArray, expected: Exact, dtype: str) -> Mapping[str, Any]:
    """The fields ``worst`` and ``blocks`` of a finding about a result of the right shape."""
    if got.shape != expected.high.shape or not got.size:
        return {}
    errors = errors_of(got, expected, dtype)
    index = tuple(int(each) for each in np.unravel_index(np.argmax(errors), errors.shape))
    worst = Worst(name, index, float(got[index]), float(expected.high[index]))
    return {"worst": worst, "blocks": _blocks(name, errors)}


def _blocks(name: str, errors: NumpyArray) -> Blocks | None:
    if name not in AXES or errors.ndim < 3:
        return None
    rows, columns = AXES[name]
    if name != "logsumexp" and rows == "head":
        errors = errors.max(axis=-1)
    width = errors.shape[-1]
    table = errors.reshape(-1, width) if rows == "head" else errors.reshape(-1, *errors.shape[-2:]).max(axis=0)
    block = _block(table.shape[0]), _block(width)
    padded = np.pad(table, [(0, -size % each) for size, each in zip(table.shape, block, strict=True)])
    cut = padded.reshape(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    found = tuple(tuple(float(f"{each:.3g}") for each in row) for row in cut.max(axis=(1, 3)))
    return Blocks(name, rows, columns, block, found)


def _block(size: int) -> int:
    """The least power of two of which at most `MOST_BLOCKS` cover an axis."""
    return 1 << max(0, math.ceil(math.log2(size / MOST_BLOCKS)))
