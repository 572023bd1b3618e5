"""The layers of `attention_core.layers` as layers of Keras, on TensorFlow, JAX and PyTorch.

A layer here holds variables and masks, and knows how Keras trains and saves; what it computes is its definition. It
works wherever a layer of Keras does: in models of every kind, compiled or not, with mixed precision, and in the
files of Keras.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from attention_keras.layer import AttentionLayer, Layer

__all__ = [
    "DecoderLayer",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "Layer",
    "MultiHeadAttention",
    "RMSNorm",
    "SaganAttention",
    "load",
    "save",
]


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention with its projections, as a layer of Keras.

    The order is query, key, value: `keras.layers.MultiHeadAttention` takes the value before the key. The heads of a
    query that is masked out are exactly 0, so that its output is the bias of the output.

    Examples
    --------
    >>> layer = MultiHeadAttention(8, 2, seed=0)
    >>> tuple(layer(keras.ops.ones((3, 5, 8))).shape)
    (3, 5, 8)
    >>> tuple(layer(keras.ops.ones((3, 5, 8)), key=keras.ops.ones((3, 7, 8))).shape)
    (3, 5, 8)
    """


class FeedForward(Layer):
    """Linear, activation, linear, dropout, at every position, as a layer of Keras.

    Examples
    --------
    >>> layer = FeedForward(4, 16, output_channels=3)
    >>> tuple(layer(keras.ops.ones((2, 4))).shape)
    (2, 3)
    """


class EncoderLayer(AttentionLayer):
    """Encoder layer of a transformer, as a layer of Keras.

    Places that are masked out attend to the others, but nothing else depends on their output.

    Examples
    --------
    >>> model = keras.Sequential([keras.layers.Embedding(9, 4, mask_zero=True), EncoderLayer(4, 2, 16)])
    >>> tuple(model(keras.ops.array([[3, 1, 0]])).shape)  # the last token is padding: none attends to it
    (1, 3, 4)
    """


class Embeddings(Layer):
    """Vectors of tokens at absolute positions, in segments, normalized, with dropout, as a layer of Keras.

    Examples
    --------
    >>> layer = Embeddings(100, 16, 4)
    >>> tuple(layer(keras.ops.array([[3, 1, 4]])).shape)
    (1, 3, 4)
    """


class SaganAttention(Layer):
    """Self-attention over feature maps, as in SAGAN, as a layer of Keras.

    The vectors of spectral normalization are weights that are not trained. They advance in training, by the step of
    power iteration that the call takes.

    Examples
    --------
    >>> layer, x = SaganAttention(16), keras.ops.ones((1, 4, 4, 16))
    >>> bool(keras.ops.all(layer(x) == x))  # sigma starts at 0
    True
    """


class RMSNorm(Layer):
    """Division of the channels by the root of their mean square, as a layer of Keras."""


class GatedFeedForward(Layer):
    """Gated feed-forward block, at every position, as a layer of Keras.

    Examples
    --------
    >>> tuple(GatedFeedForward(4, 16)(keras.ops.ones((2, 4))).shape)
    (2, 4)
    """


class DecoderLayer(AttentionLayer):
    """Decoder layer of a language model, as a layer of Keras.

    Examples
    --------
    >>> tuple(DecoderLayer(8, 2, 16)(keras.ops.ones((3, 5, 8))).shape)
    (3, 5, 8)
    """


def save(layer: Layer, path: str | Path) -> None:
    """Write a layer to a file that every library of this project reads, bit for bit.

    Parameters
    ----------
    layer : Layer
    path : str or Path

    Examples
    --------
    >>> import tempfile
    >>> layer = FeedForward(4, 16)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(layer, f"{folder}/layer.safetensors")
    ...     load(f"{folder}/layer.safetensors").definition == layer.definition
    True
    """
    from attention_files import adapted  # noqa: PLC0415 (only who saves needs what files need)

    hint = ": its save writes models" if isinstance(layer, keras.Model) else ""
    adapted.save(path, layer, Layer, hint)


def load(path: str | Path, *, device: str | None = None, dtype: str | None = None, **settings: Any) -> Layer:
    """Make a layer of a file that `save` wrote, on this library or another.

    Parameters
    ----------
    path : str or Path
    device : str, optional
        One of ``backend.devices()``.
    dtype : str, optional
        A floating-point type or a dtype policy of Keras; by default the type of the file, bit for bit.
    **settings
        In place of those in the file, such as ``arithmetic``, ``implementation`` or ``dropout``.

    Returns
    -------
    Layer
        Of the class that the file names.

    Raises
    ------
    TypeError, ValueError
        When the file is not one of a layer, or there is no such device or type.
    """
    from attention_files import adapted  # noqa: PLC0415 (only who loads needs what files need)

    return adapted.load(path, Layer.from_numpy, settings, device=device, dtype=dtype)
