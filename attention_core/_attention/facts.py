"""What is known of a call before its scores are computed, and products by it: query, key and value do not decide it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace, has_sharding, length, one_program, sizes
from attention_core._attention.call import (
    Call,
    fold_group,
    group_size,
    repeat_kv,
    scale_like,
    score_positions,
    unfold_group,
    upcast_call,
)
from attention_core._attention.parts import every_query_has_a_key, has_few_queries
from attention_core._attention.scores import allowed_by
from attention_core._backend import Backend, can_be_read, is_exporting
from attention_core.masks import Mask, Positions

MAX_KEPT = 2**16  # scores of a mask that is kept: making a larger one takes less time than what it masks


class Facts(NamedTuple):
    """Facts of a call."""

    scale: Any  # what queries are multiplied by
    num_heads: Any  # query heads
    group: Any  # query heads for each key/value head
    is_folded: bool  # whether the queries of a group are one below the other in a product
    is_repeated: bool  # whether keys and values are repeated
    at: Positions | None  # where the scores stand, if a rule, a function of scores or dropout asks
    allowed: Array | None  # which pairs may attend, by mask and bias; None for all
    empty: Array | None  # which queries (..., M, 1) may not attend to any key; None if there is none
    is_readable: bool  # whether values can be read now, and no accelerator is waited for, if something is masked
    is_sanitized: bool = False  # whether rows may be NaN, and their gradients are to reach nothing that is masked


def facts_of(call: Call) -> Facts:
    """The facts of a call, whose arrays of 16 bits are in the type of the computation already."""
    xp, group = call.xp, group_size(call.query, call.key, call.xp)
    asked = call.score_mod is not None or call.dropout is not None or isinstance(call.mask, Mask)
    at = score_positions(call.query, call.key, call.starts, xp) if asked else None
    allowed = allowed_by(call.mask, call.bias, at, xp)
    has_empty = allowed is not None and not every_query_has_a_key(call)
    is_folded = folds_groups(call, group)
    return Facts(
        scale_like(call.query, call.scale, xp),
        length(call.query, -3, xp=xp),
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

    Libraries that differentiate keep no array: what they make may belong to a trace, or to a mode of the library.
    """
    xp, (*leading, _, rows, _), columns = call.xp, call.query.shape, call.key.shape[-2]
    is_small = math.prod(leading) * rows * columns <= MAX_KEPT
    is_kept = is_small and not call.backend.differentiates and can_be_read(*call[:3])
    if call.mask is not None and not is_kept:
        return None
    facts = facts_of(upcast_call(call))
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


def products(query: Array, key: Array, facts: Facts, backend: Backend) -> Array:
    """The products (..., H, M, N) of all queries (..., H, M, D) with the keys (..., G, N, D) of their group."""
    xp = backend.namespace
    query = fold_group(query, facts.group, xp=xp) if facts.is_folded else query
    key = repeat_kv(key, facts.group, xp=xp) if facts.is_repeated else key
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
        return xp.matmul(weights, repeat_kv(value, facts.group, xp=xp) if facts.is_repeated else value)
    return unfold_group(xp.matmul(fold_group(weights, facts.group, xp=xp), value), facts.group, xp=xp)
