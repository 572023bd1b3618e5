"""Scaled dot-product attention: the definition."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

from attention_core._checks import check_flag, check_scores, check_value, sizes
from attention_core._heads import repeat_heads
from attention_core._namespace import array_namespace, narrow, shape, widen
from attention_core._softmax import finite_vectors, softmax, weighted_sum
from attention_core._typing import Array, Namespace
from attention_core.masks import And, Causal, Mask, allowed_pairs, as_mask, check_mask, mask_arrays
from attention_core.random import Dropout, check_dropout, drop

__all__ = ["Attention", "attention_scores", "scaled_dot_product_attention"]


class Attention(NamedTuple):
    """Result of attention, with what was asked for beside the output; the rest is ``None``."""

    output: Array
    weights: Array | None = None
    logsumexp: Array | None = None


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | Array | None = None,
    softcap: float | Array | None = None,
    dropout: Dropout | None = None,
    return_weights: bool = False,
    return_logsumexp: bool = False,
    xp: Namespace | None = None,
) -> Any:
    r"""Average the values over the keys, weighted by how well each key matches the query.

    .. math::

        o_i &= \sum_j p_{ij} v_j, \qquad p_{ij} = \exp(s_{ij} - \ell_i), \qquad \ell_i = \log \sum_j \exp s_{ij}, \\
        s_{ij} &= c \tanh\!\left(\frac{(\sigma q_i) \cdot k_j}{c}\right) + b_{ij},

    where j runs over the keys that query i may attend. A query that may attend nothing gives exactly 0, with
    :math:`\ell_i = -\infty` and gradients exactly 0. What is masked, were it nan, reaches neither result nor gradient.

    Parameters
    ----------
    query : Array, shape (..., H, M, D)
        Of dtype float16, bfloat16, float32 or float64. Types of 16 bits are computed in float32 and rounded once.
    key : Array, shape (..., G, N, D)
        G divides H: query head h uses key head h // (H / G).
    value : Array, shape (..., G, N, E)
    mask : Mask or Array of bool, broadcastable to (..., H, M, N), optional
        True where query i may attend key j.
    bias : Array, broadcastable to (..., H, M, N), optional
        Added to the scaled scores; where it is -inf, the key is masked. Of the query's dtype, or float32 with 16 bits.
    is_causal : bool
        Also apply ``Causal()``: key position <= query position.
    scale : float or 0-d Array, optional
        :math:`\sigma`; by default :math:`D^{-1/2}`. It multiplies the query, so that scores that fit do not overflow.
    softcap : float or 0-d Array, optional
        c; by default the scores are not capped.
    dropout : Dropout, optional
        Rate and seed by which weights are dropped from the average.
    return_weights, return_logsumexp : bool
        Whether to return p (before dropout), and :math:`\ell` (in the type of the computation); nothing else changes.
    xp : array namespace, optional
        By default that of the arrays.

    Returns
    -------
    Array, shape (..., H, M, E)
        Of the query's dtype. If a return flag is set: ``Attention(output, weights, logsumexp)`` with weights of shape
        (..., H, M, N) and logsumexp of shape (..., H, M).

    Raises
    ------
    TypeError
        When something is not an array of the right dtype, or libraries are mixed.
    ValueError
        When shapes, devices or numbers do not fit. Both come before any computation.

    Notes
    -----
    The values are added up before they are divided by the sum of the exponentials, so that N times the largest value
    has to fit the type of the computation. What is not finite and attended shows: an infinite value gives an infinite
    or nan element, and, where a mask or a bias is given, a query or key that is not finite gives nan.

    References
    ----------
    A. Vaswani et al., "Attention is all you need", 2017. J. Ainslie et al., "GQA", 2023.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> query, key, value = xp.zeros((1, 2, 4)), xp.ones((1, 3, 4)), xp.asarray([[[1.0], [2.0], [6.0]]])
    >>> scaled_dot_product_attention(query, key, value, is_causal=True)
    Array([[[1. ],
            [1.5]]], dtype=array_api_strict.float64)
    """
    xp = _namespace(query, key, value, mask, bias) if xp is None else xp
    check_scores(query, key, bias, scale, softcap)
    check_value(value, key)
    check_flag("is_causal", is_causal)
    mask = _with_causal(mask, is_causal)
    _check_options(query, key, mask, dropout)
    dtype = query.dtype
    query, key, value, bias = widen((query, key, value, bias), xp=xp)
    allowed = _allowed(mask, bias, query, key, xp)
    times = _repeats(query, key, xp)
    key, value = repeat_heads(key, times, xp=xp), repeat_heads(value, times, xp=xp)
    scores = _scores(query, key, allowed, bias, scale, softcap, xp)  # (..., H, M, N)
    exponentials, total, logsumexp = softmax(scores, allowed, xp=xp)
    summed = weighted_sum(drop(exponentials, dropout, xp=xp), value, allowed, xp=xp)
    output = narrow(xp.divide(summed, total), dtype, xp=xp)
    if not (return_weights or return_logsumexp):
        return output
    return Attention(
        output,
        narrow(xp.divide(exponentials, total), dtype, xp=xp) if return_weights else None,
        xp.squeeze(logsumexp, axis=-1) if return_logsumexp else None,
    )


def attention_scores(
    query: Array,
    key: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    scale: float | Array | None = None,
    softcap: float | Array | None = None,
    xp: Namespace | None = None,
) -> Array:
    r"""Scores of attention, as far as the arguments go: scaled, then capped, then with bias, then masked with -inf.

    .. math:: s_{ij} = c \tanh\!\left(\frac{(\sigma q_i) \cdot k_j}{c}\right) + b_{ij}

    Parameters
    ----------
    query : Array, shape (..., H, M, D)
    key : Array, shape (..., G, N, D)
    mask, bias, scale, softcap, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., H, M, N)
        Of the query's dtype.

    Raises
    ------
    TypeError, ValueError
        As in `scaled_dot_product_attention`.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> attention_scores(xp.ones((1, 1, 4)), xp.ones((1, 2, 4)), mask=xp.asarray([True, False]))
    Array([[[  2., -inf]]], dtype=array_api_strict.float64)
    """
    xp = _namespace(query, key, None, mask, bias) if xp is None else xp
    check_scores(query, key, bias, scale, softcap)
    _check_options(query, key, mask, None)
    dtype = query.dtype
    query, key, bias = widen((query, key, bias), xp=xp)
    allowed = _allowed(mask, bias, query, key, xp)
    key = repeat_heads(key, _repeats(query, key, xp), xp=xp)
    return narrow(_scores(query, key, allowed, bias, scale, softcap, xp), dtype, xp=xp)


def _scores(
    query: Array, key: Array, allowed: Array | None, bias: Array | None, scale: Any, softcap: Any, xp: Namespace
) -> Array:
    if allowed is not None:
        query, of_query = finite_vectors(query, xp=xp)
        key, of_key = finite_vectors(key, xp=xp)
        rubbish = xp.add(xp.expand_dims(of_query, axis=-1), xp.expand_dims(of_key, axis=-2))  # 0 or nan
    scale = _default_scale(query, xp) if scale is None else _of_type(scale, query, xp)
    scores = xp.matmul(xp.multiply(query, scale), xp.matrix_transpose(key))
    if softcap is not None:
        if allowed is not None:
            scores = xp.where(allowed, scores, 0.0)  # what overflows and is masked must not meet the cap's gradient
        softcap = _of_type(softcap, query, xp)
        scores = xp.multiply(xp.tanh(xp.divide(scores, softcap)), softcap)
    if bias is not None:
        scores = xp.add(scores, bias)
    if allowed is not None:
        scores = xp.where(allowed, xp.add(scores, rubbish), -math.inf)
    return scores


def _namespace(
    query: Array, key: Array, value: Array | None, mask: Mask | Array | None, bias: Array | None
) -> Namespace:
    return array_namespace(query, key, value, bias, *mask_arrays(mask))


def _with_causal(mask: Mask | Array | None, is_causal: bool) -> Mask | Array | None:
    if not is_causal:
        return mask
    return Causal() if mask is None else And(Causal(), as_mask(mask))  # not by `&`, which compilers take for their own


def _check_options(query: Array, key: Array, mask: Mask | Array | None, dropout: Dropout | None) -> None:
    if mask is not None:
        check_mask(mask, (*sizes(query)[:-1], sizes(key)[-2]), query)
    if dropout is not None:
        check_dropout(dropout)


def _allowed(mask: Mask | Array | None, bias: Array | None, query: Array, key: Array, xp: Namespace) -> Array | None:
    """Where attention is allowed: by the mask, and by a bias that is not -inf; ``None`` for everywhere."""
    allowed = None if mask is None else allowed_pairs(mask, query, key, xp=xp)
    if bias is None:
        return allowed
    admitted = xp.not_equal(bias if len(bias.shape) else xp.reshape(bias, (1,)), -math.inf)
    return admitted if allowed is None else xp.logical_and(allowed, admitted)


def _repeats(query: Array, key: Array, xp: Namespace) -> Any:
    """How often a key/value head is repeated: an integer, or a 0-d array where heads are counted only when running."""
    heads, groups = shape(query, xp=xp)[-3], shape(key, xp=xp)[-3]
    return 1 if isinstance(heads, int) and heads == groups else heads // groups


def _default_scale(query: Array, xp: Namespace) -> float | Array:
    width = shape(query, xp=xp)[-1]
    if isinstance(width, int) or not hasattr(width, "dtype"):
        return width**-0.5
    inverse = xp.divide(1.0, xp.sqrt(xp.astype(width, xp.float64)))  # as precise as a Python float
    return xp.astype(inverse, query.dtype)


def _of_type(number: float | Array, like: Array, xp: Namespace) -> float | Array:
    return float(number) if isinstance(number, Real) else xp.astype(number, like.dtype)
