"""The definition of attention, with all scores at once."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace, has_sharding, is_on_host, length, sizes
from attention_core._attention.call import (
    Attention,
    Call,
    apply_dropout,
    fold_group,
    group_size,
    repeat_kv,
    scale_like,
    score_positions,
    unfold_group,
    upcast_call,
)
from attention_core._attention.key_range import has_few_queries, has_key_for_every_query, masked_columns
from attention_core._attention.magnitudes import known_finite_products
from attention_core._attention.scores import allowed_by, masked_scores, modify_scores
from attention_core._attention.small_masks import SmallMask, small_mask
from attention_core._attention.softmax import finite_vectors, softmax, weighted_sum
from attention_core._backend import Loops, is_concrete, is_exporting
from attention_core.masks import Mask, Positions


class DensePlan(NamedTuple):
    """What types, lengths and options decide of the dense form, whatever the values are.

    Attributes
    ----------
    group : int or Array
        How often a key/value head is repeated.
    is_folded : bool
        Whether the queries of a group are one below the other.
    scale : float or Array
        What queries are multiplied by.
    kept : SmallMask or None
    """

    group: Any
    is_folded: bool
    scale: Any
    kept: SmallMask | None


def plan_dense(call: Call) -> DensePlan:
    """The plan of a call, whose arrays of 16 bits may be in the type of the computation already."""
    group = group_size(call.query, call.key, call.xp)
    asked = call.score_mod is not None or call.dropout is not None
    return DensePlan(
        group,
        not repeats_keys(call, group) and not (isinstance(group, int) and group == 1),
        scale_like(call.query, call.scale, call.xp),
        None if asked or call.bias is not None or call.mask is None else small_mask(call),
    )


def dense(call: Call, *, weights: bool = False, logsumexp: bool = True, plan: DensePlan | None = None) -> Attention:
    """Attention from all scores at once: time and memory grow with M × N.

    Asking for weights or logsumexp never changes the output. With a softmax of the library, the output uses it, and
    the others are computed separately. A plan may be one of an earlier call with these types, lengths and options.
    """
    call = upcast_call(call)
    plan = plan_dense(call) if plan is None else plan
    at, allowed, may_be_empty = _where_allowed(call, plan.kept)
    wanted: dict[str, Any] = {"plan": plan, "weights": weights, "logsumexp": logsumexp, "may_be_empty": may_be_empty}
    if allowed is None or call.query.shape[-2] == call.key.shape[-2] or not _looks_afterwards(call):
        # No accelerator is waited for.
        nothing_leaks = (
            allowed is None or call.assume_finite or (is_on_host(call.query) and known_finite_products(call))
        )
        return _attend(call, at, allowed, _products(call, plan, nothing_leaks), nothing_leaks=nothing_leaks, **wanted)
    xp = call.xp
    raw = _products(call, plan, True)
    if bool(xp.isfinite(xp.sum(raw))):  # which takes one pass; a sum that overflows costs time alone
        result = _attend(call, at, allowed, raw, nothing_leaks=True, **wanted)
        if bool(xp.isfinite(xp.sum(result.output))):
            return result
    return _attend(call, at, allowed, _products(call, plan, False), nothing_leaks=False, **wanted)


def repeats_keys(call: Call, group: Any) -> bool:
    """Whether a key and value are repeated for all heads of a group; else their queries are one below the other.

    In exported programs, PyTorch cannot prove that folded rows of any number come apart again. In JAX, heads or rows
    may be sharded, and folding would gather them; a few queries are gathered for less than repeated keys cost. A
    library without a backend may be a lazy one, which reshapes little.
    """
    if isinstance(group, int) and group == 1:
        return False
    if not call.backend.owns(call.query) or is_exporting(call.query):
        return True
    return has_sharding(call.query) and not has_few_queries(sizes(call.query)[-2], sizes(call.key)[-2])


def _looks_afterwards(call: Call) -> bool:
    """Whether scores and output of a few queries are looked at, and no key or value.

    They are finite only if all that was multiplied is. A gradient would be computed from what they were computed from.
    """
    rows, columns = call.query.shape[-2], call.key.shape[-2]
    return (
        not call.assume_finite
        and not call.backend.differentiates
        and has_few_queries(rows, columns)
        and is_on_host(call.query)
        and all(map(is_concrete, (call.query, call.key, call.value)))
    )


def _attend(
    call: Call,
    at: Positions | None,
    allowed: Array | None,
    raw: Array,
    *,
    plan: DensePlan,
    nothing_leaks: bool,
    weights: bool,
    logsumexp: bool,
    may_be_empty: bool,
) -> Attention:
    """Attention out of the products of queries and keys (..., H, M, N), where rows may be empty of keys or not."""
    xp, backend, dropout = call.xp, call.backend, call.dropout
    scores = _scores(call, allowed, at, raw, plan.kept)  # (..., H, M, N)
    probabilities = _one_pass_softmax(call, scores, allowed)
    exponentials = total = log_normalizer = None
    if probabilities is None or weights or logsumexp:
        constant = backend.stop_gradient if backend.differentiates else None
        exp_difference = None if backend.differentiates else backend.loops.exp_difference
        exponentials, total, log_normalizer = softmax(
            scores,
            allowed if may_be_empty else None,
            constant=constant,
            exp_difference=exp_difference,
            logsumexp=logsumexp,
            xp=xp,
        )
    numerators = exponentials if probabilities is None else probabilities
    cond = backend.loops.cond if backend.loops.traced else None
    kept = numerators
    if dropout is not None:
        kept = apply_dropout(numerators, dropout, at, length(call.query, -3, xp=xp), xp=xp)
    group, is_folded, *_ = plan
    folded = fold_group(kept, group, xp=xp) if is_folded else kept
    value = call.value if is_folded else repeat_kv(call.value, group, xp=xp)
    output = weighted_sum(folded, value, None if nothing_leaks else allowed, cond=cond, xp=xp)
    output = unfold_group(output, group, xp=xp) if is_folded else output
    if probabilities is None:
        output = xp.divide(output, total)
    return Attention(
        output if kept is numerators else xp.multiply(output, dropout.scale),  # type: ignore[union-attr]
        xp.divide(exponentials, total) if weights else None,
        None if log_normalizer is None else xp.squeeze(log_normalizer, axis=-1),
    )


def dense_scores(call: Call) -> Array:
    """All scores of a call, with -inf where masked."""
    call = upcast_call(call)
    plan = plan_dense(call)
    at, allowed, _ = _where_allowed(call, plan.kept)
    nothing_leaks = allowed is None or call.assume_finite or (is_on_host(call.query) and known_finite_products(call))
    return _scores(call, allowed, at, _products(call, plan, nothing_leaks), plan.kept)


def _where_allowed(call: Call, kept: SmallMask | None) -> tuple[Positions | None, Array | None, bool]:
    """The positions of all scores, if anything asks for them; where attention is allowed; whether a row may be empty.

    A row is empty if it has no key that is allowed.
    """
    if kept is not None:
        return None, kept.allowed, kept.may_be_empty
    asked = call.score_mod is not None or call.dropout is not None or isinstance(call.mask, Mask)
    at = score_positions(call.query, call.key, call.starts, call.xp) if asked else None
    return at, allowed_by(call.mask, call.bias, at, call.xp), call.bias is not None or not has_key_for_every_query(call)


def _scores(call: Call, allowed: Array | None, at: Positions | None, raw: Array, kept: SmallMask | None) -> Array:
    """The scores out of products, which may be written over."""
    xp, backend = call.xp, call.backend
    modify: Any = None
    mask: Any = None
    writes = backend.loops.takes_out and not backend.differentiates
    if writes and allowed is not None and has_few_queries(call.query.shape[-2], call.key.shape[-2]):
        mask = functools.partial(_mask_columns, call, allowed, masked_columns(call) if kept is None else kept.columns)
    if call.softcap is not None or call.score_mod is not None:
        raw = raw if allowed is None else xp.where(allowed, raw, 0.0)
        modify = functools.partial(modify_scores, softcap=call.softcap, score_mod=call.score_mod, at=at, xp=xp)
    return masked_scores(raw, allowed, call.bias, modify, mask=mask, xp=xp)


def _mask_columns(call: Call, allowed: Array, parts: list[slice], scores: Array) -> Array:
    """The scores with -inf where masked, in their memory, by a choice in those columns alone that are masked somewhere.

    Of a step of decoding, these are hardly any.
    """
    columns = call.key.shape[-2]
    for part in parts:
        of_part = allowed if allowed.shape[-1] == 1 < columns else allowed[..., part]
        scores[..., part] = call.xp.where(of_part, scores[..., part], -math.inf)
    return scores


def _products(call: Call, plan: DensePlan, nothing_leaks: bool) -> Array:
    """The products of all queries and keys (..., H, M, N), in which nothing that is not finite may leak."""
    xp, loops = call.xp, call.backend.loops
    group, is_folded, scale, _ = plan
    query = fold_group(call.query, group, xp=xp) if is_folded else call.query
    key = call.key if is_folded else repeat_kv(call.key, group, xp=xp)
    operands = query, key, scale, loops, xp
    if nothing_leaks:
        raw = _product(*operands)
    elif not loops.traced or None in (*sizes(query), *sizes(key)):  # XLA has no gradient of such a condition
        raw = _clean_product(*operands)
    else:
        finite = xp.isfinite(xp.add(xp.sum(query), xp.sum(key)))
        raw = loops.cond(finite, lambda: _product(*operands), lambda: _clean_product(*operands))
    return unfold_group(raw, group, xp=xp) if is_folded else raw


def _product(query: Array, key: Array, scale: float | Array, loops: Loops, xp: Namespace) -> Array:
    """The products of scaled queries and keys.

    A compiler may write the transpose of all keys to memory. That of the product is smaller for a few queries.
    """
    scaled = xp.multiply(query, scale)
    (rows, width), columns = sizes(query)[-2:], sizes(key)[-2]
    if (
        loops.traced
        and (isinstance(rows, int) and isinstance(width, int) and isinstance(columns, int))
        and rows <= min(width, columns // 2)
    ):
        return xp.matrix_transpose(xp.matmul(key, xp.matrix_transpose(scaled)))
    return xp.matmul(scaled, xp.matrix_transpose(key))


def _clean_product(query: Array, key: Array, scale: float | Array, loops: Loops, xp: Namespace) -> Array:
    """The same, with NaN for each vector that is not finite: what is masked among them must reach no gradient."""
    query, query_nan = finite_vectors(query, xp=xp)
    key, key_nan = finite_vectors(key, xp=xp)
    nonfinite = xp.add(xp.expand_dims(query_nan, axis=-1), xp.expand_dims(key_nan, axis=-2))  # 0 or NaN
    return xp.add(_product(query, key, scale, loops, xp), nonfinite)


def _one_pass_softmax(call: Call, scores: Array, allowed: Array | None) -> Array | None:
    """The weights, if the library has a softmax of one pass: 0 where not allowed, even in a fully masked row.

    It may give NaN to one key alone where one of them is NaN, and dropout must not drop that key.
    """
    library_softmax = call.backend.loops.softmax
    if library_softmax is None or (call.dropout is not None and call.dropout.rate):
        return None
    probabilities = library_softmax(scores)
    return probabilities if allowed is None else call.xp.where(allowed, probabilities, 0.0)
