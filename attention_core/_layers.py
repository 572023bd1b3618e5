"""The maps between attentions: affine, normalizing, feed-forward, and from tokens to vectors."""

from __future__ import annotations

import functools

from attention_core._arithmetic import arithmetic_of, check_arithmetic
from attention_core._checks import (
    check_floating,
    check_integer,
    check_like,
    check_linear,
    check_number,
    check_parameters,
    check_rank,
    check_vector,
    shape_text,
    sizes,
)
from attention_core._namespace import (
    array_namespace,
    index_dtype,
    is_concrete,
    narrow,
    positions,
    shape,
    widen,
)
from attention_core._typing import Array, Namespace
from attention_core.parameters import Embeddings, FeedForward, LayerNorm, Linear
from attention_core.random import Dropout, check_dropout

__all__ = ["embed_tokens", "feed_forward", "gelu", "layer_norm", "linear"]


def linear(parameters: Linear, x: Array, /, *, arithmetic: str = "fast", xp: Namespace | None = None) -> Array:
    r"""Affine map of the channels.

    .. math:: y = x W + b

    Parameters
    ----------
    parameters : Linear
        ``weight`` of shape (in, out), ``bias`` of shape (out,) or ``None``; of the dtype of ``x``.
    x : Array, shape (..., in)
        Types of 16 bits are computed in float32 and rounded once.
    arithmetic : {"fast", "reproducible"}
        As in `scaled_dot_product_attention`.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., out)

    Raises
    ------
    TypeError, ValueError
        When dtypes or shapes do not fit.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> linear(Linear(xp.asarray([[1.0], [2.0]]), xp.asarray([0.5])), xp.asarray([[3.0, 4.0]]))
    Array([[11.5]], dtype=array_api_strict.float64)
    """
    check_parameters("linear", parameters, Linear)
    xp = array_namespace(x, *parameters) if xp is None else xp
    check_rank("x", x, 1, "(..., in)")
    check_floating("x", x)
    check_arithmetic(arithmetic, "x", x)
    check_linear("linear", parameters, "x", x)
    dtype = x.dtype
    (weight, bias), x = widen((parameters, x), xp=xp)
    return narrow(arithmetic_of(arithmetic).affine(x, weight, bias, xp=xp), dtype, xp=xp)


def layer_norm(
    parameters: LayerNorm,
    x: Array,
    /,
    *,
    epsilon: float = 1e-5,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
    r"""Normalize the channels of every position.

    .. math:: y = \frac{x - \mu}{\sqrt{\operatorname{mean}((x - \mu)^2) + \epsilon}} \cdot \gamma + \beta, \qquad
        \mu = \operatorname{mean}(x)

    Parameters
    ----------
    parameters : LayerNorm
        ``scale`` and ``offset``, each of shape (C,); of the dtype of ``x``.
    x : Array, shape (..., C)
        Types of 16 bits are computed in float32 and rounded once.
    epsilon : float
        Added to the variance, under the root.
    arithmetic : {"fast", "reproducible"}
        As in `scaled_dot_product_attention`.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., C)

    Raises
    ------
    TypeError, ValueError
        When dtypes or shapes do not fit, or epsilon is not a positive number.

    References
    ----------
    J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer normalization", 2016.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> norm = LayerNorm(scale=xp.ones(2), offset=xp.zeros(2))
    >>> layer_norm(norm, xp.asarray([[1.0, 3.0]]), epsilon=3.0)
    Array([[-0.5,  0.5]], dtype=array_api_strict.float64)
    """
    check_parameters("layer_norm", parameters, LayerNorm)
    xp = array_namespace(x, *parameters) if xp is None else xp
    check_rank("x", x, 1, "(..., C)")
    check_floating("x", x)
    check_arithmetic(arithmetic, "x", x)
    check_layer_norm("layer_norm", parameters, "x", x, epsilon)
    dtype = x.dtype
    (scale, offset), x = widen((parameters, x), xp=xp)
    return narrow(arithmetic_of(arithmetic).normalize(x, scale, offset, float(epsilon), xp=xp), dtype, xp=xp)


def gelu(x: Array, /, *, arithmetic: str = "fast", xp: Namespace | None = None) -> Array:
    r"""Gaussian error linear unit, exact (no tanh).

    .. math:: x\, \Phi(x) = \tfrac{x}{2} \operatorname{erfc}\!\left(-\tfrac{x}{\sqrt 2}\right)

    Parameters
    ----------
    x : Array
        Of a floating-point dtype; types of 16 bits are computed in float32.
    arithmetic : {"fast", "reproducible"}
        As in `scaled_dot_product_attention`.
    xp : array namespace, optional

    Returns
    -------
    Array
        Of the shape and dtype of ``x``.

    Raises
    ------
    TypeError
        When ``x`` is not of a floating-point dtype.

    References
    ----------
    D. Hendrycks, K. Gimpel, "Gaussian error linear units", 2016.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> [round(float(y), 6) for y in gelu(xp.asarray([-1.0, 0.0, 1.0]))]
    [-0.158655, 0.0, 0.841345]
    """
    xp = array_namespace(x) if xp is None else xp
    check_rank("x", x, 0, "(...)")
    check_floating("x", x)
    check_arithmetic(arithmetic, "x", x)
    dtype = x.dtype
    return narrow(arithmetic_of(arithmetic).gelu(widen(x, xp=xp), xp=xp), dtype, xp=xp)


def feed_forward(
    parameters: FeedForward,
    x: Array,
    /,
    *,
    dropout: Dropout | None = None,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
    r"""Two affine maps of every position with a GELU in between.

    .. math:: y = \operatorname{gelu}(x W_1 + b_1)\, W_2 + b_2

    Parameters
    ----------
    parameters : FeedForward
        ``expand`` of shape (C, inner) and ``contract`` of shape (inner, out).
    x : Array, shape (..., C)
        Types of 16 bits are computed in float32 and rounded once.
    dropout : Dropout, optional
        Applied to the result.
    arithmetic : {"fast", "reproducible"}
        As in `scaled_dot_product_attention`.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., out)

    Raises
    ------
    TypeError, ValueError
        When dtypes or shapes do not fit.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> one = Linear(xp.ones((1, 1)))
    >>> round(float(feed_forward(FeedForward(one, one), xp.ones((1, 1)))[0, 0]), 6)
    0.841345
    """
    check_parameters("feed_forward", parameters, FeedForward)
    for name in FeedForward._fields:
        check_parameters(f"feed_forward.{name}", getattr(parameters, name), Linear)
    xp = array_namespace(x, *parameters.expand, *parameters.contract) if xp is None else xp
    check_rank("x", x, 1, "(..., C)")
    check_floating("x", x)
    check_arithmetic(arithmetic, "x", x)
    check_feed_forward("feed_forward", parameters, "x", x)
    if dropout is not None:
        check_dropout(dropout)
    dtype = x.dtype
    parameters, x = widen((parameters, x), xp=xp)
    maps = arithmetic_of(arithmetic)
    inner = maps.gelu(maps.affine(x, *parameters.expand, xp=xp), xp=xp)
    return narrow(maps.drop(maps.affine(inner, *parameters.contract, xp=xp), dropout, xp=xp), dtype, xp=xp)


def embed_tokens(
    parameters: Embeddings,
    token_ids: Array,
    /,
    *,
    position_ids: Array | None = None,
    segment_ids: Array | None = None,
    epsilon: float = 1e-12,
    dropout: Dropout | None = None,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
    r"""Vectors of tokens at positions, in segments: rows of the tables, added up and normalized.

    .. math:: y_l = \operatorname{layer\_norm}(T_{t_l} + P_{p_l} + S_{s_l})

    Parameters
    ----------
    parameters : Embeddings
    token_ids : Array of int, shape (..., L)
    position_ids : Array of int, broadcastable to (..., L), optional
        By default 0, 1, …, L - 1.
    segment_ids : Array of int, broadcastable to (..., L), optional
        By default 0, where there is a table of segments.
    epsilon : float
        Of the normalization.
    dropout : Dropout, optional
        Applied to the result.
    arithmetic : {"fast", "reproducible"}
        As in `scaled_dot_product_attention`.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., L, C)
        Of the dtype of the tables.

    Raises
    ------
    TypeError
        When ids are not integers, or dtypes differ.
    ValueError
        When shapes do not fit, or an id has no row in its table (where values can be read).

    References
    ----------
    J. Devlin et al., "BERT", 2018.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> tables = Embeddings(token=xp.asarray([[1.0], [2.0]]), position=xp.asarray([[10.0], [20.0]]))
    >>> embed_tokens(tables, xp.asarray([1, 1]))
    Array([[12.],
           [22.]], dtype=array_api_strict.float64)
    """
    check_parameters("embeddings", parameters, Embeddings)
    if parameters.norm is not None:
        check_parameters("norm", parameters.norm, LayerNorm)
    tables = parameters.token, parameters.position, parameters.segment
    xp = array_namespace(*tables, *(parameters.norm or ()), token_ids, position_ids, segment_ids) if xp is None else xp
    check_arithmetic(arithmetic, "token", parameters.token)
    _check_embeddings(parameters, epsilon, dropout)
    _check_ids(parameters, token_ids, position_ids, segment_ids)
    if position_ids is None:
        position_ids = positions(shape(token_ids, xp=xp)[-1], token_ids, xp=xp)
    if segment_ids is None and parameters.segment is not None:
        segment_ids = xp.zeros_like(token_ids)
    dtype = parameters.token.dtype
    maps = arithmetic_of(arithmetic)
    dims, ids = shape(token_ids, xp=xp), (token_ids, position_ids, segment_ids)
    found = [
        maps.lookup(widen(table, xp=xp), own, dims, xp=xp)
        for table, own in zip(tables, ids, strict=True)
        if table is not None
    ]
    x = functools.reduce(functools.partial(maps.add, xp=xp), found)
    if parameters.norm is not None:
        x = layer_norm(widen(parameters.norm, xp=xp), x, epsilon=epsilon, arithmetic=arithmetic, xp=xp)
    return narrow(maps.drop(x, dropout, xp=xp), dtype, xp=xp)


def check_layer_norm(name: str, parameters: LayerNorm, x_name: str, x: Array, epsilon: float) -> None:
    """Raise unless a `LayerNorm` fits the channels, dtype and device of its input."""
    check_parameters(name, parameters, LayerNorm)
    check_number("epsilon", epsilon, positive=True)
    channels = sizes(x)[-1]
    if channels == 0:
        raise ValueError(f"expected {x_name} with at least one channel; got {shape_text(x)}")
    check_vector(f"{name}.scale", parameters.scale, channels, x_name, x)
    check_vector(f"{name}.offset", parameters.offset, channels, x_name, x)


def check_feed_forward(name: str, parameters: FeedForward, x_name: str, x: Array) -> None:
    """Raise unless both maps of a `FeedForward` fit, the first its input and the second the first."""
    check_linear(f"{name}.expand", parameters.expand, x_name, x)
    check_linear(f"{name}.contract", parameters.contract, f"{name}.expand.weight", parameters.expand.weight)


def _check_embeddings(parameters: Embeddings, epsilon: float, dropout: Dropout | None) -> None:
    token, segment = parameters.token, () if parameters.segment is None else (parameters.segment,)
    for name, table in zip(("token", "position", "segment"), (token, parameters.position, *segment), strict=False):
        check_rank(name, table, 2, "(entries, C)")
        check_floating(name, table)
        check_like(name, table, "token", token)
        if len(table.shape) != 2 or sizes(table)[1] != sizes(token)[1]:
            raise ValueError(f"expected {name} (entries, {sizes(token)[1]}) to match token; got {shape_text(table)}")
    if parameters.norm is not None:
        check_layer_norm("norm", parameters.norm, "token", token, epsilon)
    if dropout is not None:
        check_dropout(dropout)


def _check_ids(parameters: Embeddings, tokens: Array, position_ids: Array | None, segment_ids: Array | None) -> None:
    check_rank("token_ids", tokens, 1, "(..., L)")
    if segment_ids is None and parameters.segment is not None and sizes(parameters.segment)[0] == 0:
        raise ValueError("expected a table of segments with at least one entry; got none")
    length, rows = sizes(tokens)[-1], sizes(parameters.position)[0]
    if position_ids is None and length is not None and rows is not None and length > rows:
        raise ValueError(f"expected at most {rows} tokens, the positions there are; got {length}")
    if segment_ids is not None and parameters.segment is None:
        raise ValueError("expected no segment_ids without a table of segments; got some")
    check_id_table("token_ids", tokens, tokens, parameters.token)
    check_id_table("position_ids", position_ids, tokens, parameters.position)
    check_id_table("segment_ids", segment_ids, tokens, parameters.segment)


def check_id_table(name: str, ids: Array | None, tokens: Array, table: Array | None) -> None:
    """Raise unless ids are integers that broadcast to those of the tokens and, where they can be read, have rows."""
    if ids is None or table is None:
        return
    check_rank(name, ids, 0, "(..., L)")
    check_integer(name, ids)
    dims, goal = sizes(ids), sizes(tokens)
    aligned = goal[len(goal) - len(dims) :]
    if len(dims) > len(goal) or any(d not in (1, g) and None not in (d, g) for d, g in zip(dims, aligned, strict=True)):
        raise ValueError(f"expected {name} to broadcast to token_ids {shape_text(tokens)}; got {shape_text(ids)}")
    rows = sizes(table)[0]
    if rows is not None and 0 not in dims and is_concrete(ids):
        xp = array_namespace(ids)
        ids = xp.astype(ids, index_dtype(ids, xp=xp))
        least, most = int(xp.min(ids)), int(xp.max(ids))
        if least < 0 or most >= rows:
            raise ValueError(f"expected {name} in 0..{rows - 1}; got {least if least < 0 else most}")
