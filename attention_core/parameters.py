"""Parameters: named tuples of arrays, which all frameworks accept as pytrees without registration.

A `Linear` holds its weight as (in, out), so that ``y = x @ weight + bias``.
"""

from __future__ import annotations

from typing import NamedTuple

from attention_core._arrays import Array

__all__ = [
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "SaganAttention",
]


class Linear(NamedTuple):
    """An affine map: ``weight`` of shape (in, out) and ``bias`` of shape (out,) or ``None``."""

    weight: Array
    bias: Array | None = None


class LayerNorm(NamedTuple):
    """Scale and offset after normalization, each of shape (channels,)."""

    scale: Array
    offset: Array


class MultiHeadAttention(NamedTuple):
    """Projections of multi-head attention; if ``output`` is ``None``, the merged heads are the result.

    ``extra_key`` (G * D,) and ``extra_value`` (G * E,), both or neither, are a learned key and value that are appended
    to those projected, and that no mask hides.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear | None = None
    extra_key: Array | None = None
    extra_value: Array | None = None


class FeedForward(NamedTuple):
    """Two affine maps with a GELU in between: (C, inner) and (inner, C)."""

    expand: Linear
    contract: Linear


class GatedFeedForward(NamedTuple):
    """Two affine maps (C, inner), one of which gates the other, and one back (inner, C)."""

    gate: Linear
    expand: Linear
    contract: Linear


class EncoderLayer(NamedTuple):
    """The encoder layer of a transformer: attention and feed-forward, each with its normalization."""

    attention: MultiHeadAttention
    attention_norm: LayerNorm
    feed_forward: FeedForward
    feed_forward_norm: LayerNorm


class Embeddings(NamedTuple):
    """Tables of shape (rows, channels) to be added up and normalized; ``segment`` and ``norm`` may be ``None``."""

    token: Array
    position: Array
    segment: Array | None = None
    norm: LayerNorm | None = None


class SaganAttention(NamedTuple):
    """Self-attention over feature maps: 1 × 1 convolutions as `Linear`, and the 0-d weight of the residual branch.

    ``output`` may be ``None``; then ``g`` has as many channels as the input.
    """

    theta: Linear
    phi: Linear
    g: Linear
    output: Linear | None
    sigma: Array
