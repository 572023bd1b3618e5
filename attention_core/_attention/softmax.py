"""A softmax over the keys that a query may attend to, and sums of exponentials."""

from __future__ import annotations

import math
from typing import Any

from .._arithmetic.exact import two_sum
from .._arrays import Array, Namespace, length, on_device_of, shape
from .call import Call
from .facts import Facts


def softmax(
    scores: Array, call: Call, facts: Facts, one_pass: Any, /, *, weights: bool = True, logsumexp: bool = True
) -> tuple[Array, Any, Array | None, Array | None]:
    r"""Exponentials of the scores (..., M, N), their total (..., M, 1), and if it is asked for, the logsumexp.

    That is (..., M), and then what rounding took from it: of large :math:`t_i`, all of :math:`\log z_i`.

    .. math:: e_{ij} = \exp(s_{ij} - t_i), \qquad z_i = \sum_j e_{ij}, \qquad \ell_i = t_i + \log z_i,
        \qquad t_i = \max_j s_{ij}

    The weights are :math:`p_{ij} = e_{ij} / z_i`; dividing the sum of values instead rounds once, and keeps equal keys
    exact. They and :math:`\ell_i` do not depend on :math:`t_i`, so derivatives take it as a constant. A row that is
    empty of keys has :math:`e_{ij} = 0`, :math:`z_i = 1` and :math:`\ell_i = -\infty`, with gradients exactly 0. Mask
    and bias decide which rows these are, never the scores. The scores may be written over.

    A softmax of the library, ``one_pass``, gives the weights, with a total of 1. Its scores are 0 in a row that is
    empty of keys, as its gradient would be NaN otherwise, if only until the weights are chosen away. That gradient sums
    over all keys of a row, so that no gradient may come from one that is not allowed. Guarded averages take weights as
    they are, unless the weights are asked for, too.
    """
    xp, backend, allowed, empty = call.xp, call.backend, facts.allowed, facts.empty
    num_keys: Any = scores.shape[-1]
    num_keys = num_keys if isinstance(num_keys, int) else length(scores, -1, xp=xp)
    if isinstance(num_keys, int) and num_keys == 0:
        one = xp.ones((*shape(scores, xp=xp)[:-1], 1), dtype=scores.dtype, **on_device_of(scores))
        row = xp.squeeze(one, axis=-1)
        return (scores, one, *((xp.multiply(row, -math.inf), xp.zeros_like(row)) if logsumexp else (None, None)))
    top: Any = xp.max(scores, axis=-1, keepdims=True) if logsumexp or one_pass is None else None
    total: Any = 1.0
    if one_pass is not None:
        exponentials = one_pass(scores)
        is_zero = empty is None and call.assume_finite  # and gradients of what is masked are finite
        if allowed is not None and not is_zero and (weights or not facts.is_guarded):
            exponentials = xp.where(allowed, exponentials, 0.0)
        log_total = None
        if logsumexp:
            most = xp.max(exponentials, axis=-1, keepdims=True)
            log_total = xp.negative(xp.log(most if empty is None else xp.where(empty, 1.0, most)))
            if not isinstance(num_keys, int):  # there may turn out to be no keys, and no maximum
                log_total = xp.where(xp.equal(num_keys, 0), 0.0, log_total)
    else:
        top = backend.stop_gradient(top) if backend.differentiates else top
        top = top if empty is None else xp.where(empty, 0.0, top)  # -inf - -inf would be nan
        exponentials = (
            xp.exp(xp.subtract(scores, top)) if backend.differentiates else backend.loops.exp_difference(scores, top)
        )
        total = xp.sum(exponentials, axis=-1, keepdims=True)
        if not isinstance(num_keys, int):  # there may turn out to be no keys
            total = xp.where(xp.equal(total, 0.0), 1.0, total)
        total = total if empty is None else xp.where(empty, 1.0, total)  # 0 / 0 and log(0)
        log_total = xp.log(total) if logsumexp else None
        if facts.is_sanitized or facts.is_guarded:
            nan = xp.isnan(total)  # 0 divided by it would be NaN in the gradient of any value
            if facts.is_sanitized or weights:
                exponentials = xp.where(allowed, xp.multiply(exponentials, xp.where(nan, total, 1.0)), 0.0)
            total = xp.where(nan, 1.0, total)
    if log_total is None:
        return exponentials, total, None, None
    none = xp.equal(top, -math.inf)  # by scores, which say no row empty: its output is NaN
    found = log_normalizer(top, log_total, none if empty is None else xp.logical_or(none, empty), xp)
    return exponentials, total, *(xp.squeeze(x, axis=-1) for x in found)


def log_normalizer(top: Array | None, log_total: Array, none: Array | None, xp: Namespace) -> tuple[Array, Array]:
    """The logarithm of a sum of exponentials, out of their largest logarithm, if any, and that of the rest of the sum.

    It is a logsumexp, and what rounding took from it: -inf and 0 where the sum has ``none``.
    """
    if top is None:
        return log_total if none is None else xp.where(none, -math.inf, log_total), xp.zeros_like(log_total)
    logsumexp, remainder = two_sum(top, log_total, xp)
    unknown = xp.isnan(remainder)  # of a row with a score that is inf or NaN
    if none is not None:
        logsumexp, unknown = xp.where(none, -math.inf, logsumexp), xp.logical_or(none, unknown)
    return logsumexp, xp.where(unknown, 0.0, remainder)


def with_remainder(found: Any, xp: Namespace) -> Any:
    """A result with a logsumexp that counts as exact, where what rounding took from it is not known."""
    return found if found.remainder is not None else found._replace(remainder=xp.zeros_like(found.logsumexp))


def merge_logsumexps(logsumexp: Array, remainder: Array, /, *, xp: Namespace) -> tuple[Array, Array, Array]:
    r"""The logarithm of a sum of exponentials, out of those of its parts (P, ..., M) and what makes these exact.

    .. math:: w_p = \exp(\ell_p + r_p - \ell - r), \qquad \ell + r = \log \sum_p \exp(\ell_p + r_p)

    It returns the shares w (P, ..., M), and l and r (..., M). Of -inf alone, l is -inf, with gradients 0.
    """
    largest = xp.max(logsumexp, axis=0)
    none = xp.equal(largest, -math.inf)
    top = xp.where(none, 0.0, largest)  # -inf - -inf would be NaN
    rest = xp.max(xp.where(xp.equal(logsumexp, largest), remainder, -math.inf), axis=0)
    exponentials = xp.exp(xp.add(xp.subtract(logsumexp, top), xp.subtract(remainder, rest)))
    total = xp.where(none, 1.0, xp.sum(exponentials, axis=0))
    return xp.divide(exponentials, total), *log_normalizer(top, xp.add(rest, xp.log(total)), none, xp)


def merge_pieces(output: Array, logsumexp: Array, remainder: Array, /, *, xp: Namespace) -> tuple[Array, Array, Array]:
    """Attention to all keys: outputs (P, ..., M, E) of pieces, logsumexps, and what makes these exact, merged.

    A piece whose scores are all -inf, so that its output is NaN, adds nothing. So is that of all pieces where no piece
    has a share, as in one call. Of a share that underflows, what is not finite shows.
    """
    shares, *rows = merge_logsumexps(logsumexp, remainder, xp=xp)
    adds_nothing = xp.logical_and(xp.equal(logsumexp, -math.inf), xp.not_equal(rows[0], -math.inf))
    shares, adds_nothing = xp.expand_dims(shares, axis=-1), xp.expand_dims(adds_nothing, axis=-1)
    return (xp.sum(xp.where(adds_nothing, 0.0, xp.multiply(output, shares)), axis=0), *rows)
