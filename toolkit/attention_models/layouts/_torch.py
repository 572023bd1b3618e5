"""Layouts of PyTorch and equinox, whose weights are (out, in)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from attention_core import layers
from attention_core._arrays import Array, Namespace
from attention_core.parameters import DecoderLayer, EncoderLayer, FeedForward, Linear, MultiHeadAttention
from attention_models.layouts._layout import (
    PROJECTIONS,
    Arrays,
    Layout,
    LayoutError,
    Sizes,
    attention_of,
    check_attention,
    check_kind,
    check_maps,
    check_settings,
    linear_arrays,
    namespace_of,
    norm_arrays,
)

TORCH = "torch.nn.MultiheadAttention"
TORCH_ENCODER_LAYER = "torch.nn.TransformerEncoderLayer"
TORCH_DECODER_LAYER = "torch.nn.TransformerDecoderLayer"
EQUINOX = "equinox.nn.MultiheadAttention"
_HINTS = {f"{prefix}bias_": "add_bias_kv has no counterpart here" for prefix in ("", "self_attn.", "multihead_attn.")}


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
        ``v_proj_weight`` (C, in). ``out_proj.weight`` (C, C). Optionally ``in_proj_bias`` (3 C,) and
        ``out_proj.bias`` (C,).
    num_heads : int
    zero_attention : bool
        ``add_zero_attn``.
    dropout : float
    xp : array namespace, optional

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown, as ``bias_k`` and ``bias_v`` of ``add_bias_kv``.

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
    reader.close(_HINTS)
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
        "add_zero_attn": definition.zero_attention,
        "kdim": sizes.key_channels,
        "vdim": sizes.value_channels,
    }


def _check_torch(definition: Any) -> Sizes:
    sizes = check_attention(TORCH, definition, zero_attention=True)
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
    return MultiHeadAttention(query, key, value, output)


def _torch_arrays(tree: MultiHeadAttention, prefix: str, xp: Namespace) -> dict[str, Array]:
    weights = [xp.matrix_transpose(each.weight) for each in tree[:3]]
    if len({tuple(weight.shape) for weight in weights}) == 1 and weights[0].shape[0] == weights[0].shape[1]:
        arrays = {"in_proj_weight": xp.concat(weights, axis=0)}
    else:
        arrays = {f"{name}_proj_weight": weight for name, weight in zip("qkv", weights, strict=True)}
    if tree.query.bias is not None:
        arrays["in_proj_bias"] = xp.concat([each.bias for each in tree[:3]], axis=0)
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
    settings: dict[str, Any] = {"norm_first": norm_first, "epsilon": epsilon, "activation": activation}
    return _read_layer(TORCH_ENCODER_LAYER, arrays, xp, num_heads=num_heads, dropout=dropout, **settings)


def to_torch_encoder_layer(
    definition: layers.EncoderLayer, parameters: EncoderLayer, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for `torch.nn.TransformerEncoderLayer`: the inverse of `from_torch_encoder_layer`.

    Raises
    ------
    LayoutError
        When the layer has dropout, ``is_causal`` or grouped heads, or offsets of normalizations, but no biases.
    """
    return _write_layer(TORCH_ENCODER_LAYER, definition, parameters, xp)


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
        Those of `from_torch_encoder_layer`, ``multihead_attn.in_proj_weight`` and so on, of the second attention, and
        ``norm3.weight``, ``norm3.bias``.
    num_heads, norm_first, epsilon, activation, dropout, xp
        As in `from_torch_encoder_layer`.
    """
    settings: dict[str, Any] = {"norm_first": norm_first, "epsilon": epsilon, "activation": activation}
    return _read_layer(TORCH_DECODER_LAYER, arrays, xp, num_heads=num_heads, dropout=dropout, **settings)


def to_torch_decoder_layer(
    definition: layers.DecoderLayer, parameters: DecoderLayer, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for `torch.nn.TransformerDecoderLayer`: the inverse of `from_torch_decoder_layer`.

    Raises
    ------
    LayoutError
        When the layer has a setting that the module has not.
    """
    return _write_layer(TORCH_DECODER_LAYER, definition, parameters, xp)


FORMS: dict[str, tuple[Any, dict[str, str], tuple[str, ...]]] = {
    TORCH_ENCODER_LAYER: (EncoderLayer, {"attention": "self_attn"}, ("attention_norm", "feed_forward_norm")),
    TORCH_DECODER_LAYER: (
        DecoderLayer,
        {"attention": "self_attn", "cross_attention": "multihead_attn"},
        ("attention_norm", "cross_attention_norm", "feed_forward_norm"),
    ),
}
"""Trees of layers, the names of their attentions in PyTorch, and their normalizations in the order there."""


def _read_layer(layout: str, arrays: Mapping[str, Array], xp: Namespace | None, **settings: Any) -> tuple[Any, Any]:
    kind, attentions, norms = FORMS[layout]
    reader = Arrays(layout, arrays, xp)
    found: dict[str, Any] = {name: _torch_tree(reader, f"{prefix}.") for name, prefix in attentions.items()}
    bias, feed_forward = (
        found["attention"].query.bias is not None,
        FeedForward(*map(reader.linear, ("linear1", "linear2"))),
    )
    check_maps(layout, *found.values(), *feed_forward, bias=bias)
    found |= {name: reader.norm(f"norm{index}", bias=bias) for index, name in enumerate(norms, start=1)}
    reader.close(_HINTS)
    tree = kind(**found, feed_forward=feed_forward)
    definition = _layer(layout, *feed_forward.expand.weight.shape, bias=bias, **settings)
    layers.check_fit(definition, tree)
    return definition, tree


def _layer(layout: str, channels: int, inner: int, *, bias: bool, **settings: Any) -> Any:
    if layout == TORCH_ENCODER_LAYER:
        return layers.EncoderLayer(channels, inner=inner, bias=bias, **settings)
    settings |= {"attention_bias": bias, "feed_forward_bias": bias, "memory_channels": channels}
    return layers.DecoderLayer(channels, inner=inner, norm="layer", gated=False, rotary_base=None, **settings)


def _write_layer(layout: str, definition: Any, parameters: Any, xp: Namespace | None) -> dict[str, Array]:
    bias = _layer_arguments(layout, definition)["bias"]
    layers.check_fit(definition, parameters)
    (_, attentions, norms), xp = FORMS[layout], namespace_of(parameters, xp)
    arrays: dict[str, Array] = {}
    for name, prefix in attentions.items():
        arrays |= _torch_arrays(getattr(parameters, name), f"{prefix}.", xp)
    for name, linear in zip(("linear1", "linear2"), parameters.feed_forward, strict=True):
        arrays |= linear_arrays(name, linear, xp)
    for index, name in enumerate(norms, start=1):
        arrays |= norm_arrays(f"norm{index}", getattr(parameters, name))
        if not bias and bool(xp.any(xp.not_equal(arrays.pop(f"norm{index}.bias"), 0))):
            raise LayoutError(f"expected norm{index} without offset for {layout} without bias; got one")
    return arrays


def _layer_arguments(layout: str, definition: Any) -> dict[str, Any]:
    d = definition
    check_kind(layout, d, layers.KINDS[FORMS[layout][0].__name__])
    same = {name: getattr(d, name) for name in ("num_heads", "norm_first", "epsilon", "activation")}
    bias = d.bias if layout == TORCH_ENCODER_LAYER else d.attention_bias
    there = _layer(layout, d.channels, d.inner, bias=bias, **same)
    groups = None if d.num_key_value_heads == d.num_heads else d.num_key_value_heads
    ours, theirs = d.settings() | {"num_key_value_heads": groups}, there.settings()
    chosen = "implementation", "arithmetic"
    check_settings(layout, *((name, ours[name], theirs[name]) for name in ours if name not in chosen))
    return {
        "d_model": d.channels,
        "nhead": d.num_heads,
        "dim_feedforward": d.inner,
        "dropout": 0.0,
        "activation": d.activation,
        "layer_norm_eps": d.epsilon,
        "norm_first": d.norm_first,
        "bias": bias,
    }


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
        When the layer has a scale, a softcap, ``is_causal``, grouped heads, no output, or ``zero_attention``.
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
        TORCH_ENCODER_LAYER,
        from_torch_encoder_layer,
        to_torch_encoder_layer,
        functools.partial(_layer_arguments, TORCH_ENCODER_LAYER),
    ),
    "torch-decoder-layer": Layout(
        TORCH_DECODER_LAYER,
        from_torch_decoder_layer,
        to_torch_decoder_layer,
        functools.partial(_layer_arguments, TORCH_DECODER_LAYER),
    ),
    "equinox": Layout(EQUINOX, from_equinox, to_equinox, equinox_arguments),
}
