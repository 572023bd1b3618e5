"""The two products of attention: scores of queries and keys, and averages of values, each with the heads of its group.

A program that cannot read values looks at products, not at what goes into them. A decoding step reads each key and
value once. To look at them first, or to write them with 0 for what is not finite, would take longer than the step.
"""

from __future__ import annotations

import math

from .._arrays import Array, Arrays, Namespace, scalar_like, sizes
from .._backend import Backend
from .call import fold_group, repeat_kv, unfold_group
from .facts import Facts
from .finite import is_clean, value_parts, with_infinities


def products(query: Array, key: Array, facts: Facts, backend: Backend) -> Array:
    """The products (..., H, M, N) of all queries (..., H, M, D) with the keys (..., G, N, D) of their group.

    A product with a key that is not finite is chosen away where that is masked. Its derivative is that of finite
    factors, as 0 times NaN would be NaN.
    """
    xp = backend.namespace
    query = fold_group(query, facts.group, xp=xp) if facts.is_folded else query
    key = repeat_kv(key, facts.group, xp=xp) if facts.is_repeated else key
    if facts.is_guarded:
        raw = _guarded_products(query, key, backend)
    else:
        raw = _in_program(query, key, xp) if backend.loops.traced else xp.matmul(query, xp.matrix_transpose(key))
    return unfold_group(raw, facts.group, xp=xp) if facts.is_folded else raw


def _guarded_products(query: Array, key: Array, backend: Backend) -> Array:
    xp = backend.namespace

    def multiply(query: Array, key: Array) -> Array:
        return _in_program(query, key, xp)

    def tangent(factors: Arrays, _: Array, tangents: Arrays) -> Array:
        query, key = (finite_or_zero(x, xp) for x in factors)
        return xp.add(multiply(tangents[0], key), multiply(query, tangents[1]))

    return backend.with_tangent(multiply, tangent, query, key)


def _in_program(query: Array, key: Array, xp: Namespace) -> Array:
    """Products whose transpose a compiler need not write to memory: for a few queries, that of the product is small."""
    if _are_few(query, key):
        return xp.matrix_transpose(xp.matmul(key, xp.matrix_transpose(query)))
    return xp.matmul(query, xp.matrix_transpose(key))


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
    xp = backend.namespace
    weights = fold_group(weights, facts.group, xp=xp) if facts.is_folded else weights
    value = repeat_kv(value, facts.group, xp=xp) if facts.is_repeated else value
    output = _guarded_averages(weights, value, facts, backend) if facts.is_guarded else xp.matmul(weights, value)
    output = unfold_group(output, facts.group, xp=xp) if facts.is_folded else output
    return xp.where(facts.empty, 0.0, output) if facts.is_guarded and facts.empty is not None else output


def _guarded_averages(weights: Array, value: Array, facts: Facts, backend: Backend) -> Array:
    xp, cond = backend.namespace, backend.loops.cond
    is_folded, group = facts.is_folded, facts.group  # alone: what JAX keeps of a trace must hold no array of it

    def average(weights: Array, value: Array, _: Array) -> Array:
        found = xp.matmul(weights, value)
        return cond(
            is_clean(found, xp),
            lambda: found,
            # one product of all columns would be compiled in five times the time by XLA
            lambda: with_infinities((xp.matmul(weights, part) for part in value_parts(value, xp)), xp),
        )

    def allowed_weights(weights: Array, allowed: Array) -> Array:
        if not is_folded:
            return xp.where(allowed, weights, 0.0)
        return fold_group(xp.where(allowed, unfold_group(weights, group, xp=xp), 0.0), group, xp=xp)

    def tangent(factors: Arrays, found: Array, tangents: Arrays) -> Array:
        weights, value, allowed = factors
        shown = xp.where(xp.isfinite(found), scalar_like(1.0, found, xp), math.nan)
        of_weights = xp.multiply(xp.matmul(tangents[0], finite_or_zero(value, xp)), shown)
        weights = cond(is_clean(found, xp), lambda: weights, lambda: allowed_weights(weights, allowed))
        return xp.add(of_weights, xp.matmul(weights, xp.where(xp.isfinite(value), tangents[1], 0.0)))

    return backend.with_tangent(average, tangent, weights, value, facts.allowed)


def finite_or_zero(x: Array, xp: Namespace) -> Array:
    """An array with 0 for what is not finite."""
    return xp.where(xp.isfinite(x), x, 0.0)
