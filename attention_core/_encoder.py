"""Multi-head attention, and the encoder layer of a transformer around it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from attention_core._arithmetic import arithmetic_of, handed_out
from attention_core._attention import check_attention_arithmetic, scaled_dot_product_attention
from attention_core._call import Attention
from attention_core._checks import (
    check_bias,
    check_flag,
    check_floating,
    check_function,
    check_like,
    check_linear,
    check_number,
    check_parameters,
    check_positive,
    check_rank,
    check_vector,
    differ,
    shape_text,
    sizes,
)
from attention_core._heads import merge_heads, split_heads
from attention_core._implementations import check_implementation
from attention_core._layers import check_feed_forward, check_layer_norm, feed_forward, layer_norm
from attention_core._namespace import array_namespace, beside, narrow, shape, widen
from attention_core._typing import Array, Namespace
from attention_core.masks import Appended, Causal, Mask, as_mask, check_mask, mask_arrays
from attention_core.parameters import EncoderLayer, FeedForward, Linear, MultiHeadAttention
from attention_core.random import Dropout, check_dropout, fold_in

__all__ = ["encoder_layer", "multi_head_attention"]


def multi_head_attention(
    parameters: MultiHeadAttention,
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    /,
    *,
    num_heads: int,
    num_key_value_heads: int | None = None,
    mask: Mask | Array | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    scale: float | Array | None = None,
    softcap: float | Array | None = None,
    score_mod: Callable[..., Array] | None = None,
    sinks: Array | None = None,
    prepare: Callable[[Array, Array], tuple[Array, Array]] | None = None,
    dropout: Dropout | None = None,
    return_weights: bool = False,
    return_logsumexp: bool = False,
    implementation: str = "auto",
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Any:
    r"""Attend in several heads at once, each with its own projection of the inputs.

    .. math::

        y = [o_1, \dots, o_H]\, W^O + b^O, \qquad
        o_h = \operatorname{attention}(q W^Q_h + b^Q_h,\; k W^K_h + b^K_h,\; v W^V_h + b^V_h)

    Parameters
    ----------
    parameters : MultiHeadAttention
        ``query`` of shape (C, H * D), ``key`` of shape (C', G * D), ``value`` of shape (C'', G * E), and ``output`` of
        shape (H * E, C) or ``None``. With an extra key and value there are N + 1 keys, of which no mask hides the last.
    query : Array, shape (..., M, C)
        Types of 16 bits are computed in float32 and rounded once.
    key : Array, shape (..., N, C'), optional
        By default the query: self-attention.
    value : Array, shape (..., N, C''), optional
        By default the key.
    num_heads : int
        H.
    num_key_value_heads : int, optional
        G, a divisor of H; by default H.
    prepare : callable, optional
        ``prepare(query, key)`` is given the heads, (..., H, M, D) and (..., G, N, D), and gives back what takes their
        place: where rotary positions and the normalization of queries and keys belong.
    mask, bias, is_causal, scale, softcap, score_mod, sinks, dropout
        As in `scaled_dot_product_attention`.
    return_weights, return_logsumexp, implementation, arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., M, C)
        Or ``Attention(output, weights, logsumexp)`` if a return flag is set.

    Raises
    ------
    TypeError, ValueError
        When dtypes, shapes, devices or numbers do not fit; before any computation.

    References
    ----------
    A. Vaswani et al., "Attention is all you need", 2017.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import Linear
    >>> same = Linear(xp.eye(4))
    >>> x = xp.reshape(xp.arange(12, dtype=xp.float64), (3, 4))
    >>> multi_head_attention(MultiHeadAttention(same, same, same), x, num_heads=2, is_causal=True)[0, :]
    Array([0., 1., 2., 3.], dtype=array_api_strict.float64)
    """
    check_projections("attention", parameters)
    key = query if key is None else key
    value = key if value is None else value
    groups = num_heads if num_key_value_heads is None else num_key_value_heads
    if xp is None:
        leaves = _leaves(parameters)
        xp = array_namespace(query, key, value, bias, *mask_arrays(mask), *leaves)
    check_multi_head(parameters, query, key, value, num_heads, groups, mask, bias)
    check_options(scale, softcap, dropout)
    check_flag("is_causal", is_causal)
    check_attention_arithmetic(arithmetic, query, implementation, scale, softcap, score_mod, sinks)
    check_implementation(implementation)
    for name, function in (("score_mod", score_mod), ("prepare", prepare)):
        if function is not None:
            check_function(name, function)
    dtype = query.dtype
    parameters, query, key, value = widen((parameters, query, key, value), xp=xp)
    maps = arithmetic_of(arithmetic)
    inputs = handed_out((query, key, value), maps, xp)
    heads, key_heads, value_heads = (
        split_heads(maps.affine(x, *projection, xp=xp), count, xp=xp)
        for projection, x, count in zip(parameters[:3], inputs, (num_heads, groups, groups), strict=True)
    )
    if prepare is not None:
        heads, key_heads = prepare(heads, key_heads)
    if parameters.extra_key is not None:
        length = shape(key_heads, xp=xp)[-2]
        mask, is_causal = _seeing_one_more(mask, is_causal, length), False
        if bias is not None:
            bias = xp.broadcast_to(bias, (*shape(bias, xp=xp)[:-1], length))
            bias = _with_one_more(bias, xp.zeros((1,), dtype=bias.dtype, **beside(bias)), -1, xp)
        key_heads, value_heads = (
            _with_one_more(array, maps.spread(split_heads(extra, groups, xp=xp), _but_one(array, xp), xp=xp), -2, xp)
            for array, extra in (
                (key_heads, xp.reshape(parameters.extra_key, (1, -1))),
                (value_heads, xp.reshape(parameters.extra_value, (1, -1))),
            )
        )
    result = scaled_dot_product_attention(
        heads,
        key_heads,
        value_heads,
        mask=mask,
        bias=widen(bias, xp=xp),
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        sinks=widen(sinks, xp=xp),
        dropout=dropout,
        return_weights=return_weights,
        return_logsumexp=return_logsumexp,
        implementation=implementation,
        arithmetic=arithmetic,
        xp=xp,
    )
    asked = return_weights or return_logsumexp
    merged = merge_heads(result.output if asked else result, xp=xp)
    merged = merged if parameters.output is None else maps.affine(merged, *parameters.output, xp=xp)
    output = narrow(merged, dtype, xp=xp)
    if not asked:
        return output
    weights = narrow(result.weights, dtype, xp=xp) if return_weights else None
    return Attention(output, weights, result.logsumexp if return_logsumexp else None)


def encoder_layer(
    parameters: EncoderLayer,
    x: Array,
    /,
    *,
    num_heads: int,
    norm_first: bool = True,
    mask: Mask | Array | None = None,
    epsilon: float = 1e-5,
    dropout: Dropout | None = None,
    implementation: str = "auto",
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
    r"""Encoder layer of a transformer: self-attention and feed-forward, each on a residual branch.

    .. math::

        \text{norm first:}\quad & h = x + \operatorname{attention}(\operatorname{norm}_1(x)), &
        y &= h + \operatorname{feed\_forward}(\operatorname{norm}_2(h)) \\
        \text{norm last:}\quad & h = \operatorname{norm}_1(x + \operatorname{attention}(x)), &
        y &= \operatorname{norm}_2(h + \operatorname{feed\_forward}(h))

    Parameters
    ----------
    parameters : EncoderLayer
    x : Array, shape (..., L, C)
        Types of 16 bits are computed in float32 and rounded once.
    num_heads : int
    norm_first : bool
        Whether to normalize the input of each branch (GPT-2), or the sum after it (the first transformer, BERT).
    mask : Mask or Array of bool, broadcastable to (..., H, L, L), optional
        True = may attend.
    epsilon : float
        Of both normalizations.
    dropout : Dropout, optional
        Applied to the weights of attention and to both branches, each under a seed derived from the one given.
    implementation : {"auto", "dense", "blockwise", "fused"}
        Of attention, as in `scaled_dot_product_attention`.
    arithmetic : {"fast", "reproducible"}
        As in `scaled_dot_product_attention`.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., L, C)

    Raises
    ------
    TypeError, ValueError
        When dtypes, shapes, devices or numbers do not fit; before any computation.

    References
    ----------
    A. Vaswani et al., "Attention is all you need", 2017. R. Xiong et al., "On layer normalization in the transformer
    architecture", 2020.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import FeedForward, LayerNorm, Linear
    >>> nothing, norm = Linear(xp.zeros((4, 4))), LayerNorm(xp.ones(4), xp.zeros(4))
    >>> attention = MultiHeadAttention(nothing, nothing, nothing, nothing)
    >>> layer = EncoderLayer(attention, norm, FeedForward(nothing, nothing), norm)
    >>> x = xp.ones((3, 4))
    >>> bool(xp.all(encoder_layer(layer, x, num_heads=2) == x))
    True
    """
    check_parameters("layer", parameters, EncoderLayer)
    check_projections("attention", parameters.attention)
    if xp is None:
        xp = array_namespace(x, *_leaves(parameters), *mask_arrays(mask))
    _check_encoder(parameters, x, num_heads, mask, epsilon, dropout)
    check_attention_arithmetic(arithmetic, x, implementation, None, None, None, None)
    check_implementation(implementation)
    dtype = x.dtype
    parameters, x = widen((parameters, x), xp=xp)
    maps = arithmetic_of(arithmetic)
    dropouts = _dropouts(dropout, 3, xp)

    def attend(h: Array) -> Array:
        y = multi_head_attention(
            parameters.attention,
            h,
            num_heads=num_heads,
            mask=mask,
            dropout=dropouts[0],
            implementation=implementation,
            arithmetic=arithmetic,
            xp=xp,
        )
        return maps.drop(y, dropouts[1], xp=xp)

    def feed(h: Array) -> Array:
        return feed_forward(parameters.feed_forward, h, dropout=dropouts[2], arithmetic=arithmetic, xp=xp)

    for norm, branch in ((parameters.attention_norm, attend), (parameters.feed_forward_norm, feed)):
        normal = functools.partial(layer_norm, norm, epsilon=epsilon, arithmetic=arithmetic, xp=xp)
        x, h = maps.copies(x, 2, xp=xp)
        x = maps.add(x, branch(normal(h)), xp=xp) if norm_first else normal(maps.add(x, branch(h), xp=xp))
    return narrow(x, dtype, xp=xp)


def _but_one(array: Array, xp: Namespace) -> tuple[Any, ...]:
    """The shape of one key for every head of every entry."""
    *leading, _, width = shape(array, xp=xp)
    return *leading, 1, width


def _seeing_one_more(mask: Mask | Array | None, is_causal: bool, length: Any) -> Mask | None:
    """A mask over one key more than there are, which all queries may attend."""
    rules = [Causal()] * is_causal + ([] if mask is None else [as_mask(mask)])
    if not rules or (isinstance(length, int) and length == 0):
        return None
    return Appended(functools.reduce(operator.and_, rules), length)


def _with_one_more(array: Array, last: Array, axis: int, xp: Namespace) -> Array:
    """An array with one entry more at the end of an axis."""
    dims = list(shape(array, xp=xp))
    dims[axis] = 1
    return xp.concat([array, xp.broadcast_to(last, tuple(dims))], axis=axis)


def _leaves(tree: Any) -> list[Array]:
    return [leaf for branch in tree for leaf in _leaves(branch)] if isinstance(tree, tuple) else [tree]


def _dropouts(dropout: Dropout | None, count: int, xp: Namespace) -> list[Dropout | None]:
    """One dropout for every place, each with a seed of its own."""
    if dropout is None or dropout.rate == 0:
        return [None] * count
    return [Dropout(dropout.rate, fold_in(dropout.seed, place, xp=xp)) for place in range(count)]


def check_options(scale: Any, softcap: Any, dropout: Dropout | None) -> None:
    """Raise unless the numbers of attention are numbers."""
    if scale is not None:
        check_number("scale", scale)
    if softcap is not None:
        check_number("softcap", softcap, positive=True)
    if dropout is not None:
        check_dropout(dropout)


def check_projections(name: str, parameters: MultiHeadAttention) -> None:
    """Raise unless the parameters are projections."""
    check_parameters(name, parameters, MultiHeadAttention)
    for field, projection in zip(parameters._fields[:4], parameters[:4], strict=True):
        if not (projection is None and field == "output"):
            check_parameters(f"{name}.{field}", projection, Linear)
    if (parameters.extra_key is None) != (parameters.extra_value is None):
        present, absent = ("key", "value") if parameters.extra_value is None else ("value", "key")
        raise ValueError(f"expected {name}.extra_{absent} beside {name}.extra_{present}; got None")


def check_multi_head(
    parameters: MultiHeadAttention,
    query: Array,
    key: Array,
    value: Array,
    num_heads: int,
    groups: int,
    mask: Mask | Array | None,
    bias: Array | None,
) -> None:
    """Raise unless inputs, projections, heads, mask and bias fit together."""
    check_positive("num_heads", num_heads)
    check_positive("num_key_value_heads", groups)
    if num_heads % groups:
        raise ValueError(f"expected num_key_value_heads that divide num_heads {num_heads}; got {groups}")
    for name, array, layout in (("query", query, "M"), ("key", key, "N"), ("value", value, "N")):
        check_rank(name, array, 2, f"(..., {layout}, channels)")
        check_floating(name, array)
        check_like(name, array, "query", query)
        check_linear(f"{name} projection", getattr(parameters, name), name, array)
    _check_sequences(query, key, value)
    _check_widths(parameters, num_heads, groups)
    for name, extra, weight in (
        ("extra_key", parameters.extra_key, parameters.key.weight),
        ("extra_value", parameters.extra_value, parameters.value.weight),
    ):
        if extra is not None:
            check_vector(name, extra, sizes(weight)[1], f"the {name[6:]} projection", weight)
    target = (*sizes(query)[:-2], num_heads, sizes(query)[-2], sizes(key)[-2])
    if mask is not None:
        check_mask(mask, target, query)
    if bias is not None:
        check_bias(bias, query, target)


def _check_sequences(query: Array, key: Array, value: Array) -> None:
    if differ(sizes(key)[:-2], sizes(query)[:-2]):
        raise ValueError(f"expected key with the leading axes of query {shape_text(query)}; got {shape_text(key)}")
    if differ(sizes(value)[:-1], sizes(key)[:-1]):
        raise ValueError(
            f"expected value with the leading axes and length of key {shape_text(key)}; got {shape_text(value)}"
        )


def _check_widths(parameters: MultiHeadAttention, num_heads: int, groups: int) -> None:
    widths = []
    for name, heads in (("query", num_heads), ("key", groups), ("value", groups)):
        channels = sizes(getattr(parameters, name).weight)[1]
        if channels is not None and channels % heads:
            raise ValueError(
                f"expected {name} projection to channels that {heads} heads share out evenly; got {channels}"
            )
        widths.append(None if channels is None else channels // heads)
    if widths[0] != widths[1] and None not in widths[:2]:
        raise ValueError(f"expected key heads of width {widths[0]} to match query heads; got {widths[1]}")
    if parameters.output is not None and widths[2] is not None:
        weight = parameters.output.weight
        check_rank("output projection.weight", weight, 2, "(in, out)")
        check_like("output projection.weight", weight, "value projection.weight", parameters.value.weight)
        if sizes(weight)[0] not in (None, num_heads * widths[2]):
            expected = f"({num_heads * widths[2]}, out) to match {num_heads} heads of width {widths[2]}"
            raise ValueError(f"expected output projection.weight {expected}; got {shape_text(weight)}")
        if parameters.output.bias is not None:
            check_vector("output projection.bias", parameters.output.bias, sizes(weight)[1], "its weight", weight)


def _check_encoder(
    parameters: EncoderLayer,
    x: Array,
    num_heads: int,
    mask: Mask | Array | None,
    epsilon: float,
    dropout: Dropout | None,
) -> None:
    check_parameters("feed_forward", parameters.feed_forward, FeedForward)
    check_multi_head(parameters.attention, x, x, x, num_heads, num_heads, mask, None)
    check_options(None, None, dropout)
    check_layer_norm("attention_norm", parameters.attention_norm, "x", x, epsilon)
    check_layer_norm("feed_forward_norm", parameters.feed_forward_norm, "x", x, epsilon)
    check_feed_forward("feed_forward", parameters.feed_forward, "x", x)
    outputs = {"feed_forward.contract": parameters.feed_forward.contract}
    attention = parameters.attention
    if attention.output is not None:
        outputs["attention.output"] = attention.output
    elif sizes(attention.value.weight)[1] != sizes(x)[-1]:
        raise ValueError(f"expected attention back to {sizes(x)[-1]} channels; got {sizes(attention.value.weight)[1]}")
    for name, projection in outputs.items():
        if sizes(projection.weight)[1] != sizes(x)[-1]:
            raise ValueError(f"expected {name} back to {sizes(x)[-1]} channels; got {sizes(projection.weight)[1]}")
