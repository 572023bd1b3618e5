"""The two products of attention: scores of queries and keys, and averages of values, each with the heads of its group.

A program that cannot read values looks at products, not at what goes into them. A decoding step reads each key and
value once. To look at them first, or to write them with 0 for what is not finite, would take longer than the step.
"""

from __future__ import annotations

import math

from attention_core._arrays import Array, Arrays, Namespace, scalar_like, sizes
from attention_core._attention.call import fold_group, repeat_kv, unfold_group
from attention_core._attention.facts import Facts
from attention_core._attention.finite import is_clean, value_columns, with_infinities
from attention_core._backend import Backend


def products(query: Array, key: Array, facts: Facts, backend: Backend) -> Array:
    """The products (..., H, M, N) of all queries (..., H, M, D) with the keys (..., G, N, D) of their group.

    A product with a key that is not finite is chosen away where that is masked. Its derivative is that of finite
    factors, as 0 times NaN would be NaN.
    """
    xp = backend.namespace
    query, key = _side_by_side(query, key, facts, xp)

    def multiply(query: Array, key: Array) -> Array:
        if backend.loops.traced and _are_few(query, key):
            # A compiler may write the transpose of all keys to memory; for a few queries, the product's is smaller.
            return xp.matrix_transpose(xp.matmul(key, xp.matrix_transpose(query)))
        return xp.matmul(query, xp.matrix_transpose(key))

    def tangent(factors: Arrays, _: Array, tangents: Arrays) -> Array:
        query, key = (finite_or_zero(x, xp) for x in factors)
        return xp.add(multiply(tangents[0], key), multiply(query, tangents[1]))

    raw = backend.with_tangent(multiply, tangent, query, key) if facts.is_guarded else multiply(query, key)
    return _per_head(raw, facts, xp)


def _are_few(query: Array, key: Array) -> bool:
    (rows, width), columns = sizes(query)[-2:], sizes(key)[-2]
    if not (isinstance(rows, int) and isinstance(width, int) and isinstance(columns, int)):
        return False
    return rows <= min(width, columns // 2)


def averages(weights: Array, value: Array, facts: Facts, backend: Backend) -> Array:
    """The sums (..., H, M, E) of the values (..., G, N, E) of each group, by weights (..., H, M, N).

    A program looks at the sums. Where one is not finite, it averages finite values and indicators of infinities. Then
    weights of that row have no finite gradient, and a value that is not finite has none. Fully masked rows are 0,
    whatever their weights, and so are gradients of a value that is masked from a row of NaN.
    """
    if facts.is_guarded:
        return _guarded_averages(weights, value, facts, backend)
    xp = backend.namespace
    weights, value = _side_by_side(weights, value, facts, xp)
    return _per_head(xp.matmul(weights, value), facts, xp)


def _guarded_averages(weights: Array, value: Array, facts: Facts, backend: Backend) -> Array:
    xp, cond = backend.namespace, backend.loops.cond

    def average(weights: Array, value: Array, _: Array) -> Array:
        found = xp.matmul(weights, value)
        return cond(
            is_clean(found, xp),
            lambda: found,
            lambda: with_infinities(xp.matmul(weights, value_columns(value, xp=xp)), xp),
        )

    def allowed_weights(weights: Array, allowed: Array) -> Array:
        hidden = xp.where(allowed, _per_head(weights, facts, xp), 0.0)
        return fold_group(hidden, facts.group, xp=xp) if facts.is_folded else hidden

    def tangent(factors: Arrays, found: Array, tangents: Arrays) -> Array:
        weights, value, allowed = factors
        shown = xp.where(xp.isfinite(found), scalar_like(1.0, found, xp), math.nan)
        of_weights = xp.multiply(xp.matmul(tangents[0], finite_or_zero(value, xp)), shown)
        weights = cond(is_clean(found, xp), lambda: weights, lambda: allowed_weights(weights, allowed))
        return xp.add(of_weights, xp.matmul(weights, xp.where(xp.isfinite(value), tangents[1], 0.0)))

    factors = *_side_by_side(weights, value, facts, xp), facts.allowed
    output = _per_head(backend.with_tangent(average, tangent, *factors), facts, xp)
    return output if facts.empty is None else xp.where(facts.empty, 0.0, output)


def _side_by_side(x: Array, y: Array, facts: Facts, xp: Namespace) -> tuple[Array, Array]:
    """Rows (..., H, M, C) and columns (..., G, N, C) of products, with the heads of a group folded, or repeated."""
    return (
        fold_group(x, facts.group, xp=xp) if facts.is_folded else x,
        repeat_kv(y, facts.group, xp=xp) if facts.is_repeated else y,
    )


def _per_head(x: Array, facts: Facts, xp: Namespace) -> Array:
    """A product of folded rows, with rows of all heads."""
    return unfold_group(x, facts.group, xp=xp) if facts.is_folded else x


def finite_or_zero(x: Array, xp: Namespace) -> Array:
    """An array with 0 for what is not finite."""
    return xp.where(xp.isfinite(x), x, 0.0)
