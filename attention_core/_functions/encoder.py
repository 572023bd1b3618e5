"""The encoder layer of a transformer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

from .._arithmetic import ACTIVATIONS, ARITHMETICS
from .._arrays import Array, Namespace, cast_to, dtypes_differ, sizes, sizes_differ, upcast
from .._attention.call import Attention
from .._backend import common_namespace, may_be_step, with_autocast
from .._checks import (
    check_choice,
    check_flags,
    check_function,
    check_like_array,
    check_number,
    check_parameters,
    once_per_signature,
)
from ..parameters import DecoderLayer, EncoderLayer, LayerNorm
from ..random import Dropout, fold_in, seeded
from .attention import check_options
from .channels import check_channels, feed_and_contract, feed_forward_shapes, norm_shapes, normalized
from .multi_head import attend_heads, check_heads, check_pairs, counts_of, projection_shapes
from .options import NUMBERS, Options, arrays_of, options_but, with_constants
from .shards import check_not_shared

NOT_OF_LAYERS = (*NUMBERS, "sinks", "return_logsumexp", "assume_finite")


@may_be_step
@with_autocast(position=1, lowers=False, options=options_but(*NOT_OF_LAYERS))
def encoder_layer(
    parameters: EncoderLayer,
    x: Array,
    /,
    *,
    num_heads: int,
    num_key_value_heads: int | None = None,
    norm_first: bool = True,
    activation: str = "gelu",
    epsilon: float = 1e-5,
    hook: Callable[[str, Callable[[Array], Any], Array], Any] | None = None,
    **options: Unpack[Options],
) -> Any:
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
        H.
    num_key_value_heads : int, optional
        A divisor of H; by default H.
    norm_first : bool
        Whether to normalize the input of each branch (GPT-2), or the sum after it (the first transformer, BERT).
    mask : Mask or Array of bool, broadcastable to (..., H, L, L), optional
        True = may attend.
    bias : Array, broadcastable to (..., H, L, L), optional
        Added to the scores, such as one of relative positions.
    score_mod : callable, optional
        As in `scaled_dot_product_attention`.
    is_causal : bool
        Whether no position attends to later ones.
    activation : {"gelu", "gelu_tanh", "relu", "silu"}
        Of the feed-forward, as in `feed_forward`.
    epsilon : float
        Of both normalizations.
    dropout : Dropout, optional
        Applied to the attention weights and to both branches, each with a seed derived from this one.
    hook : callable, optional
        ``hook(name, function, h)`` is computed in place of ``function(h)``, before dropout. The name is that of the
        parameters of this part: ``"attention"``, ``"attention_norm"``, ``"feed_forward"`` or ``"feed_forward_norm"``.
        With ``return_weights``, attention returns ``Attention``.
    return_weights : bool
    implementation : {"auto", "dense", "blockwise", "fused"}
        Of attention, as in `scaled_dot_product_attention`.
    arithmetic : {"fast", "reproducible"}
        As in `scaled_dot_product_attention`.
    shards : Shards, optional
        As in `scaled_dot_product_attention`, without dropout: L are the positions of this rank.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., L, C)
        Or, with ``return_weights``, ``Attention(output, weights)`` with weights (..., H, L, L).

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
    settled = {**with_constants(x, {**options}), **counts_of(num_heads, num_key_value_heads)}
    more = {"epsilon": epsilon, "norm_first": norm_first, "activation": activation, "hook": hook}
    xp = settled["xp"] = _check_call(x=x, parameters=parameters, **more, **settled)
    dropout, return_weights = settled.pop("dropout", None), settled.get("return_weights", False)
    dtype = x.dtype
    parameters, x = upcast((parameters, x), xp=xp)
    ops = ARITHMETICS[settled.get("arithmetic", "fast")]
    in_weights, in_attention, in_feed_forward = derived_dropouts(seeded(dropout, x, xp), 3, xp)

    def attend(h: Array) -> Any:
        """Attention, with its weights if they are to be returned."""
        result = attend_heads(parameters.attention, (h, h, h), dropout=in_weights, **settled)
        return result if return_weights else result.output

    feed = functools.partial(feed_and_contract, parameters.feed_forward, activation=activation, ops=ops, xp=xp)
    branches = {"attention": (attend, in_attention), "feed_forward": (feed, in_feed_forward)}
    x, weights = apply_branches(parameters, x, branches, settled | more)
    x = cast_to(x, dtype, xp=xp)
    return Attention(x, cast_to(weights, dtype, xp=xp)) if return_weights else x


def apply_branches(parameters: Any, x: Array, branches: dict[str, Any], settled: dict[str, Any]) -> tuple[Array, Any]:
    """Apply the branches of a layer, each between its norms, with dropout and a residual; return the weights, too.

    A branch is a function and its dropout, by the name of its parameters. A hook is called for each branch, and for
    norms that are parts with a name: those of `LayerNorm`.
    """
    ops, xp, weights = ARITHMETICS[settled.get("arithmetic", "fast")], settled["xp"], None
    norm_first, hook = settled["norm_first"], settled.get("hook")

    def normal(name: str, h: Array) -> Any:
        if (norm := getattr(parameters, name, None)) is None:
            return h
        function = functools.partial(normalized, norm=norm, epsilon=settled["epsilon"], ops=ops, xp=xp)
        return hooked(hook if isinstance(norm, LayerNorm) else None, name, function, h)

    for name, (branch, dropout) in branches.items():
        x, h = ops.copies(x, 2, xp=xp)
        y = hooked(hook, name, branch, normal(f"{name}_norm", h) if norm_first else h)
        if settled.get("return_weights") and name == "attention":
            check_parameters("the result of hook for attention", y, Attention)
            y, weights = y.output, y.weights
        x = ops.add(x, ops.drop(normal(f"{name}_post_norm", y), dropout, xp=xp), xp=xp)
        x = x if norm_first else normal(f"{name}_norm", x)
    return x, weights


def hooked(hook: Callable[..., Any] | None, name: str, function: Callable[[Array], Any], h: Array) -> Any:
    """What a hook returns for a part of the layer: like its input, and the weights where they are asked for."""
    if hook is None:
        return function(h)
    result = hook(name, function, h)
    output = getattr(result, "output", result)
    if not hasattr(output, "dtype") or dtypes_differ(output, h) or output.shape != h.shape:
        check_like_array(f"the result of hook for {name}", output, "its input", h)
    return result


def derived_dropouts(dropout: Dropout | None, count: int, xp: Namespace) -> list[Dropout | None]:
    """Derive dropouts with different seeds."""
    if dropout is None or dropout.rate == 0:
        return [None] * count
    return [Dropout(dropout.rate, fold_in(dropout.seed, index, xp=xp)) for index in range(count)]


@once_per_signature
def _check_call(*, x: Array, parameters: EncoderLayer, xp: Any = None, **options: Any) -> Namespace:
    """Raise unless the arguments fit together; return their namespace."""
    check_parameters("layer", parameters, EncoderLayer)
    xp = common_namespace(xp, {"x": x, "layer": parameters, **arrays_of(options)})
    mask, bias, shards = (options.pop(name, None) for name in ("mask", "bias", "shards"))
    of_layer = {name: options.pop(name) for name in ("num_heads", "num_kv_heads", *OF_LAYER)}
    check_branches("layer", parameters, x, of_layer)
    check_pairs(x, x, of_layer["num_heads"], mask=mask, bias=bias, shards=shards)
    check_options(x, of_layer["num_heads"], **options)
    check_not_shared(shards, dropout=options.get("dropout"), return_weights=options.get("return_weights") or None)
    check_of_layer(of_layer)
    check_channels("x", sizes(x)[-1])
    return xp


OF_LAYER = ("norm_first", "activation", "epsilon", "hook")


def check_of_layer(settled: dict[str, Any]) -> None:
    """Raise unless the options of a layer itself are valid."""
    check_flags(norm_first=settled["norm_first"])
    check_number("epsilon", settled["epsilon"], positive=True)
    check_choice("an activation", settled["activation"], ACTIVATIONS)
    if settled["hook"] is not None:
        check_function("hook", settled["hook"])


def check_branches(name: str, layer: EncoderLayer | DecoderLayer, x: Array, settled: dict[str, Any]) -> dict[str, Any]:
    """Raise unless self-attention, feed-forward and norms of a layer fit its input, and lead back to its channels.

    Return the size of each letter: C channels, H and G heads of width D, and of width E in values.
    """
    attention, weight = layer.attention, f"{name}.attention.query.weight"
    norms = [field for field in layer._fields if field.endswith("norm") and getattr(layer, field) is not None]
    lines = [
        projection_shapes(f"{name}.attention", attention, ("x: floating ... L C", "C", "C"), "C"),
        feed_forward_shapes(f"{name}.feed_forward", layer.feed_forward, "C", "C", weight),
        *(norm_shapes(f"{name}.{each}", getattr(layer, each), HEAD_NORMS.get(each, "C"), "x") for each in norms),
    ]
    known = check_heads(", ".join(lines), {"x": x, name: layer}, settled["num_heads"], settled["num_kv_heads"])
    if attention.output is None and known["E"] is not None and sizes_differ(known["H"] * known["E"], known["C"]):
        got = known["H"] * known["E"]
        raise ValueError(f"expected {name}.attention.value back to {known['C']} channels; got {got} of all heads")
    return known


HEAD_NORMS = {"query_norm": "D", "key_norm": "D"}
