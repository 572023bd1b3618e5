"""The definition of attention, with all scores at once."""

from __future__ import annotations

import math
from typing import Any

from attention_core._arrays import Array, Namespace, shape, sizes
from attention_core._attention.call import (
    Attention,
    Call,
    apply_dropout,
    dropout_scale,
    group_size,
    modify_scores,
    repeat_kv,
    scale_query,
    score_positions,
    upcast_call,
)
from attention_core._attention.magnitudes import known_finite_products
from attention_core._attention.softmax import finite_vectors, softmax, weighted_sum
from attention_core.masks import Mask, Positions
from attention_core.masks._mask import allowed_pairs


def dense(call: Call, *, weights: bool = False, logsumexp: bool = True) -> Attention:
    """Attention from all scores at once: time and memory grow with M × N.

    What is returned beside the output does not change its bits: where a library has the weights in one pass, the output
    is theirs, and what is asked for beside it is computed apart.
    """
    call = upcast_call(call)
    xp, dropout = call.xp, call.dropout
    at = _positions_if_needed(call)
    allowed = _allowed(call.mask, call.bias, at, xp)
    tame = _seen_finite(call, allowed)
    times = group_size(call.query, call.key, xp)
    key, value = repeat_kv(call.key, times, xp=xp), repeat_kv(call.value, times, xp=xp)
    scores = _scores(call, key, allowed, at, tame)  # (..., H, M, N)
    shares = _one_pass_weights(call, scores, allowed)
    beside = shares is None or weights or logsumexp
    exponentials, total, normalizer = (
        softmax(scores, allowed, **_softmax_options(call), xp=xp) if beside else (None,) * 3
    )
    numerators = exponentials if shares is None else shares
    kept = apply_dropout(numerators, dropout, at, shape(call.query, xp=xp)[-3], xp)
    output = weighted_sum(kept, value, None if tame else allowed, choose=_traced_choice(call), xp=xp)
    if shares is None:
        output = xp.divide(output, total)
    return Attention(
        output if kept is numerators else xp.multiply(output, dropout_scale(dropout)),
        xp.divide(exponentials, total) if weights else None,
        xp.squeeze(normalizer, axis=-1) if logsumexp else None,
    )


def dense_scores(call: Call) -> Array:
    """The scores as far as the call goes, masked with -inf."""
    call = upcast_call(call)
    at = _positions_if_needed(call)
    allowed = _allowed(call.mask, call.bias, at, call.xp)
    key = repeat_kv(call.key, group_size(call.query, call.key, call.xp), xp=call.xp)
    return _scores(call, key, allowed, at, _seen_finite(call, allowed))


def _positions_if_needed(call: Call) -> Positions | None:
    """The positions of all scores, if anything asks for them."""
    asked = isinstance(call.mask, Mask) or call.score_mod is not None or call.dropout is not None
    return score_positions(call.query, call.key, call.starts, call.xp) if asked else None


def _scores(call: Call, key: Array, allowed: Array | None, at: Positions | None, tame: bool) -> Array:
    xp, choose = call.xp, _traced_choice(call)

    def plain() -> Array:
        return xp.matmul(scale_query(call.query, call.scale, xp), xp.matrix_transpose(key))

    def cleaned() -> Array:
        query, of_query = finite_vectors(call.query, xp=xp)
        finite_key, of_key = finite_vectors(key, xp=xp)
        rubbish = xp.add(xp.expand_dims(of_query, axis=-1), xp.expand_dims(of_key, axis=-2))  # 0 or nan
        return xp.add(xp.matmul(scale_query(query, call.scale, xp), xp.matrix_transpose(finite_key)), rubbish)

    if allowed is None or tame:
        scores = plain()
    elif choose is None or None in (*sizes(call.query), *sizes(call.key)):  # XLA has no gradient of such a choice
        scores = cleaned()
    else:
        scores = choose(xp.isfinite(xp.add(xp.sum(call.query), xp.sum(key))), plain, cleaned)
    if call.softcap is not None or call.score_mod is not None:
        if allowed is not None:
            scores = xp.where(allowed, scores, 0.0)  # what overflows and is masked must not meet the cap's gradient
        scores = modify_scores(scores, call.softcap, call.score_mod, at, xp)
    if call.bias is not None or call.score_mod is not None:
        scores = xp.add(scores, 0.0 if call.bias is None else call.bias)  # in memory of its own
    if allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)
    return scores


def _allowed(mask: Mask | Array | None, bias: Array | None, at: Positions | None, xp: Namespace) -> Array | None:
    """Where attention is allowed: by the mask, and by a bias that is not -inf; ``None`` for everywhere."""
    allowed = None if mask is None else allowed_pairs(mask, at, xp=xp)
    if bias is None:
        return allowed
    admitted = xp.not_equal(bias if len(bias.shape) else xp.reshape(bias, (1,)), -math.inf)
    return admitted if allowed is None else xp.logical_and(allowed, admitted)


def _seen_finite(call: Call, allowed: Array | None) -> bool:
    """Whether what is masked is seen to be finite, so that it cannot leak. No accelerator is waited for."""
    on_host = "cpu" in str(getattr(call.query, "device", "cpu")).lower()
    return allowed is not None and on_host and known_finite_products(call)


def _one_pass_weights(call: Call, scores: Array, allowed: Array | None) -> Array | None:
    """The weights, if the library has a softmax of one pass: 0 where not allowed, even where nothing is.

    It may say nan for one key alone where one is attended, which dropout must not drop.
    """
    loops = call.backend.loops
    if loops.softmax is None or (call.dropout is not None and call.dropout.rate):
        return None
    shares = loops.softmax(scores)
    return shares if allowed is None else call.xp.where(allowed, shares, 0.0)


def _softmax_options(call: Call) -> dict[str, Any]:
    """What keeps an array from being differentiated by; and exponentials over scores, if nothing is differentiated."""
    backend = call.backend
    if backend.differentiates:
        return {"constant": backend.stop_gradient}
    return {"exp_difference": backend.loops.exp_difference}


def _traced_choice(call: Call) -> Any:
    """What runs one of two functions, if the library can without reading the condition."""
    return call.backend.loops.cond if call.backend.loops.traced else None
