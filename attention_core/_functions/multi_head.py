"""Multi-head attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Required, TypedDict, Unpack, overload

from attention_core._arithmetic import ARITHMETICS, check_input, fan_out
from attention_core._arrays import (
    Array,
    ArrayT,
    Namespace,
    cast_to,
    one_program,
    sizes,
    upcast,
)
from attention_core._attention.call import Attention
from attention_core._attention.shards.splits import Shards
from attention_core._backend import common_namespace, may_be_step, with_autocast
from attention_core._checks import (
    ORDER,
    check_arity,
    check_bias,
    check_function,
    check_like,
    check_linear,
    check_parameters,
    check_positive,
    check_prepared,
    check_scaling,
    check_shapes,
    once_per_signature,
    plain_integer,
    shapes_of,
)
from attention_core._functions.attention import check_options, checked_attention, option_arrays
from attention_core._functions.constants import with_constants
from attention_core._functions.heads import merge_channels, split_channels
from attention_core._functions.options import Options, WithLogsumexp, WithoutFlags, WithWeights, options_but
from attention_core._functions.shards import check_shared, place_of, whole_lengths
from attention_core.masks import Mask
from attention_core.masks._tree import check_mask, mask_arrays
from attention_core.parameters import Linear, MultiHeadAttention


class _Heads(TypedDict, total=False):
    num_heads: Required[int]
    num_key_value_heads: int | None
    prepare: Callable[[Array, Array, Array], tuple[Array, Array, Array]] | None


class _Plain(_Heads, WithoutFlags): ...


class _Weights(_Heads, WithWeights): ...


class _LSE(_Heads, WithLogsumexp): ...


class _Options(_Heads, Options): ...


@overload
def multi_head_attention(
    parameters: MultiHeadAttention, query: ArrayT, key: Array = None, value: Array = None, /, **options: Unpack[_Plain]
) -> ArrayT: ...
@overload
def multi_head_attention(
    parameters: MultiHeadAttention, query: Array, key: Array = None, value: Array = None, /, **options: Unpack[_Weights]
) -> Attention: ...
@overload
def multi_head_attention(
    parameters: MultiHeadAttention, query: Array, key: Array = None, value: Array = None, /, **options: Unpack[_LSE]
) -> Attention: ...
@overload
def multi_head_attention(
    parameters: MultiHeadAttention, query: Array, key: Array = None, value: Array = None, /, **options: Unpack[_Options]
) -> Any: ...
@may_be_step
@with_autocast(position=1, options=options_but())
def multi_head_attention(
    parameters: MultiHeadAttention,
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    /,
    *,
    num_heads: int,
    num_key_value_heads: int | None = None,
    prepare: Callable[[Array, Array, Array], tuple[Array, Array, Array]] | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Compute attention in several heads, each with its own projection of the inputs.

    .. math::

        y = [o_1, \dots, o_H]\, W^O + b^O, \qquad
        o_h = \operatorname{attention}(q W^Q_h + b^Q_h,\; k W^K_h + b^K_h,\; v W^V_h + b^V_h)

    Parameters
    ----------
    parameters : MultiHeadAttention
        ``query`` of shape (C, H * D), ``key`` of shape (C', G * D), ``value`` of shape (C'', G * E), and ``output`` of
        shape (H * E, C) or ``None``.
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
        ``prepare(query, key, value)`` maps the heads, (..., H, M, D), (..., G, N, D) and (..., G, N, E), before
        attention, and returns all three. Apply rotary positions and the normalization of queries and keys here.
    mask, bias, is_causal, scale, softcap, score_mod, sinks, dropout
        As in `scaled_dot_product_attention`.
    return_weights, return_logsumexp, implementation, arithmetic, assume_finite, shards, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., M, C)
        Or ``Attention(output, weights, logsumexp)`` if a return flag is set.

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
    key = query if key is None else key
    value = key if value is None else value
    num_heads, groups = plain_integer(num_heads), plain_integer(num_key_value_heads)
    num_kv_heads = num_heads if groups is None else groups
    settled: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "prepare": prepare, **options}
    xp, has_constants = _check_call(query=query, key=key, value=value, parameters=parameters, **settled)
    settled = (with_constants(query, settled) if has_constants else settled) | {"xp": xp}
    if prepare is not None:
        settled["prepare"] = functools.partial(_checked_heads, prepare)
    result = attend_heads(upcast(parameters, xp=xp), upcast((query, key, value), xp=xp), **settled)
    output = cast_to(result.output, query.dtype, xp=xp)
    if not (settled.get("return_weights") or settled.get("return_logsumexp")):
        return output
    weights = cast_to(result.weights, query.dtype, xp=xp) if settled.get("return_weights") else None
    return Attention(output, weights, result.logsumexp)


def attend_heads(
    parameters: MultiHeadAttention,
    inputs: tuple[Array, Array, Array],
    *,
    num_heads: int,
    num_kv_heads: int,
    prepare: Callable[[Array, Array, Array], tuple[Array, Array, Array]] | None = None,
    xp: Namespace,
    **options: Any,
) -> Attention:
    """Multi-head attention of arguments that were checked, in the type of the computation."""
    options |= {name: upcast(options[name], xp=xp) for name in ("bias", "sinks") if options.get(name) is not None}
    ops = ARITHMETICS[options.get("arithmetic", "fast")]
    uses = zip(fan_out(inputs, ops, xp), parameters[:3], strict=True)
    query, key, value = [ops.affine(x, *projection, xp=xp) for x, projection in uses]
    split = one_program(split_channels, xp)
    counts = num_heads, num_kv_heads, num_kv_heads
    heads = [split(x, num_heads=count, xp=xp) for x, count in zip((query, key, value), counts, strict=True)]
    query, key, value = heads if prepare is None else prepare(*heads)
    result = checked_attention(query, key, value, {"implementation": "auto", **options, "xp": xp})
    output = one_program(merge_channels, xp)(result.output, xp=xp)
    if parameters.output is not None:
        output = ops.affine(output, *parameters.output, xp=xp)
    return result._replace(output=output)


def _checked_heads(prepare: Callable[..., tuple[Array, Array, Array]], *heads: Array) -> tuple[Array, Array, Array]:
    """What a function of users makes of query, key and value."""
    prepared = prepare(*heads)
    check_prepared(prepared)
    return prepared


@once_per_signature
def _check_call(
    *,
    query: Array,
    key: Array,
    value: Array,
    parameters: MultiHeadAttention,
    num_heads: int,
    num_kv_heads: int,
    prepare: Any,
    xp: Namespace | None = None,
    **raw: Any,
) -> tuple[Namespace, bool]:
    """Raise unless the arguments fit together; return their namespace, and whether some are constants."""
    check_projections("attention", parameters)
    turned = with_constants(query, raw)
    options = dict(turned)
    mask, bias = options.pop("mask", None), options.pop("bias", None)
    check_scaling(options.get("scale"), options.get("softcap"))
    named = {"query": query, "key": key, "value": value, "attention": parameters, "bias": bias}
    xp = common_namespace(xp, named | mask_arrays(mask) | option_arrays(**options))
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "shards": options.pop("shards", None)}
    check_multi_head(parameters, (query, key, value), mask=mask, bias=bias, **heads)
    check_options(query, num_heads, **options)
    if prepare is not None:
        check_function("prepare", prepare)
        check_arity("prepare", prepare, "query, key and value", 3)
    return xp, turned is not raw


def check_projections(name: str, parameters: MultiHeadAttention) -> None:
    """Raise unless the parameters are projections."""
    check_parameters(name, parameters, MultiHeadAttention)
    for field, projection in parameters._asdict().items():
        if not (projection is None and field == "output"):
            check_parameters(f"{name}.{field}", projection, Linear)


def check_multi_head(
    parameters: MultiHeadAttention,
    inputs: tuple[Array, Array, Array],
    *,
    num_heads: int,
    num_kv_heads: int,
    mask: Mask | Array | None,
    bias: Array | None,
    shards: Shards | None = None,
) -> None:
    """Raise unless inputs, projections, heads, mask and bias fit together."""
    query, key, value = inputs
    check_positive("num_heads", num_heads)
    check_positive("num_key_value_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"expected num_key_value_heads that divide num_heads {num_heads}; got {num_kv_heads}")
    for name, array, layout in (("query", query, "M"), ("key", key, "N"), ("value", value, "N")):
        check_input(name, array, 2, f"(..., {layout}, channels)")
        check_like(name, array, "query", query)
        check_linear(
            f"{name} projection", getattr(parameters, name), name, array, hint=_order_hint(parameters, key, value)
        )
    check_shapes(
        _SEQUENCES, {"query": query, "key": key, "value": value}, hint=lambda name, *_: ORDER if name == "value" else ""
    )
    _check_widths(parameters, num_heads, num_kv_heads)
    if shards is not None:
        here, _ = place_of(shards, query)
        check_shared(query, mask, bias, whole_lengths(shards, here, query, key), num_heads)
        return
    target = (*sizes(query)[:-2], num_heads, sizes(query)[-2], sizes(key)[-2])
    if mask is not None:
        check_mask(mask, target, query)
    if bias is not None:
        check_bias(bias, query, target)


_OUTPUT = shapes_of(
    "output projection.weight: inner out like value projection.weight,"
    " output projection.bias: optional out like output projection.weight"
)
_SEQUENCES = shapes_of("query: ... M D, key: ... N K like query, value: ... N V like key")


def _order_hint(parameters: MultiHeadAttention, key: Array, value: Array) -> str:
    """The order of arguments, where key and value have the channels of each other, as in the order of Keras."""
    widths = [sizes(each.weight)[:1] for each in (parameters.key, parameters.value)]
    return ORDER if widths[0] != widths[1] and [sizes(value)[-1:], sizes(key)[-1:]] == widths else ""


def _check_widths(parameters: MultiHeadAttention, num_heads: int, num_kv_heads: int) -> None:
    widths = []
    for name, heads in (("query", num_heads), ("key", num_kv_heads), ("value", num_kv_heads)):
        channels = sizes(getattr(parameters, name).weight)[1]
        if channels is not None and channels % heads:
            raise ValueError(
                f"expected {name} projection to channels that {heads} heads share out evenly; got {channels}"
            )
        widths.append(None if channels is None else channels // heads)
    if widths[0] != widths[1] and None not in widths[:2]:
        raise ValueError(f"expected key heads of width {widths[0]} to match query heads; got {widths[1]}")
    if parameters.output is not None and widths[2] is not None:
        weight, bias = parameters.output
        arrays = {"output projection.weight": weight, "output projection.bias": bias}
        arrays["value projection.weight"] = parameters.value.weight
        check_shapes(_OUTPUT, arrays, {"inner": num_heads * widths[2]})
