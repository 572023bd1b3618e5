"""Where the errors of a wrong result are: the worst element, and the axes along which they lie together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from attention_conformance.oracle.attention import Exact
from attention_conformance.oracle.ulps import errors_of
from attention_conformance.problem import NumpyArray

ALL_AXES = {
    "output": ("sample", "head", "query", "channel"),
    "logsumexp": ("sample", "head", "query"),
    "query": ("sample", "head", "query", "channel"),
    "key": ("sample", "head", "key", "channel"),
    "value": ("sample", "head", "key", "channel"),
    "weights": ("sample", "head", "query", "key"),
    "bias": ("sample", "head", "query", "key"),
    "sinks": ("head",),
}
"""All axes of each, from the last backward."""


@dataclass(frozen=True)
class Worst:
    """The element with the largest error.

    Attributes
    ----------
    result : str
        ``output``, ``weights`` or ``logsumexp``, or the argument whose gradient it is.
    index : tuple of int
    got, expected : float
    correlation, cosine : float
        Pearson's coefficient (PCC) and the cosine, of all elements with what is expected. They average, so that they
        come near 1 with a wrong row; NaN where an element is not finite.
    """

    result: str
    index: tuple[int, ...]
    got: float
    expected: float
    correlation: float = math.nan
    cosine: float = math.nan


@dataclass(frozen=True)
class Extent:
    """Where a wrong result is wrong: the worst element, and by axis the neighbours that hold all errors, in words."""

    worst: Worst | None = None
    axes: Mapping[str, str] = field(default_factory=dict)

    @property
    def says(self) -> str:
        """All axes in words; empty where errors lie everywhere."""
        return f"all errors are in {', '.join(self.axes.values())}" if self.axes else ""


def located(name: str, got: NumpyArray, expected: Exact, dtype: str, bound: float = 0.0) -> Extent:
    """Where the errors of a result beyond a bound are; nowhere where it has another shape."""
    if got.shape != expected.high.shape or not got.size:
        return Extent()
    errors, got = errors_of(got, expected, dtype), got.astype(np.float64)
    index = tuple(int(each) for each in np.unravel_index(np.argmax(errors), errors.shape))
    likeness = _cosine(got - got.mean(), expected.high - expected.high.mean()), _cosine(got, expected.high)
    worst = Worst(name, index, float(got[index]), float(expected.high[index]), *likeness)
    return Extent(worst, _axes(name, ~(errors <= bound)))


def _cosine(first: NumpyArray, second: NumpyArray) -> float:
    norms = np.linalg.norm(first) * np.linalg.norm(second)
    return float((first * second).sum() / norms) if 0 < norms < math.inf else math.nan


def _axes(name: str, wrong: NumpyArray) -> dict[str, str]:
    """The samples, heads, queries and so on that hold all errors, where these are few and lie together."""
    ranges, words = {}, ALL_AXES.get(name, ())[-wrong.ndim :]
    for axis, word in zip(range(-len(words), 0), words, strict=True):
        size = wrong.shape[axis]
        (at,) = np.nonzero(wrong.any(axis=tuple(other for other in range(wrong.ndim) if other != wrong.ndim + axis)))
        if at.size and at[-1] - at[0] + 1 == at.size and 4 * at.size <= 3 * size:
            ranges[word] = _range(word, int(at[0]), int(at[-1]), size)
    return ranges


def _range(word: str, first: int, last: int, size: int) -> str:
    plural = "queries" if word == "query" else f"{word}s"
    if first == last:
        return f"the last {word}" if last == size - 1 else f"{word} {first}"
    return f"{plural} from {first} on" if last == size - 1 else f"{plural} {first} to {last}"
