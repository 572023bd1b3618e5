"""Parameters of a language model: a named tuple of arrays, as those of `attention_core.parameters`."""

from __future__ import annotations

from typing import NamedTuple

from attention_core._arrays import Array
from attention_core.parameters import DecoderLayer, LayerNorm, Linear

__all__ = ["Decoder"]


class Decoder(NamedTuple):
    """A language model: a table of tokens (V, C), layers, a normalization, and a map (C, V) to the logits.

    With ``output=None`` the map is the transposed table.
    """

    token: Array
    layers: tuple[DecoderLayer, ...]
    norm: Array | LayerNorm
    output: Linear | None = None
