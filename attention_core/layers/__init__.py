"""Layers without a framework: settings, initial parameters, and the call.

The layers of `attention_torch`, `attention_jax` and `attention_keras` hold the parameters of a layer defined here.
A setting that is not valid raises `TypeError` or `ValueError` when the layer is made; so do heads that do not share out
the channels evenly. A definition holds no array. So it compares by value, is saved as text, and is called with
parameters of any library::

    layer = MultiHeadAttention(channels=64, num_heads=8)
    parameters = layer.init(0, xp=xp)
    y = layer(parameters, x)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._arrays import named_arrays, tree_from_names, type_text
from .._backend import announced
from .._keywords import publish
from ._attention import MultiHeadAttention
from ._decoder import DecoderLayer, GatedFeedForward, RMSNorm
from ._layer import Initial, Layer, check_fit
from ._sagan import SaganAttention, SpectralVectors
from ._transformer import Embeddings, EncoderLayer, FeedForward

__all__ = [
    "KINDS",
    "DecoderLayer",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "Initial",
    "Layer",
    "MultiHeadAttention",
    "RMSNorm",
    "SaganAttention",
    "SpectralVectors",
    "check_fit",
    "layer_from_settings",
    "named_arrays",
    "tree_from_names",
]


def layer_from_settings(settings: Mapping[str, Any], /) -> Layer:
    """Make a layer from the settings that `Layer.settings` returned.

    Raises
    ------
    TypeError, ValueError
        When the layer or a setting is unknown or not valid.

    Examples
    --------
    >>> layer_from_settings({"layer": "FeedForward", "channels": 4, "inner": 16}).inner
    16
    """
    if not isinstance(settings, Mapping):
        raise TypeError(f"expected the settings of a layer as a mapping; got {type_text(settings)}")
    name = settings.get("layer")
    kind = KINDS.get(name) or announced(__name__, name)
    if kind is None:
        raise ValueError(f"expected a layer out of {', '.join(KINDS)}; got {name!r}")
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items() if key != "layer"
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise TypeError(f"expected the settings of {name}; got {values}: {error}") from error


KINDS: dict[Any, type[Layer]] = {
    name: kind
    for name, kind in vars().items()
    if isinstance(kind, type) and issubclass(kind, Layer) and kind is not Layer
}
"""The classes of layers by name."""

publish(vars(), __all__)
