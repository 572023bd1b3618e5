"""The definition of attention: all scores at once. Every other way is tested against it."""

from __future__ import annotations

import math

from .._arrays import Array, scalar_like
from .call import Call, Result, apply_dropout, num_heads_of_whole
from .facts import Facts
from .products import averages, products
from .scores import modify_scores
from .softmax import softmax


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
