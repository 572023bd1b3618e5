"""The encoder layer of a transformer."""

from __future__ import annotations

import functools
from typing import Any

from attention_core._arithmetic import arithmetic_of
from attention_core._arrays import Array, Namespace, cast_to, sizes, upcast
from attention_core._backend import common_namespace, with_autocast
from attention_core._checks import check_flags, check_number, check_parameters, once_per_signature
from attention_core._functions.attention import check_options, option_arrays
from attention_core._functions.feed_forward import check_feed_forward, expand_and_contract
from attention_core._functions.multi_head import attend_heads, check_multi_head, check_projections
from attention_core._functions.normalization import check_layer_norm
from attention_core.masks import Mask
from attention_core.masks._tree import mask_arrays
from attention_core.parameters import EncoderLayer, FeedForward
from attention_core.random import Dropout, fold_in, seeded


@with_autocast(position=1, lowers=False)
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
    r"""Apply the encoder layer of a transformer: self-attention and feed-forward, each on a residual branch.

    .. math::

        \text{norm first:}\quad & h = x + \operatorname{attention}(\operatorname{norm}_1(x)), &
        y &= h + \operatorname{feed\_forward}(\operatorname{norm}_2(h)) \\
        \text{norm last:}\quad & h = \operatorname{norm}_1(x + \operatorname{attention}(x)), &
        y &= \operatorname{norm}_2(h + \operatorname{feed\_forward}(h))

    Parameters
    ----------
    parameters : EncoderLayer
    x : Array, shape (..., L, C)
        16-bit types are computed in float32 and rounded once.
    num_heads : int
    norm_first : bool
        Whether to normalize the input of each branch (GPT-2), or the sum after it (the first transformer, BERT).
    mask : Mask or Array of bool, broadcastable to (..., H, L, L), optional
        True = may attend.
    epsilon : float
        Of both normalizations.
    dropout : Dropout, optional
        Applied to the attention weights and to both branches, each with a seed derived from this one.
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
        When dtypes, shapes, devices or numbers do not fit. All errors are raised before any computation.

    References
    ----------
    A. Vaswani et al., "Attention is all you need", 2017. R. Xiong et al., "On layer normalization in the transformer
    architecture", 2020.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import EncoderLayer, FeedForward, LayerNorm, Linear, MultiHeadAttention
    >>> nothing, norm = Linear(xp.zeros((4, 4))), LayerNorm(xp.ones(4), xp.zeros(4))
    >>> attention = MultiHeadAttention(nothing, nothing, nothing, nothing)
    >>> layer = EncoderLayer(attention, norm, FeedForward(nothing, nothing), norm)
    >>> x = xp.ones((3, 4))
    >>> bool(xp.all(encoder_layer(layer, x, num_heads=2) == x))
    True
    """
    options: dict[str, Any] = {"num_heads": num_heads, "mask": mask}
    options |= {"implementation": implementation, "arithmetic": arithmetic}
    numbers = {"epsilon": epsilon, "norm_first": norm_first}
    xp = _check_call(x=x, parameters=parameters, dropout=dropout, xp=xp, **numbers, **options)
    dtype = x.dtype
    parameters, x = upcast((parameters, x), xp=xp)
    ops = arithmetic_of(arithmetic)
    in_weights, in_attention, in_feed_forward = _dropouts(seeded(dropout, x, xp), 3, xp)

    def attend(h: Array) -> Array:
        result = attend_heads(
            parameters.attention, (h, h, h), num_kv_heads=num_heads, dropout=in_weights, xp=xp, **options
        )
        return ops.drop(result.output, in_attention, xp=xp)

    def feed(h: Array) -> Array:
        return expand_and_contract(parameters.feed_forward, h, in_feed_forward, ops, xp=xp)

    for norm, branch in ((parameters.attention_norm, attend), (parameters.feed_forward_norm, feed)):
        normal = functools.partial(ops.normalize, scale=norm.scale, offset=norm.offset, epsilon=float(epsilon), xp=xp)
        x, h = ops.copies(x, 2, xp=xp)
        x = ops.add(x, branch(normal(h)), xp=xp) if norm_first else normal(ops.add(x, branch(h), xp=xp))
    return cast_to(x, dtype, xp=xp)


def _dropouts(dropout: Dropout | None, count: int, xp: Namespace) -> list[Dropout | None]:
    """Derive dropouts with different seeds."""
    if dropout is None or dropout.rate == 0:
        return [None] * count
    return [Dropout(dropout.rate, fold_in(dropout.seed, index, xp=xp)) for index in range(count)]


@once_per_signature
def _check_call(
    *,
    x: Array,
    parameters: EncoderLayer,
    num_heads: int,
    epsilon: float,
    norm_first: bool,
    mask: Any,
    xp: Any,
    **options: Any,
) -> Namespace:
    """Raise unless the arguments fit together; return their namespace."""
    check_parameters("layer", parameters, EncoderLayer)
    check_projections("attention", parameters.attention)
    xp = common_namespace(xp, {"x": x, "layer": parameters, **mask_arrays(mask), **option_arrays(**options)})
    check_parameters("feed_forward", parameters.feed_forward, FeedForward)
    check_multi_head(parameters.attention, (x, x, x), num_heads=num_heads, num_kv_heads=num_heads, mask=mask, bias=None)
    check_options(x, num_heads, **options)
    check_number("epsilon", epsilon, positive=True)
    check_flags(norm_first=norm_first)
    check_layer_norm("attention_norm", parameters.attention_norm, "x", x)
    check_layer_norm("feed_forward_norm", parameters.feed_forward_norm, "x", x)
    check_feed_forward("feed_forward", parameters.feed_forward, "x", x)
    _check_outputs(parameters, sizes(x)[-1])
    return xp


def _check_outputs(parameters: EncoderLayer, channels: int | None) -> None:
    """Raise unless both branches lead back to the channels of the input."""
    attention = parameters.attention
    last = {"attention": attention.value} if attention.output is None else {"attention.output": attention.output}
    for name, projection in {"feed_forward.contract": parameters.feed_forward.contract, **last}.items():
        if sizes(projection.weight)[1] != channels:
            raise ValueError(f"expected {name} back to {channels} channels; got {sizes(projection.weight)[1]}")
