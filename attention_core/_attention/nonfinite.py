"""NaN and infinities among the values: which of them were attended to, and what they make of an average."""

from __future__ import annotations

import math

from attention_core._arrays import Array, Namespace, scalar_like


def nonfinite_indicators(values: Array, xp: Namespace) -> tuple[Array, Array]:
    """1 where a value counts as inf (inf and nan), and 1 where it counts as -inf (-inf and nan); 0 elsewhere."""
    nan = xp.isnan(values)  # explicit: compilers rewrite `not x <= 0` as `x > 0`, which differs for nan
    counts = (xp.logical_or(nan, xp.equal(values, infinity)) for infinity in (math.inf, -math.inf))
    as_inf, as_minus_inf = (xp.astype(counted, values.dtype) for counted in counts)
    return as_inf, as_minus_inf


def infinities(attended_inf: Array, attended_minus_inf: Array, like: Array, xp: Namespace) -> Array:
    """Inf or -inf where such a value was attended to, nan where both were, 0 elsewhere, in the dtype of ``like``."""
    with_inf = xp.where(attended_minus_inf, math.nan, scalar_like(math.inf, like, xp))
    without_inf = xp.where(attended_minus_inf, -math.inf, scalar_like(0.0, like, xp))
    return xp.where(attended_inf, with_inf, without_inf)


def zero_unless_finite(gradient: Array, x: Array, xp: Namespace) -> Array:
    """The gradient of an array whose non-finite elements were replaced by constants: 0 for those."""
    return xp.where(xp.isfinite(x), gradient, 0.0)
