"""The guard of line 5: masked NaN and infinities reach neither result nor gradient, and attended ones show.

A way runs, and its result is looked at. Only if that is not finite, it runs again, on a *sanitized* call: finite values
next to indicators of +inf and -inf. A library that differentiates by itself would multiply what is masked by zeros
afterwards. So it looks at what goes in, and sanitizes queries and keys, too, with NaN in the bias for those that were
not finite. Where nothing can be read, a call is sanitized at once, or a program looks when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from .._arrays import Array, Namespace, compute_dtype_name, one_program, scalar_like, shape
from .._backend import Loops
from .call import Call, repeat_kv
from .facts import Facts


def inputs_are_finite(call: Call) -> Array:
    """Whether query, key and value are finite, as a 0-d array; a sum that overflows costs time alone."""
    return one_program(_sum_is_finite, call.xp)(*call[:3], xp=call.xp)


def _sum_is_finite(*arrays: Array, xp: Namespace) -> Array:
    dtype = getattr(xp, compute_dtype_name(arrays[0].dtype))
    query, key, value = (xp.sum(array, dtype=dtype) for array in arrays)
    return xp.isfinite(xp.add(xp.add(query, key), value))


def is_clean(output: Array, xp: Namespace) -> Array:
    """Whether a result is finite, as a 0-d array."""
    return xp.isfinite(xp.sum(output))


def repaired_unless_clean(results: tuple[Array, ...], repair: Callable[[], Any], loops: Loops) -> Any:
    """Output and logsumexp of a way with a gradient of its own, and more; those of a repair if they are not finite."""
    xp, (output, logsumexp, *_) = loops.xp, results
    no_nan = xp.logical_not(xp.isnan(xp.sum(logsumexp)))  # -inf is that of fully masked rows
    return loops.cond(xp.logical_and(is_clean(output, xp), no_nan), lambda: results, repair)


def sanitized(call: Call, facts: Facts) -> Call:
    """The call with 0 for what is not finite, for which columns of values, and NaN in the bias, stand."""
    call = call._replace(value=one_program(value_columns, call.xp)(call.value, xp=call.xp))
    return sanitized_keys(call, facts) if call.backend.differentiates else call


def sanitized_keys(call: Call, facts: Facts) -> Call:
    """The call with 0 for what is not finite in queries and keys, for which NaN in the bias stands."""
    xp = call.xp
    query, query_nan = one_program(_finite_vectors, xp)(call.query, xp=xp)
    key, key_nan = one_program(_finite_vectors, xp)(call.key, xp=xp)
    key_nan = repeat_kv(xp.expand_dims(key_nan, axis=-2), facts.group, xp=xp)  # (..., H, 1, N)
    nan = xp.add(xp.expand_dims(query_nan, axis=-1), key_nan)
    bias = nan if call.bias is None else xp.add(nan, call.bias)
    return call._replace(query=query, key=key, bias=bias)


def _finite_vectors(x: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """Vectors (..., D) with 0 for what is not finite, and (...) of NaN where there was any, else 0."""
    finite = xp.isfinite(x)
    nan = xp.where(finite, scalar_like(0.0, x, xp), math.nan)
    return xp.where(finite, x, 0.0), xp.sum(nan, axis=-1)  # a sum is one loop to XLA, and `all` is three


def value_columns(value: Array, *, xp: Namespace) -> Array:
    """The `value_parts` of values (..., N, E) as columns (..., N, 3 E)."""
    return xp.concat(value_parts(value, xp), axis=-1)


def value_parts(value: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """Values with 0 for what is not finite, and which are +inf or NaN, and -inf or NaN."""
    return xp.where(xp.isfinite(value), value, 0.0), *nonfinite_indicators(value, xp)


def average_of_columns(average: Array, xp: Namespace) -> Array:
    """The average of `value_columns` as that of the values."""
    width = shape(average, xp=xp)[-1] // 3
    return with_infinities((average[..., start : start + width] for start in (0, width, 2 * width)), xp)


def with_infinities(averages: Iterable[Array], xp: Namespace) -> Array:
    """The averages of `value_parts` as that of the values.

    The infinities are multiplied by their weights, so that no gradient of them is finite.
    """
    output, inf, minus_inf = averages
    added = infinities(xp.greater(inf, 0.0), xp.greater(minus_inf, 0.0), output, xp)
    return xp.add(output, xp.multiply(added, xp.add(inf, minus_inf)))


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
