"""The two products of attention: scores of queries and keys, and averages of values, each with the heads of its group.

A program that cannot read values looks at products, not at what goes into them: to look at all keys and values, or to
write them with 0 for what is not finite, takes longer than a decoding step takes otherwise.
"""

from __future__ import annotations

import math

from attention_core._arrays import Array, scalar_like, sizes
from attention_core._attention.call import fold_group, repeat_kv, unfold_group
from attention_core._attention.facts import Facts
from attention_core._attention.finite import is_clean, value_columns, with_infinities
from attention_core._backend import Backend


def products(query: Array, key: Array, facts: Facts, backend: Backend) -> Array:
    """The products (..., H, M, N) of all queries (..., H, M, D) with the keys (..., G, N, D) of their group.

    A product with a key that is not finite is chosen away where that is masked. Its derivatives are those of finite
    factors, as 0 times NaN would be NaN.
    """
    xp = backend.namespace
    query = fold_group(query, facts.group, xp=xp) if facts.is_folded else query
    key = repeat_kv(key, facts.group, xp=xp) if facts.is_repeated else key

    def multiply(query: Array, key: Array) -> Array:
        if backend.loops.traced and _are_few(query, key):
            # A compiler may write the transpose of all keys to memory; for a few queries, the product's is smaller.
            return xp.matrix_transpose(xp.matmul(key, xp.matrix_transpose(query)))
        return xp.matmul(query, xp.matrix_transpose(key))

    def multiply_finite(query: Array, key: Array, _: Array) -> Array:
        return multiply(*(xp.where(xp.isfinite(x), x, 0.0) for x in (query, key)))

    if facts.is_guarded:
        raw = backend.with_derivative_of(multiply, multiply_finite, query, key)
    else:
        raw = multiply(query, key)
    return unfold_group(raw, facts.group, xp=xp) if facts.is_folded else raw


def _are_few(query: Array, key: Array) -> bool:
    (rows, width), columns = sizes(query)[-2:], sizes(key)[-2]
    if not (isinstance(rows, int) and isinstance(width, int) and isinstance(columns, int)):
        return False
    return rows <= min(width, columns // 2)


def averages(weights: Array, value: Array, facts: Facts, backend: Backend) -> Array:
    """The sums (..., H, M, E) of the values (..., G, N, E) of each group, by weights (..., H, M, N).

    Where a sum is not finite, a program averages finite values and indicators of infinities. An infinity that is
    attended to has no finite gradient; one that is masked has none.
    """
    xp = backend.namespace
    weights = fold_group(weights, facts.group, xp=xp) if facts.is_folded else weights
    value = repeat_kv(value, facts.group, xp=xp) if facts.is_repeated else value

    def average(weights: Array, value: Array) -> Array:
        found = xp.matmul(weights, value)
        return backend.loops.cond(
            is_clean(found, xp),
            lambda: found,
            lambda: with_infinities(xp.matmul(weights, value_columns(value, xp=xp)), xp),
        )

    def average_finite(weights: Array, value: Array, found: Array) -> Array:
        nan = xp.where(xp.isfinite(found), scalar_like(0.0, found, xp), math.nan)
        total = xp.sum(weights, axis=-1, keepdims=True)
        return xp.add(xp.matmul(weights, xp.where(xp.isfinite(value), value, 0.0)), xp.multiply(nan, total))

    if facts.is_guarded:
        output = backend.with_derivative_of(average, average_finite, weights, value)
    else:
        output = xp.matmul(weights, value)
    return unfold_group(output, facts.group, xp=xp) if facts.is_folded else output
