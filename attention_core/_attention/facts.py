"""What is known of a call before its scores are computed, and the guard of line 5.

Query, key and value do not decide the facts. By the guard, masked NaN and infinities reach neither result nor gradient,
and attended ones show. A way runs, and its result is looked at. Only if that is not finite, it runs again, on a
*sanitized* call: finite values, and indicators of +inf and -inf. What a query may attend to decides what shows, never
the size of a weight, which may underflow. A library that differentiates by itself would multiply what is masked by
zeros afterwards. So it looks at what goes in, and sanitizes queries and keys, too, with NaN in the bias for those that
were not finite. Where nothing can be read, a call is sanitized at once, or a program looks when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .._arrays import (
    HALF,
    Array,
    Namespace,
    compute_dtype_name,
    dtype_name,
    has_sharding,
    one_program,
    scalar_like,
    sizes,
)
from .._backend import Loops, can_be_read, is_exporting
from ..masks import Mask, Positions
from .call import Call, allowed_by, group_size, repeat_kv, scale_like, score_positions
from .parts import every_query_has_a_key, has_few_queries

MAX_KEPT = 2**16  # scores of a mask that is kept: making a larger one takes less time than what it masks


class Facts(NamedTuple):
    """Facts of a call."""

    scale: Any  # what queries are multiplied by
    group: Any  # query heads for each key/value head
    is_folded: bool  # whether the queries of a group are one below the other in a product
    is_repeated: bool  # whether keys and values are repeated
    at: Positions | None  # where the scores stand, if a rule, a function of scores or dropout asks
    allowed: Array | None  # which pairs may attend, by mask and bias; None for all
    empty: Array | None  # which queries (..., M, 1) may not attend to any key; None if there is none
    is_readable: bool  # whether values can be read now, and no accelerator is waited for, if something is masked
    is_guarded: bool = False  # whether a program looks at products, whose derivatives leave out what is not finite
    has_parts: bool = False  # whether values are averaged as `value_parts`
    is_sanitized: bool = False  # whether rows may be NaN, and their gradients are to reach nothing that is masked


def facts_of(call: Call) -> Facts:
    """The facts of a call, whose arrays of 16 bits are in the type of the computation already."""
    xp, group = call.xp, group_size(call.query, call.key, call.xp)
    asked = call.score_mod is not None or call.dropout is not None or isinstance(call.mask, Mask)
    at = score_positions(call) if asked else None
    allowed = allowed_by(call.mask, call.bias, at, xp)
    has_empty = allowed is not None and not every_query_has_a_key(call)
    is_folded = folds_groups(call, group)
    return Facts(
        scale_like(call.query, call.scale, xp),
        group,
        is_folded,
        not is_folded and not (isinstance(group, int) and group == 1),
        at,
        allowed,
        one_program(_has_no_key, xp)(allowed, xp=xp) if has_empty else None,
        allowed is not None and can_be_read(*call[:3]),
    )


def _has_no_key(allowed: Array, *, xp: Namespace) -> Array:
    return xp.logical_not(xp.any(allowed, axis=-1, keepdims=True))


def lasting_facts(call: Call) -> Facts | None:
    """The facts of all calls of the signature of this one, with a mask of numbers as an array; ``None`` if none last.

    None do of 16 bits, which each call turns into others. Libraries that differentiate keep no array: what they make
    may belong to a trace, or to a mode of the library.
    """
    xp, (*leading, _, rows, _), columns = call.xp, call.query.shape, call.key.shape[-2]
    is_small = math.prod(leading) * rows * columns <= MAX_KEPT
    is_kept = is_small and not call.backend.differentiates and can_be_read(*call[:3])
    if dtype_name(call.query.dtype) in HALF or (call.mask is not None and not is_kept):
        return None
    facts = facts_of(call)
    if facts.empty is not None and not bool(xp.any(facts.empty)):
        facts = facts._replace(empty=None)
    return facts._replace(at=None)


def folds_groups(call: Call, group: Any) -> bool:
    """Whether the queries of a group are one below the other, so that no key or value is repeated.

    In exported programs, PyTorch cannot prove that folded rows of any number come apart again. In JAX, heads or rows
    may be sharded, and folding would gather them; a few queries are gathered for less than repeated keys cost. A
    library without a backend may be a lazy one, which reshapes little.
    """
    if isinstance(group, int) and group == 1:
        return False
    if not call.backend.owns(call.query) or is_exporting(call.query):
        return False
    return not has_sharding(call.query) or has_few_queries(sizes(call.query)[-2], sizes(call.key)[-2])


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


def value_parts(value: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """Values with 0 for what is not finite, and which are +inf or NaN, and -inf or NaN."""
    return xp.where(xp.isfinite(value), value, 0.0), *nonfinite_indicators(value, xp)


def with_infinities(averages: Iterable[Array], xp: Namespace) -> Array:
    """The averages of `value_parts` as that of the values.

    The infinities are multiplied by their weights, so that no gradient of them is finite. None of these may be 0.
    """
    output, inf, minus_inf = averages
    added = infinities(xp.greater(inf, 0.0), xp.greater(minus_inf, 0.0), output, xp)
    shown = xp.add(output, xp.multiply(added, xp.add(inf, minus_inf)))
    return xp.where(xp.equal(added, 0.0), output, shown)  # -0 stays


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
