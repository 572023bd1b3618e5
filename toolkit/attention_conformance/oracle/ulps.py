"""Errors in units in the last place of the scale at which a number was computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ml_dtypes import finfo

from attention_conformance.oracle.attention import Exact
from attention_conformance.problem import NumpyArray


def spacing(scale: NumpyArray, dtype: str) -> NumpyArray:
    """The distance between neighbouring numbers of a type at this magnitude; among subnormal numbers it is constant."""
    kind = finfo(dtype)
    normal = np.maximum(scale, np.ldexp(1.0, kind.minexp))
    _, exponent = np.frexp(normal)  # normal = fraction * 2**exponent with fraction in [1/2, 1)
    last_place = exponent - 1 - kind.nmant
    return np.asarray(np.ldexp(1.0, last_place))


def worst_error(got: NumpyArray, expected: Exact, dtype: str) -> tuple[float, str]:
    """The largest error of an array in units in the last place of its scale, and where it is.

    What is not finite must be so at the same places and in the same way; otherwise the error is infinite.
    """
    if got.shape != expected.high.shape:
        return np.inf, f"expected shape {expected.high.shape}; got {got.shape}"
    if got.dtype.name != dtype:
        return np.inf, f"expected dtype {dtype}; got {got.dtype.name}"
    if not got.size:
        return 0.0, ""
    errors = errors_of(got, expected, dtype)
    index = tuple(int(i) for i in np.unravel_index(np.argmax(errors), errors.shape))
    return float(errors[index]), f"at {index}: expected {expected.high[index]:.9g}; got {float(got[index]):.9g}"


def errors_of(got: NumpyArray, expected: Exact, dtype: str) -> NumpyArray:
    """The error of each element in units in the last place of its scale."""
    numbers = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        errors = np.abs((numbers - expected.high) - expected.low) / spacing(expected.scale, dtype)
    same = (numbers == expected.high) | (np.isnan(numbers) & np.isnan(expected.high))
    return np.where(np.isfinite(numbers) & np.isfinite(expected.high), errors, np.where(same, 0.0, np.inf))


@dataclass(frozen=True)
class Difference:
    """Where two arrays have other bits: the share of such elements, the largest distance, and the first of them."""

    share: float
    ulps: float
    index: tuple[int, ...]
    first: float
    second: float

    def text(self, name: str, index: tuple[int, ...] | None = None) -> str:
        """Everything in words, with hexadecimal floats; at another index, where the arrays are parts of a whole."""
        share = f"{self.share:.1%}" if self.share >= 0.001 else f"{self.share:.1e}"
        where = self.index if index is None else index
        values = f"{self.first.hex()} and {self.second.hex()}"
        return f"{share} of {name} differ, by at most {self.ulps:.3g} ulp; first at {where}: {values}"


def difference(first: NumpyArray, second: NumpyArray, scale: NumpyArray | None = None) -> Difference | None:
    """How two arrays of one shape and type differ; None where they have the same bits.

    The unit is that of the scale, by default of the larger number.
    """
    words = [np.ascontiguousarray(each).view(f"u{each.dtype.itemsize}") for each in (first, second)]
    unlike = words[0] != words[1]
    if not unlike.any():
        return None
    numbers = [each.astype(np.float64) for each in (first, second)]
    size = np.maximum(*map(abs, numbers)) if scale is None else scale.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distances = abs(numbers[0] - numbers[1]) / spacing(size, first.dtype.name)
    index = tuple(int(each) for each in np.argwhere(unlike)[0])
    ulps = np.where(np.isfinite(distances[unlike]), distances[unlike], np.inf).max()
    return Difference(float(unlike.mean()), float(ulps), index, float(numbers[0][index]), float(numbers[1][index]))
