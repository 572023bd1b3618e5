"""Multi-head attention, and how channels are split into heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, Unpack

from .._arithmetic import ARITHMETICS, fan_out
from .._arrays import Array, Arrays, Namespace, cast_to, move_axis, one_program, shape, sizes, upcast
from .._attention.call import Attention
from .._backend import common_namespace, may_be_step, with_autocast
from .._checks import (
    ORDER,
    check_arity,
    check_function,
    check_parameters,
    check_positive,
    check_prepared,
    check_shapes,
    linear_shapes,
    once_per_signature,
    plain_integer,
)
from ..parameters import MultiHeadAttention
from .attention import check_options, checked_attention
from .options import Options, arrays_of, options_but, with_constants
from .shards import check_shared, place_of, whole_lengths


def split_heads(x: Array, num_heads: int, /, *, xp: Namespace | None = None) -> Array:
    """Split the channels of each position into heads.

    .. math:: y_{h, l, d} = x_{l, h D + d}

    Parameters
    ----------
    x : Array, shape (..., L, H * D)
    num_heads : int
        H; it divides the number of channels.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., H, L, D)

    Raises
    ------
    ValueError
        When the number of heads does not divide the channels.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> split_heads(xp.zeros((2, 5, 12)), 3).shape
    (2, 3, 5, 4)
    """
    xp = common_namespace(xp, {"x": x})
    num_heads = check_positive("num_heads", num_heads)
    check_shapes("x: ... L H*D", {"x": x}, {"H": num_heads})
    return one_program(split_channels, xp)(x, num_heads=num_heads, xp=xp)


def merge_heads(x: Array, /, *, xp: Namespace | None = None) -> Array:
    """Merge the heads of each position into channels: the inverse of `split_heads`.

    .. math:: y_{l, h D + d} = x_{h, l, d}

    Parameters
    ----------
    x : Array, shape (..., H, L, D)
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., L, H * D)

    Raises
    ------
    ValueError
        When ``x`` has fewer than three axes.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> merge_heads(xp.zeros((2, 3, 5, 4))).shape
    (2, 5, 12)
    """
    xp = common_namespace(xp, {"x": x})
    check_shapes("x: ... H L D", {"x": x})
    return one_program(merge_channels, xp)(x, xp=xp)


def split_channels(x: Array, *, num_heads: int, xp: Namespace) -> Array:
    """The body of `split_heads`: (..., L, H * D) -> (..., H, L, D)."""
    *leading, length, channels = shape(x, xp=xp)
    return move_axis(xp.reshape(x, (*leading, length, num_heads, channels // num_heads)), -2, -3, xp)


def merge_channels(x: Array, *, xp: Namespace) -> Array:
    """The body of `merge_heads`: (..., H, L, D) -> (..., L, H * D)."""
    *leading, heads, length, width = shape(x, xp=xp)
    return xp.reshape(move_axis(x, -3, -2, xp), (*leading, length, heads * width))


Prepare: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Array, Array]]


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
    prepare: Prepare | None = None,
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
    constant_options = with_constants(query, {**options})
    settled = {**constant_options, "prepare": prepare, **counts_of(num_heads, num_key_value_heads)}
    xp = settled["xp"] = _check_call(query=query, key=key, value=value, parameters=parameters, **settled)
    if prepare is not None:
        settled["prepare"] = functools.partial(_checked_heads, prepare)
    result = attend_heads(upcast(parameters, xp=xp), upcast((query, key, value), xp=xp), **settled)
    output = cast_to(result.output, query.dtype, xp=xp)
    if not (settled.get("return_weights") or settled.get("return_logsumexp")):
        return output
    weights = cast_to(result.weights, query.dtype, xp=xp) if settled.get("return_weights") else None
    return Attention(output, weights, result.logsumexp)


def counts_of(num_heads: Any, num_key_value_heads: Any) -> dict[str, Any]:
    """The numbers of query heads, and of key/value heads, by default as many; both as integers of Python."""
    heads, groups = plain_integer(num_heads), plain_integer(num_key_value_heads)
    return {"num_heads": heads, "num_kv_heads": heads if groups is None else groups}


def attend_heads(
    parameters: MultiHeadAttention, inputs: Arrays, *, prepare: Prepare | None = None, xp: Namespace, **options: Any
) -> Attention:
    """Multi-head attention of arguments that were checked, in the type of the computation."""
    options |= {name: upcast(options[name], xp=xp) for name in ("bias", "sinks") if options.get(name) is not None}
    ops = ARITHMETICS[options.get("arithmetic", "fast")]
    uses = zip(fan_out(inputs, ops, xp), parameters[:3], strict=True)
    query, key, value = [ops.affine(x, *projection, xp=xp) for x, projection in uses]
    split = one_program(split_channels, xp)
    num_heads, num_kv_heads = options.pop("num_heads"), options.pop("num_kv_heads")
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
    prepare: Any,
    xp: Any = None,
    **options: Any,
) -> Namespace:
    """Raise unless the arguments fit together; return their namespace."""
    check_parameters("attention", parameters, MultiHeadAttention)
    inputs = {"query": query, "key": key, "value": value, "attention": parameters}
    xp = common_namespace(xp, inputs | arrays_of(options))
    mask, bias, shards = (options.pop(name, None) for name in ("mask", "bias", "shards"))
    num_heads, num_kv_heads = options.pop("num_heads"), options.pop("num_kv_heads")
    taken = "query: floating ... M C", "key: floating ... N K", "value: floating ... N V"
    line = projection_shapes("attention", parameters, taken, "out")
    check_heads(line, inputs, num_heads, num_kv_heads, functools.partial(_order_hint, inputs))
    check_pairs(query, key, num_heads, mask=mask, bias=bias, shards=shards)
    check_options(query, num_heads, **options)
    if prepare is not None:
        check_function("prepare", prepare)
        check_arity("prepare", prepare, "query, key and value", 3)
    return xp


def projection_shapes(name: str, parameters: MultiHeadAttention, inputs: tuple[str, str, str], out: str) -> str:
    """The line of projections, of what they take, or of the letters of its channels alone, and where they lead to."""
    widths = zip(("query", "key", "value", "output"), (*inputs, "H*E"), ("H*D", "G*D", "G*E", out), strict=True)
    there = [each for each in widths if getattr(parameters, each[0]) is not None]
    return ", ".join(linear_shapes(f"{name}.{field}", x, to, f"{name}.query.weight") for field, x, to in there)


def check_heads(
    line: str, arrays: dict[str, Any], num_heads: int, num_kv_heads: int, hint: Callable[..., str] | None = None
) -> dict[str, Any]:
    """Raise unless projections fit their inputs and so many heads; return the size of each letter."""
    check_positive("num_heads", num_heads)
    check_positive("num_key_value_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"expected num_key_value_heads that divide num_heads {num_heads}; got {num_kv_heads}")
    return check_shapes(line, arrays, {"H": num_heads, "G": num_kv_heads}, hint)


def check_pairs(query: Array, key: Array, num_heads: int, *, mask: Any, bias: Any = None, shards: Any = None) -> None:
    """Raise unless mask and bias fit the heads of inputs (..., M, C) and (..., N, C'), or those of the whole."""
    lengths: Any = sizes(query)[-2], sizes(key)[-2]
    if shards is not None:
        here, _ = place_of(shards, query)
        lengths = whole_lengths(shards, here, query, key)
    check_shared(query, mask, bias, lengths, num_heads)


def _order_hint(inputs: dict[str, Any], name: str, array: Array, known: dict[str, Any]) -> str:
    """The order of arguments, where key and value have the channels of each other, as in the order of Keras."""
    if name == "value" and sizes(array)[-1] == known["V"]:
        return ORDER
    parameters, key, value = (inputs[each] for each in ("attention", "key", "value"))
    widths = [sizes(each.weight)[:1] for each in (parameters.key, parameters.value)]
    is_swapped = widths[0] != widths[1] and [sizes(value)[-1:], sizes(key)[-1:]] == widths
    return ORDER if is_swapped and name in ("key", "value") else ""
