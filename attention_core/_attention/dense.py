"""The definition of attention: all scores at once. Every other way is tested against it.

It is followed by its guard: what is masked reaches nothing. Then come the two products, of queries and keys, and of
weights and values, each with the heads of its group. A program that cannot read values looks at products, not at what
goes into them. A decoding step reads each key and value once. To look at them first, or to write them with 0 for what
is not finite, would take longer than the step.
"""

from __future__ import annotations

import math
from typing import Any

from .._arrays import Array, Arrays, Namespace, scalar_like, sizes
from .._backend import Backend, is_on_host
from .call import (
    Call,
    Result,
    apply_dropout,
    fold_group,
    modify_scores,
    num_heads_of_whole,
    repeat_kv,
    unfold_group,
    upcast_call,
)
from .facts import (
    Facts,
    facts_of,
    inputs_are_finite,
    is_clean,
    sanitized_keys,
    value_parts,
    with_infinities,
)
from .softmax import softmax

LEAST_WEIGHT = 1e-30  # of what is allowed and not finite, next to weights in sums of which only the sign counts


def dense(call: Call, facts: Facts, *, weights: bool = True, logsumexp: bool = True) -> Result:
    r"""Attention of queries (..., H, M, D) to keys (..., G, N, D) and values (..., G, N, E).

    .. math:: o_i = \sum_j p_{ij} v_j, \qquad p_{ij} = \exp(s_{ij} - \ell_i), \qquad \ell_i = \log \sum_j \exp s_{ij}

    over the keys that query i may attend to. Asking for weights or logsumexp never changes the output.
    """
    xp, dropout, one_pass = call.xp, call.dropout, call.backend.loops.softmax
    if dropout is not None and dropout.rate:  # errors of few weights that are kept do not average out
        one_pass = None
    scores = dense_scores(call, facts, 0.0 if one_pass else -math.inf)  # (..., H, M, N)
    # (..., H, M, N), their sums (..., H, M, 1), and twice (..., H, M)
    exponentials, total, *found = softmax(scores, call, facts, one_pass, weights=weights, logsumexp=logsumexp)
    kept = exponentials
    if dropout is not None:
        kept = apply_dropout(kept, dropout, facts.at, num_heads_of_whole(call), xp)
    output = xp.divide(averages(kept, call.value, facts, call.backend), total)  # (..., H, M, E)
    output = output if dropout is None else xp.multiply(output, dropout.scale)
    return Result(output, xp.divide(exponentials, total) if weights else None, *found)


def dense_scores(call: Call, facts: Facts, of_empty: float = -math.inf) -> Array:
    r"""Scores :math:`s_{ij} = f(c \tanh(\sigma q_i \cdot k_j / c)) + b_{ij}`, and -inf where i may not attend to j.

    A fully masked row may have another number.
    """
    xp, allowed = call.xp, facts.allowed  # (..., M, N) or None
    query = xp.multiply(call.query, facts.scale)  # so that a score that fits does not overflow on the way
    scores = products(query, call.key, facts, call.backend)  # (..., H, M, N)
    if call.softcap is not None or call.score_mod is not None:
        scores = modify_scores(scores, call.softcap, call.score_mod, facts.at, allowed, xp=xp)
    scores = scores if call.bias is None else xp.add(scores, call.bias)
    if allowed is None:
        return scores
    is_plain = facts.empty is None or of_empty == -math.inf
    hidden = -math.inf if is_plain else xp.where(facts.empty, scalar_like(of_empty, scores, xp), -math.inf)
    return xp.where(allowed, scores, hidden)


def guarded_dense(call: Call, facts: Facts | None = None, *, weights: bool = False, logsumexp: bool = True) -> Result:
    """Attention from all scores at once. The facts may be those of an earlier call of this signature."""
    if facts is None:
        call = upcast_call(call)
        facts = facts_of(call)
    backend, wanted = call.backend, {"weights": weights, "logsumexp": logsumexp}
    if facts.allowed is None or call.assume_finite:
        return dense(call, facts, **wanted)
    if backend.loops.traced and not facts.is_readable:
        return dense(call, facts._replace(is_guarded=True), **wanted)
    if facts.is_readable and (not backend.differentiates or bool(inputs_are_finite(call))):
        result = dense(call, facts, **wanted)
        if backend.differentiates or bool(is_clean(result.output, call.xp)):
            return result
    facts = facts._replace(has_parts=True, is_sanitized=backend.differentiates and is_on_host(call.query))
    return dense(sanitized_keys(call, facts) if backend.differentiates else call, facts, **wanted)


def guarded_scores(call: Call) -> Array:
    """All scores of a call, with -inf where masked, which nothing but a gradient gets through."""
    call = upcast_call(call)
    facts = facts_of(call)
    if facts.allowed is None or not call.backend.differentiates:
        return dense_scores(call, facts)
    if call.backend.loops.traced and not facts.is_readable:
        return dense_scores(call, facts._replace(is_guarded=True))
    is_finite = facts.is_readable and bool(inputs_are_finite(call))
    return dense_scores(call if is_finite else sanitized_keys(call, facts), facts)


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
    value = repeat_kv(value, facts.group, xp=xp) if facts.is_repeated else value
    if not facts.is_guarded:
        sums = _sums_of_parts if facts.has_parts else _sums
        return sums(weights, value, facts.allowed, facts.group if facts.is_folded else 1, xp)
    output = _guarded_averages(weights, value, facts, backend)
    return output if facts.empty is None else xp.where(facts.empty, 0.0, output)


def _sums(weights: Array, value: Array, _: Any, group: Any, xp: Namespace) -> Array:
    """The sums of values by weights, with the rows of a group one below the other."""
    if isinstance(group, int) and group == 1:
        return xp.matmul(weights, value)
    return unfold_group(xp.matmul(fold_group(weights, group, xp=xp), value), group, xp=xp)


def _sums_of_parts(weights: Array, value: Array, allowed: Array, group: Any, xp: Namespace) -> Array:
    """The same of values that may not be finite: what is allowed shows, even if its weight underflowed or is dropped.

    One product of all parts would be compiled in five times the time by XLA.
    """
    finite, *indicators = value_parts(value, xp)
    shown = xp.where(allowed, xp.add(weights, LEAST_WEIGHT), 0.0)
    pairs = (weights, finite), *((shown, each) for each in indicators)
    return with_infinities((_sums(*pair, allowed, group, xp) for pair in pairs), xp)


def _guarded_averages(weights: Array, value: Array, facts: Facts, backend: Backend) -> Array:
    xp, cond = backend.namespace, backend.loops.cond
    group = facts.group if facts.is_folded else 1  # alone: what JAX keeps of a trace must hold no array of it

    def average(weights: Array, value: Array, allowed: Array) -> Array:
        found = _sums(weights, value, allowed, group, xp)
        return cond(is_clean(found, xp), lambda: found, lambda: _sums_of_parts(weights, value, allowed, group, xp))

    def tangent(factors: Arrays, found: Array, tangents: Arrays) -> Array:
        weights, value, allowed = factors
        shown = xp.where(xp.isfinite(found), scalar_like(1.0, found, xp), math.nan)
        of_weights = xp.multiply(_sums(tangents[0], finite_or_zero(value, xp), allowed, group, xp), shown)
        weights = cond(is_clean(found, xp), lambda: weights, lambda: xp.where(allowed, weights, 0.0))
        of_values = _sums(weights, xp.where(xp.isfinite(value), tangents[1], 0.0), allowed, group, xp)
        return xp.add(of_weights, of_values)

    return backend.with_tangent(average, tangent, weights, value, facts.allowed)


def finite_or_zero(x: Array, xp: Namespace) -> Array:
    """An array with 0 for what is not finite."""
    return xp.where(xp.isfinite(x), x, 0.0)
