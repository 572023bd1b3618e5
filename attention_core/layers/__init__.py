"""What a layer is before any framework: its settings, the parameters it starts from, and its call.

The layers of `attention_torch`, `attention_jax` and `attention_tensorflow` hold parameters and place them; what they
are, and what they compute, is said here once. A layer of this module holds no array, so that it compares by value, is
written to a file as text, and can be called with the parameters of any library::

    layer = MultiHeadAttention(channels=64, num_heads=8)
    parameters = layer.init(0, xp=xp)
    y = layer(parameters, x)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from attention_core.layers._attention import DotProductAttention, MultiHeadAttention
from attention_core.layers._layer import Initial, Layer, check_fit, named_arrays, tree_from_names
from attention_core.layers._sagan import SaganAttention, SpectralVectors
from attention_core.layers._transformer import Embeddings, EncoderLayer, FeedForward

__all__ = [
    "DotProductAttention",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "Initial",
    "Layer",
    "MultiHeadAttention",
    "SaganAttention",
    "SpectralVectors",
    "check_fit",
    "layer_from_settings",
    "named_arrays",
    "tree_from_names",
]


def layer_from_settings(settings: Mapping[str, Any], /) -> Layer:
    """Make a layer of the settings that `Layer.settings` returned.

    Raises
    ------
    TypeError, ValueError
        When the layer or a setting is not known, or does not fit.

    Examples
    --------
    >>> layer_from_settings({"layer": "FeedForward", "channels": 4, "inner": 16})
    FeedForward(channels=4, inner=16, output_channels=None, bias=True, dropout=0.0, arithmetic='fast')
    """
    name = settings.get("layer")
    if name not in _KINDS:
        raise ValueError(f"expected a layer out of {', '.join(_KINDS)}; got {name!r}")
    kind = _KINDS[name]
    given = {key: value for key, value in settings.items() if key != "layer"}
    known = {field.name for field in fields(kind)}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"expected settings of {name} out of {', '.join(sorted(known))}; got {', '.join(unknown)}")
    try:
        return kind(**given)
    except TypeError as error:
        raise TypeError(f"expected the settings of {name}; got {given}: {error}") from error


_KINDS: dict[Any, type[Layer]] = {
    kind.__name__: kind
    for kind in (DotProductAttention, MultiHeadAttention, FeedForward, EncoderLayer, Embeddings, SaganAttention)
}

for _name in __all__:
    if hasattr(vars()[_name], "__module__"):
        vars()[_name].__module__ = __name__  # by which pickles and documentation know it
