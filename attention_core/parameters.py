"""Parameters: named tuples of arrays, which all frameworks accept as pytrees without registration.

A `Linear` holds its weight as (in, out), so that ``y = x @ weight + bias``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ._arrays import Array

__all__ = [
    "DecoderLayer",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "PreparedWeight",
    "RMSNorm",
    "SaganAttention",
]


class Linear(NamedTuple):
    """An affine map: ``weight`` of shape (in, out) and ``bias`` of shape (out,) or ``None``."""

    weight: Any  # an array, or a PreparedWeight
    bias: Array | None = None


class PreparedWeight(NamedTuple):
    """The weight (in, out) of a `Linear`, cut into slices for reproducible arithmetic.

    ``high`` and ``low`` (in, out) are integers in float64, relative to ``power`` (1, out). ``like``, of shape (0,), has
    the dtype of the weight.
    """

    high: Array
    low: Array
    power: Array
    like: Array

    @property
    def shape(self) -> Any:
        """That of the weight."""
        return self.high.shape

    @property
    def dtype(self) -> Any:
        """That of the weight."""
        return self.like.dtype


class LayerNorm(NamedTuple):
    """Scale and offset after normalization, each of shape (channels,)."""

    scale: Array
    offset: Array


class RMSNorm(NamedTuple):
    """Scale after division by the root of the mean square, of shape (channels,)."""

    scale: Array


class MultiHeadAttention(NamedTuple):
    """Projections of multi-head attention; if ``output`` is ``None``, the merged heads are the result."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear | None = None


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


class DecoderLayer(NamedTuple):
    """The decoder layer of a transformer: attention and feed-forward, each with its normalization.

    A normalization is a `LayerNorm`, or the scale alone of one by the root of the mean square. Scales have shape (C,),
    those of query and key heads (D,); ``None`` stands for no normalization. ``cross_attention``, to an encoder, comes
    with its norm.
    """

    attention: MultiHeadAttention
    attention_norm: Array | LayerNorm
    feed_forward: GatedFeedForward | FeedForward
    feed_forward_norm: Array | LayerNorm
    query_norm: Array | LayerNorm | None = None
    key_norm: Array | LayerNorm | None = None
    attention_post_norm: Array | LayerNorm | None = None
    feed_forward_post_norm: Array | LayerNorm | None = None
    cross_attention: MultiHeadAttention | None = None
    cross_attention_norm: Array | LayerNorm | None = None


class Embeddings(NamedTuple):
    """Tables of shape (rows, channels) to be added up and normalized; ``segment`` and ``norm`` may be ``None``."""

    token: Array
    position: Array
    segment: Array | None = None
    norm: LayerNorm | None = None


class SaganAttention(NamedTuple):
    """Self-attention over feature maps: 1 × 1 convolutions as `Linear`, and the weight of the attention, (1,).

    ``output`` may be ``None``; then ``g`` has as many channels as the input.
    """

    theta: Linear
    phi: Linear
    g: Linear
    output: Linear | None
    sigma: Array


def _branches(kind: Any) -> list[tuple[str, list[type[Any]], list[str]]]:
    words = {field: hint.__forward_arg__.split(" | ") for field, hint in kind.__annotations__.items()}
    kinds = {field: [globals()[word] for word in each if word in __all__] for field, each in words.items()}
    return [(field, kinds[field], words[field]) for field in words if kinds[field]]


BRANCHES = {globals()[name]: _branches(globals()[name]) for name in __all__ if name != "PreparedWeight"}
"""By kind: the fields that are parameters themselves, of which kinds, and what their annotations say."""
