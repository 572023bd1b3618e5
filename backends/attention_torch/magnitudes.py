"""How large numbers may be: whether query, key, value and their products are finite."""

from __future__ import annotations

import math
import sys
from numbers import Real

from attention_core.backend import Array, Call, Namespace, can_be_read, compute_dtype_name, dtype_name, upcast

__all__ = ["known_finite_products", "known_finite_scores", "norms_are_below", "products_are_finite"]

_LARGEST = {"float32": (2.0 - 2.0**-23) * 2.0**127, "float64": sys.float_info.max}  # whose squares are numbers, too


def products_are_finite(call: Call) -> Array:
    """Whether query, key, value and all their products are finite, as a 0-d array that need not be readable yet.

    Values are to be so small that their products with gradients are finite, too.
    """
    xp = call.xp
    max_abs = tuple(xp.max(xp.abs(array)) for array in (call.query, call.key, call.value))
    query, key, value = upcast(max_abs, xp=xp)
    products = xp.multiply(xp.multiply(xp.multiply(query, call.query.shape[-1]), _scale_above_one(call)), key)
    return xp.logical_and(
        xp.less(products, float(xp.finfo(call.query.dtype).max)), xp.less(value, _max_value(call.query, xp))
    )


def _scale_above_one(call: Call) -> float | Array:
    """The scale, or 1 where that is larger: scores are to be finite before they are scaled, and after."""
    xp, scale = call.xp, call.scale
    if scale is None or isinstance(scale, Real):
        return 1.0 if scale is None else max(1.0, abs(float(scale)))
    (size,) = upcast((xp.abs(scale),), xp=xp)
    return xp.where(xp.less(size, 1.0), 1.0, size)  # NaN stays


def _max_value(query: Array, xp: Namespace) -> float:
    """Values below this times gradients below it are finite, and their sums over 256 channels, too."""
    return float(math.sqrt(xp.finfo(getattr(xp, compute_dtype_name(query.dtype))).max)) / 16


def known_finite_products(call: Call) -> bool:
    """Whether query, key, value and all products are finite, where that can be read."""
    arrays = call.query, call.key, call.value
    return _norms_are_small(call, arrays) or known_finite_arrays(arrays, call.scale, call.xp)


def known_finite_scores(call: Call) -> bool:
    """Whether all products of queries and keys are finite, with the scale or without, where that can be read."""
    arrays = call.query, call.key
    return _norms_are_small(call, arrays) or known_finite_arrays(arrays, call.scale, call.xp)


def _norms_are_small(call: Call, arrays: tuple[Array, ...]) -> bool:
    """Whether norms of whole arrays, which no products are above, are so small that `known_finite_arrays` is true.

    That reads each array once, where the extrema read it twice.
    """
    largest, scale = _LARGEST.get(dtype_name(arrays[0].dtype)), call.scale
    if largest is None or not (scale is None or isinstance(scale, Real)):
        return False
    if not all(map(can_be_read, arrays)) or any(0 in array.shape for array in arrays):
        return False
    return norms_are_below(largest, call, arrays)


def norms_are_below(largest: float, call: Call, arrays: tuple[Array, ...]) -> bool:
    """Whether norms of whole arrays, of a call with a number as its scale, are so small that no product is larger."""
    scale = call.scale
    query, key, *value = call.backend.loops.whole_norms(arrays)
    factor = 1.0 if scale is None else max(1.0, abs(float(scale)))
    return query * factor * key < largest and (not value or value[0] < math.sqrt(largest) / 16)


def known_finite_arrays(arrays: tuple[Array, ...], scale: float | Array | None, xp: Namespace) -> bool:
    """Whether arrays and the products of the first two, query and key, are finite, where that can be read.

    Values, the third, are to be so small that products with gradients are finite, too.
    """
    numbers = () if scale is None or isinstance(scale, Real) else (scale,)
    if not all(map(can_be_read, (*arrays, *numbers))) or any(0 in array.shape for array in arrays):
        return False
    extrema = xp.stack([extremum(array) for array in arrays for extremum in (xp.max, xp.min)])
    max_abs = [abs(number) for number in (extrema.tolist() if hasattr(extrema, "tolist") else map(float, extrema))]
    factor = 1.0 if scale is None else abs(float(scale.tolist() if hasattr(scale, "tolist") else scale))
    products = max(max_abs[:2]) * max(factor, 1.0) * max(max_abs[2:4]) * arrays[0].shape[-1]
    fits = all(number < _max_value(arrays[0], xp) for number in max_abs[4:])
    return fits and all(map(math.isfinite, max_abs[:4])) and products < float(xp.finfo(arrays[0].dtype).max)
