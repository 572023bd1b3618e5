"""Layout of equinox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention_core import layers
from attention_core._arrays import Array, Namespace
from attention_core.layers import check_fit
from attention_core.layouts._layout import (
    PROJECTIONS,
    Arrays,
    Layout,
    attention_of,
    check_attention,
    linear_arrays,
    namespace_of,
)
from attention_core.parameters import MultiHeadAttention

EQUINOX = "equinox.nn.MultiheadAttention"


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

    Returns
    -------
    definition : attention_core.layers.MultiHeadAttention
    parameters : attention_core.parameters.MultiHeadAttention

    Raises
    ------
    LayoutError, TypeError, ValueError
        As in `from_torch`.
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
    TypeError, ValueError
        When the parameters do not fit the definition.
    """
    check_attention(EQUINOX, definition, biases="each")
    check_fit(definition, parameters)
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


LAYOUTS = {"equinox": Layout(EQUINOX, from_equinox, to_equinox, equinox_arguments)}
