"""Multi-head attention."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from attention_core._arithmetic import arithmetic_of, fan_out
from attention_core._arrays import (
    Array,
    Namespace,
    cast_to,
    on_device_of,
    shape,
    shape_text,
    shapes_differ,
    sizes,
    upcast,
)
from attention_core._attention.call import Attention
from attention_core._attention.choice import check_implementation
from attention_core._backend import array_namespace
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
)
from attention_core._functions.attention import check_attention_arithmetic, scaled_dot_product_attention
from attention_core._functions.heads import merge_heads, split_heads
from attention_core.masks import Appended, Causal, Mask
from attention_core.masks._mask import as_mask
from attention_core.masks._tree import check_mask, mask_arrays
from attention_core.parameters import Linear, MultiHeadAttention
from attention_core.random import Dropout, check_dropout


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
    r"""Compute attention in several heads, each with its own projection of the inputs.

    .. math::

        y = [o_1, \dots, o_H]\, W^O + b^O, \qquad
        o_h = \operatorname{attention}(q W^Q_h + b^Q_h,\; k W^K_h + b^K_h,\; v W^V_h + b^V_h)

    Parameters
    ----------
    parameters : MultiHeadAttention
        ``query`` of shape (C, H * D), ``key`` of shape (C', G * D), ``value`` of shape (C'', G * E), and ``output`` of
        shape (H * E, C) or ``None``. With an extra key and value there are N + 1 keys; no mask hides the last.
    query : Array, shape (..., M, C)
        16-bit types are computed in float32 and rounded once.
    key : Array, shape (..., N, C'), optional
        By default the query: self-attention.
    value : Array, shape (..., N, C''), optional
        By default the key.
    num_heads : int
        H.
    num_key_value_heads : int, optional
        G, a divisor of H; by default H.
    prepare : callable, optional
        ``prepare(query, key)`` maps the heads, (..., H, M, D) and (..., G, N, D), before attention. Apply rotary
        positions and the normalization of queries and keys here.
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
        When dtypes, shapes, devices or numbers do not fit. All errors are raised before any computation.

    References
    ----------
    A. Vaswani et al., "Attention is all you need", 2017.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import Linear, MultiHeadAttention
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
        leaves = tuple_leaves(parameters)
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
    parameters, query, key, value = upcast((parameters, query, key, value), xp=xp)
    maps = arithmetic_of(arithmetic)
    inputs = fan_out((query, key, value), maps, xp)
    heads, key_heads, value_heads = (
        split_heads(maps.affine(x, *projection, xp=xp), count, xp=xp)
        for projection, x, count in zip(parameters[:3], inputs, (num_heads, groups, groups), strict=True)
    )
    if prepare is not None:
        heads, key_heads = prepare(heads, key_heads)
    if parameters.extra_key is not None:
        length = shape(key_heads, xp=xp)[-2]
        mask, is_causal = _mask_with_extra_key(mask, is_causal, length), False
        if bias is not None:
            bias = xp.broadcast_to(bias, (*shape(bias, xp=xp)[:-1], length))
            bias = _append_along(bias, xp.zeros((1,), dtype=bias.dtype, **on_device_of(bias)), -1, xp)
        key_heads, value_heads = (
            _append_extra(array, extra, groups, maps, xp)
            for array, extra in ((key_heads, parameters.extra_key), (value_heads, parameters.extra_value))
        )
    result = scaled_dot_product_attention(
        heads,
        key_heads,
        value_heads,
        mask=mask,
        bias=upcast(bias, xp=xp),
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        sinks=upcast(sinks, xp=xp),
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
    output = cast_to(merged, dtype, xp=xp)
    if not asked:
        return output
    weights = cast_to(result.weights, dtype, xp=xp) if return_weights else None
    return Attention(output, weights, result.logsumexp if return_logsumexp else None)


def _append_extra(heads: Array, extra: Array, num_kv_heads: int, ops: Any, xp: Namespace) -> Array:
    """Append a key or value (G * D,), the same for the whole batch, to heads (..., G, N, D)."""
    *leading, _, width = shape(heads, xp=xp)
    last = split_heads(xp.reshape(extra, (1, -1)), num_kv_heads, xp=xp)
    return xp.concat([heads, ops.broadcast_batch(last, (*leading, 1, width), xp=xp)], axis=-2)


def _mask_with_extra_key(mask: Mask | Array | None, is_causal: bool, length: Any) -> Mask | None:
    """Extend a mask by one key, to which all queries may attend."""
    rules = [Causal()] * is_causal + ([] if mask is None else [as_mask(mask)])
    if not rules or (isinstance(length, int) and length == 0):
        return None
    return Appended(functools.reduce(operator.and_, rules), length)


def _append_along(array: Array, last: Array, axis: int, xp: Namespace) -> Array:
    """Append a broadcast array along an axis."""
    dims = list(shape(array, xp=xp))
    dims[axis] = 1
    return xp.concat([array, xp.broadcast_to(last, tuple(dims))], axis=axis)


def tuple_leaves(tree: Any) -> list[Array]:
    return [leaf for branch in tree for leaf in tuple_leaves(branch)] if isinstance(tree, tuple) else [tree]


def check_options(scale: Any, softcap: Any, dropout: Dropout | None) -> None:
    """Raise unless scale, softcap and dropout are valid."""
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
    if shapes_differ(sizes(key)[:-2], sizes(query)[:-2]):
        raise ValueError(f"expected key with the leading axes of query {shape_text(query)}; got {shape_text(key)}")
    if shapes_differ(sizes(value)[:-1], sizes(key)[:-1]):
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
