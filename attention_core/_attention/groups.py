"""Products of query heads with the key/value head that they share."""

from __future__ import annotations

from attention_core._arrays import Array, Namespace, sizes
from attention_core._attention.call import fold_group, repeat_kv, unfold_group
from attention_core._attention.facts import Facts
from attention_core._backend import Backend


def products(query: Array, key: Array, facts: Facts, backend: Backend) -> Array:
    """The products (..., H, M, N) of all queries (..., H, M, D) with the keys (..., G, N, D) of their group."""
    xp = backend.namespace
    query = fold_group(query, facts.group, xp=xp) if facts.is_folded else query
    key = key if facts.is_folded else repeat_kv(key, facts.group, xp=xp)
    if backend.loops.traced and _are_few(query, key):
        # A compiler may write the transpose of all keys to memory. That of the product is smaller for a few queries.
        raw = xp.matrix_transpose(xp.matmul(key, xp.matrix_transpose(query)))
    else:
        raw = xp.matmul(query, xp.matrix_transpose(key))
    return unfold_group(raw, facts.group, xp=xp) if facts.is_folded else raw


def _are_few(query: Array, key: Array) -> bool:
    (rows, width), columns = sizes(query)[-2:], sizes(key)[-2]
    if not (isinstance(rows, int) and isinstance(width, int) and isinstance(columns, int)):
        return False
    return rows <= min(width, columns // 2)


def averages(weights: Array, value: Array, facts: Facts, xp: Namespace) -> Array:
    """The sums (..., H, M, E) of the values (..., G, N, E) of each group, by weights (..., H, M, N)."""
    if not facts.is_folded:
        return xp.matmul(weights, repeat_kv(value, facts.group, xp=xp))
    return unfold_group(xp.matmul(fold_group(weights, facts.group, xp=xp), value), facts.group, xp=xp)
