"""Layouts of PyTorch and equinox, whose weights are (out, in)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention_core import layers
from attention_core._arrays import Array, Namespace
from attention_core.layouts._layout import (
    PROJECTIONS,
    Arrays,
    Layout,
    LayoutError,
    Sizes,
    all_pairs,
    attention_of,
    check_attention,
    check_kind,
    check_maps,
    check_settings,
    encoder_of,
    linear_arrays,
    namespace_of,
    norm_arrays,
)
from attention_core.parameters import DecoderLayer, EncoderLayer, FeedForward, Linear, MultiHeadAttention

TORCH = "torch.nn.MultiheadAttention"
TORCH_ENCODER_LAYER = "torch.nn.TransformerEncoderLayer"
TORCH_DECODER_LAYER = "torch.nn.TransformerDecoderLayer"
EQUINOX = "equinox.nn.MultiheadAttention"


def from_torch(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int,
    zero_attention: bool = False,
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Read the weights of `torch.nn.MultiheadAttention`.

    ``batch_first`` concerns inputs, not weights: here the batch always comes first.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``in_proj_weight`` (3 C, C), the rows of query, key and value, or ``q_proj_weight``, ``k_proj_weight``,
        ``v_proj_weight`` (C, in). ``out_proj.weight`` (C, C). Optionally ``in_proj_bias`` (3 C,), ``out_proj.bias``
        (C,), and ``bias_k``, ``bias_v`` (1, 1, C).
    num_heads : int
    zero_attention : bool
        ``add_zero_attn``.
    dropout : float
    xp : array namespace, optional

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> arrays = {"in_proj_weight": xp.ones((12, 4)), "out_proj.weight": xp.ones((4, 4))}
    >>> definition, parameters = from_torch(arrays, num_heads=2)
    >>> definition.bias, parameters.key.weight.shape
    (False, (4, 4))
    """
    reader = Arrays(TORCH, arrays, xp)
    tree = _torch_tree(reader, "")
    reader.close()
    return attention_of(TORCH, tree, num_heads, num_heads, zero_attention=zero_attention, dropout=dropout)


def to_torch(
    definition: layers.MultiHeadAttention, parameters: MultiHeadAttention, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for `torch.nn.MultiheadAttention`: the inverse of `from_torch`.

    Raises
    ------
    LayoutError
        When the layer has a scale, a softcap, grouped heads, heads of another width, no output, or a bias on some
        projections only. So with ``is_causal``, which is an argument of the module's call.
    """
    _check_torch(definition)
    layers.check_fit(definition, parameters)
    return _torch_arrays(parameters, "", namespace_of(parameters, xp))


def torch_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
    sizes = _check_torch(definition)
    return {
        "embed_dim": sizes.channels,
        "num_heads": definition.num_heads,
        "dropout": definition.dropout,
        "bias": all(sizes.biases),
        "add_bias_kv": definition.extra_key_value,
        "add_zero_attn": definition.zero_attention,
        "kdim": sizes.key_channels,
        "vdim": sizes.value_channels,
    }


def _check_torch(definition: Any) -> Sizes:
    sizes = check_attention(TORCH, definition, extra=True)
    width = sizes.channels / definition.num_heads
    check_settings(
        TORCH,
        ("head_dim", sizes.head_dim, width),
        ("value_head_dim", sizes.value_head_dim, width),
        ("output_channels", sizes.output_channels, sizes.channels),
    )
    return sizes


def _torch_tree(reader: Arrays, prefix: str) -> MultiHeadAttention:
    xp = reader.xp
    weight = reader.take(f"{prefix}out_proj.weight", None, None)
    channels = weight.shape[0]
    packed = reader.find(f"{prefix}in_proj_weight", 3 * channels, channels)
    if packed is None:
        weights = [reader.take(f"{prefix}{name}_proj_weight", channels, None) for name in "qkv"]
    else:
        weights = _thirds(packed, channels)
    bias = reader.find(f"{prefix}in_proj_bias", 3 * channels)
    biases = [None] * 3 if bias is None else _thirds(bias, channels)
    query, key, value = (Linear(xp.matrix_transpose(each), bias) for each, bias in zip(weights, biases, strict=True))
    output = Linear(xp.matrix_transpose(weight), reader.find(f"{prefix}out_proj.bias", channels))
    extra = [reader.find(f"{prefix}bias_{name}", 1, 1, channels) for name in "kv"]
    if (extra[0] is None) != (extra[1] is None):
        raise LayoutError(f"expected both bias_k and bias_v of {reader.layout}, or neither; got one")
    return MultiHeadAttention(
        query, key, value, output, *(each if each is None else xp.reshape(each, (-1,)) for each in extra)
    )


def _torch_arrays(tree: MultiHeadAttention, prefix: str, xp: Namespace) -> dict[str, Array]:
    weights = [xp.matrix_transpose(each.weight) for each in tree[:3]]
    if len({tuple(weight.shape) for weight in weights}) == 1 and weights[0].shape[0] == weights[0].shape[1]:
        arrays = {"in_proj_weight": xp.concat(weights, axis=0)}
    else:
        arrays = {f"{name}_proj_weight": weight for name, weight in zip("qkv", weights, strict=True)}
    if tree.query.bias is not None:
        arrays["in_proj_bias"] = xp.concat([each.bias for each in tree[:3]], axis=0)
    for name, extra in (("k", tree.extra_key), ("v", tree.extra_value)):
        if extra is not None:
            arrays[f"bias_{name}"] = xp.reshape(extra, (1, 1, -1))
    arrays |= linear_arrays("out_proj", tree.output, xp)
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def _thirds(array: Array, size: int) -> list[Array]:
    return [array[start : start + size, ...] for start in (0, size, 2 * size)]


def from_torch_encoder_layer(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int,
    norm_first: bool = False,
    epsilon: float = 1e-5,
    activation: str = "relu",
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.EncoderLayer, EncoderLayer]:
    """Read the weights of `torch.nn.TransformerEncoderLayer`.

    In training the module also drops inside the feed-forward, which has no counterpart.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``self_attn.in_proj_weight`` and so on as in `from_torch`, ``linear1.weight`` (inner, C), ``linear1.bias``,
        ``linear2.weight`` (C, inner), ``linear2.bias``, ``norm1.weight``, ``norm1.bias``, ``norm2.weight``,
        ``norm2.bias``. Without biases, those of normalizations are 0.
    num_heads : int
    norm_first : bool
    epsilon : float
        ``layer_norm_eps``.
    activation : {"relu", "gelu"}
        By default that of the module; the arrays do not tell.
    dropout : float
        Of the weights of attention, and of both branches.
    xp : array namespace, optional
    """
    reader = Arrays(TORCH_ENCODER_LAYER, arrays, xp)
    attention = _torch_tree(reader, "self_attn.")
    bias = attention.query.bias is not None
    first, last = (reader.norm(f"norm{index}", bias=bias) for index in (1, 2))
    tree = EncoderLayer(attention, first, _feed_forward(reader), last)
    reader.close()
    settings: dict[str, Any] = {"norm_first": norm_first, "epsilon": epsilon, "activation": activation}
    return encoder_of(TORCH_ENCODER_LAYER, tree, num_heads=num_heads, bias=bias, dropout=dropout, **settings)


def _feed_forward(reader: Arrays) -> FeedForward:
    return FeedForward(reader.linear("linear1"), reader.linear("linear2"))


def to_torch_encoder_layer(
    definition: layers.EncoderLayer, parameters: EncoderLayer, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for `torch.nn.TransformerEncoderLayer`: the inverse of `from_torch_encoder_layer`.

    Raises
    ------
    LayoutError
        When the layer has dropout, ``is_causal`` or grouped heads, or offsets of normalizations, but no biases.
    """
    _check_torch_encoder(definition)
    layers.check_fit(definition, parameters)
    xp = namespace_of(parameters, xp)
    norms = parameters.attention_norm, parameters.feed_forward_norm
    return {
        **_torch_arrays(parameters.attention, "self_attn.", xp),
        **_maps_and_norms(TORCH_ENCODER_LAYER, parameters.feed_forward, norms, xp),
    }


def _maps_and_norms(layout: str, feed_forward: Any, norms: tuple[Any, ...], xp: Namespace) -> dict[str, Array]:
    """The arrays of a feed-forward and of normalizations; where maps have no bias, these have none."""
    arrays = linear_arrays("linear1", feed_forward.expand, xp) | linear_arrays("linear2", feed_forward.contract, xp)
    for index, norm in enumerate(norms, start=1):
        arrays |= norm_arrays(f"norm{index}", norm)
        if feed_forward.expand.bias is None and bool(xp.any(xp.not_equal(arrays.pop(f"norm{index}.bias"), 0))):
            raise LayoutError(f"expected norm{index} without offset for {layout} without bias; got one")
    return arrays


def torch_encoder_arguments(definition: layers.EncoderLayer) -> dict[str, Any]:
    _check_torch_encoder(definition)
    return _layer_arguments(definition, definition.bias)


def _layer_arguments(definition: Any, bias: bool) -> dict[str, Any]:
    return {
        "d_model": definition.channels,
        "nhead": definition.num_heads,
        "dim_feedforward": definition.inner,
        "dropout": 0.0,
        "activation": definition.activation,
        "layer_norm_eps": definition.epsilon,
        "norm_first": definition.norm_first,
        "bias": bias,
    }


def _check_torch_encoder(definition: Any) -> None:
    check_kind(TORCH_ENCODER_LAYER, definition, layers.EncoderLayer)
    check_settings(TORCH_ENCODER_LAYER, ("dropout", definition.dropout, 0.0), *all_pairs(definition))


def from_torch_decoder_layer(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int,
    norm_first: bool = False,
    epsilon: float = 1e-5,
    activation: str = "relu",
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.DecoderLayer, DecoderLayer]:
    """Read the weights of `torch.nn.TransformerDecoderLayer`, which is causal here without a ``tgt_mask``.

    Parameters
    ----------
    arrays : mapping of str to Array
        Those of `from_torch_encoder_layer`, ``multihead_attn.in_proj_weight`` and so on, of attention to the memory, and
        ``norm3.weight``, ``norm3.bias``.
    num_heads, norm_first, epsilon, activation, dropout, xp
        As in `from_torch_encoder_layer`.
    """
    reader = Arrays(TORCH_DECODER_LAYER, arrays, xp)
    attention, cross = (_torch_tree(reader, f"{name}.") for name in ("self_attn", "multihead_attn"))
    feed_forward, bias = _feed_forward(reader), attention.query.bias is not None
    norm, cross_norm, last = (reader.norm(f"norm{index}", bias=bias) for index in (1, 2, 3))
    reader.close()
    check_maps(TORCH_DECODER_LAYER, attention, cross, *feed_forward, bias=bias)
    tree = DecoderLayer(attention, norm, feed_forward, last, cross_attention=cross, cross_attention_norm=cross_norm)
    channels, inner = feed_forward.expand.weight.shape
    settings: dict[str, Any] = {"norm_first": norm_first, "epsilon": epsilon, "activation": activation}
    definition = _decoder_layer(channels, num_heads, inner, bias=bias, dropout=dropout, **settings)
    layers.check_fit(definition, tree)
    return definition, tree


def _decoder_layer(channels: int, num_heads: int, inner: int, *, bias: bool, **settings: Any) -> layers.DecoderLayer:
    settings |= {"norm": "layer", "gated": False, "rotary_base": None, "memory_channels": channels}
    return layers.DecoderLayer(channels, num_heads, inner, attention_bias=bias, feed_forward_bias=bias, **settings)


def to_torch_decoder_layer(
    definition: layers.DecoderLayer, parameters: DecoderLayer, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for `torch.nn.TransformerDecoderLayer`: the inverse of `from_torch_decoder_layer`.

    Raises
    ------
    LayoutError
        When the layer has a setting that the module has not.
    """
    torch_decoder_arguments(definition)
    layers.check_fit(definition, parameters)
    xp = namespace_of(parameters, xp)
    cross: Any = parameters.cross_attention
    norms = parameters.attention_norm, parameters.cross_attention_norm, parameters.feed_forward_norm
    return {
        **_torch_arrays(parameters.attention, "self_attn.", xp),
        **_torch_arrays(cross, "multihead_attn.", xp),
        **_maps_and_norms(TORCH_DECODER_LAYER, parameters.feed_forward, norms, xp),
    }


def torch_decoder_arguments(definition: layers.DecoderLayer) -> dict[str, Any]:
    check_kind(TORCH_DECODER_LAYER, definition, layers.DecoderLayer)
    d = definition
    settings: dict[str, Any] = {"norm_first": d.norm_first, "epsilon": d.epsilon, "activation": d.activation}
    there = _decoder_layer(d.channels, d.num_heads, d.inner, bias=d.attention_bias, **settings)
    ours, theirs = d.with_settings(implementation="auto", arithmetic="fast").settings(), there.settings()
    check_settings(TORCH_DECODER_LAYER, *((name, ours[name], theirs[name]) for name in ours))
    return _layer_arguments(d, d.attention_bias)


def from_equinox(
    arrays: Mapping[str, Array], /, *, num_heads: int, dropout: float = 0.0, xp: Namespace | None = None
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Read the weights of `equinox.nn.MultiheadAttention`, with or without a bias on each projection.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``query_proj.weight``, ``key_proj.weight``, ``value_proj.weight``, ``output_proj.weight``, each (out, in).
        Optionally ``query_proj.bias`` (out,) and so on.
    num_heads : int
    dropout : float
    xp : array namespace, optional
    """
    reader = Arrays(EQUINOX, arrays, xp)
    tree = MultiHeadAttention(*(reader.linear(f"{name}_proj") for name in PROJECTIONS))
    reader.close()
    return attention_of(EQUINOX, tree, num_heads, num_heads, dropout=dropout)


def to_equinox(
    definition: layers.MultiHeadAttention, parameters: MultiHeadAttention, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for `equinox.nn.MultiheadAttention`: the inverse of `from_equinox`.

    Raises
    ------
    LayoutError
        When the layer has a scale, a softcap, ``is_causal``, grouped heads, no output, or extra keys.
    """
    check_attention(EQUINOX, definition, biases="each")
    layers.check_fit(definition, parameters)
    xp = namespace_of(parameters, xp)
    arrays: dict[str, Array] = {}
    for name in PROJECTIONS:
        arrays |= linear_arrays(f"{name}_proj", getattr(parameters, name), xp)
    return arrays


def equinox_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
    sizes = check_attention(EQUINOX, definition, biases="each")
    biases = {f"use_{name}_bias": present for name, present in zip(PROJECTIONS, sizes.biases, strict=True)}
    return {
        "num_heads": definition.num_heads,
        "query_size": sizes.channels,
        "key_size": sizes.key_channels,
        "value_size": sizes.value_channels,
        "output_size": sizes.output_channels,
        "qk_size": sizes.head_dim,
        "vo_size": sizes.value_head_dim,
        "dropout_p": definition.dropout,
        **biases,
    }


LAYOUTS = {
    "torch": Layout(TORCH, from_torch, to_torch, torch_arguments),
    "torch-encoder-layer": Layout(
        TORCH_ENCODER_LAYER, from_torch_encoder_layer, to_torch_encoder_layer, torch_encoder_arguments
    ),
    "torch-decoder-layer": Layout(
        TORCH_DECODER_LAYER, from_torch_decoder_layer, to_torch_decoder_layer, torch_decoder_arguments
    ),
    "equinox": Layout(EQUINOX, from_equinox, to_equinox, equinox_arguments),
}
