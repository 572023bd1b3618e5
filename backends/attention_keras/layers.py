"""The layers of `attention_core.layers` as layers of Keras, on TensorFlow, JAX and PyTorch.

A layer here holds variables and masks, and knows how Keras trains and saves; what it computes is its definition. It
works wherever a layer of Keras does: in models of every kind, compiled or not, with mixed precision, and in the
files of Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from attention_core import layers as definitions
from attention_core.backend import Array
from attention_core.masks import Mask
from attention_keras.decoder import Decoder, DecoderLayer, GatedFeedForward, RMSNorm
from attention_keras.layer import AttentionLayer, Layer, per_sample, place_masks
from attention_keras.library import attached

__all__ = [
    "Decoder",
    "DecoderLayer",
    "DotProductAttention",
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

_registered = keras.saving.register_keras_serializable(package="attention_core")


@_registered
class DotProductAttention(AttentionLayer):
    """Scaled dot-product attention of one head, without weights, as a layer of Keras.

    Parameters
    ----------
    scale, softcap, is_causal, dropout, implementation
        As in `attention_core.layers.DotProductAttention`.
    seed : int, optional
        Of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one.

    Examples
    --------
    >>> keys = keras.ops.reshape(keras.ops.arange(40.0), (1, 10, 4))
    >>> layer = DotProductAttention()
    >>> output = layer(keras.ops.ones((1, 2, 4)), keras.ops.ones((1, 10, 4)), keys)
    >>> keras.ops.convert_to_numpy(output)[0, 0].tolist()
    [18.0, 19.0, 20.0, 21.0]
    """

    kind = definitions.DotProductAttention

    def call(
        self,
        query: Any,
        key: Array | None = None,
        value: Array | None = None,
        *,
        attention_mask: Mask | Array | None = None,
        query_mask: Array | None = None,
        key_mask: Array | None = None,
        bias: Array | None = None,
        seed: Any = None,
        return_weights: bool = False,
        return_logsumexp: bool = False,
        training: bool | None = None,
    ) -> Any:
        """Attend. The order is query, key, value: `keras.layers.Attention` takes the value before the key.

        Parameters
        ----------
        query : tensor, shape (..., M, D), or a mapping with "query", "key" and "value"
        key : tensor, shape (..., N, D), optional
            By default the query.
        value : tensor, shape (..., N, E), optional
            By default the key.
        attention_mask : attention_core.masks.Mask or bool tensor, broadcastable to (..., M, N), optional
            True = may attend. A call of the layer also takes it as ``mask``, its name in all the libraries.
        query_mask, key_mask : bool tensor, shape (..., M) and (..., N), optional
            By default the masks that Keras attached to the inputs. A query that is masked out gives exactly 0.
        bias : tensor, broadcastable to (..., M, N), optional
        seed : int or integer tensor, optional
            Of the dropout, instead of one drawn from the layer's generator.
        return_weights, return_logsumexp : bool
        training : bool, optional
            Whether weights are dropped.

        Returns
        -------
        tensor, shape (..., M, E)
            Or, if a return flag is set, a named tuple of output, and of weights and logsumexp where asked for.
        """
        query_mask, key_mask = place_masks(query, key, value, query_mask, key_mask=key_mask)
        return self._apply(
            query,
            key,
            value,
            mask=attention_mask,
            query_mask=query_mask,
            key_mask=key_mask,
            bias=bias,
            seed=seed,
            return_weights=return_weights,
            return_logsumexp=return_logsumexp,
            training=training,
        )


@_registered
class MultiHeadAttention(AttentionLayer):
    """Multi-head attention with its projections, as a layer of Keras.

    Parameters
    ----------
    channels, num_heads, num_key_value_heads, key_channels, value_channels, head_dim, value_head_dim
        As in `attention_core.layers.MultiHeadAttention`, and so are all that follow.
    output, output_channels, bias, query_bias, key_bias, value_bias, output_bias, extra_key_value, zero_attention
    scale, softcap, is_causal, dropout, implementation
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or heads do not share out the channels evenly.

    References
    ----------
    A. Vaswani et al., "Attention is all you need", 2017.

    Examples
    --------
    >>> layer = MultiHeadAttention(8, 2, seed=0)
    >>> tuple(layer(keras.ops.ones((3, 5, 8))).shape)
    (3, 5, 8)
    >>> tuple(layer({"query": keras.ops.ones((3, 5, 8)), "key": keras.ops.ones((3, 7, 8))}).shape)
    (3, 5, 8)
    """

    kind = definitions.MultiHeadAttention

    def call(
        self,
        query: Any,
        key: Array | None = None,
        value: Array | None = None,
        *,
        attention_mask: Mask | Array | None = None,
        query_mask: Array | None = None,
        key_mask: Array | None = None,
        bias: Array | None = None,
        score_mod: Callable[..., Array] | None = None,
        prepare: Callable[[Array, Array, Array], tuple[Array, Array, Array]] | None = None,
        seed: Any = None,
        return_weights: bool = False,
        return_logsumexp: bool = False,
        training: bool | None = None,
    ) -> Any:
        """Attend. The order is query, key, value: `keras.layers.MultiHeadAttention` takes the value before the key.

        Parameters
        ----------
        query : tensor, shape (..., M, C), or a mapping with "query", "key" and "value"
        key : tensor, shape (..., N, C'), optional
            By default the query.
        value : tensor, shape (..., N, C''), optional
            By default the key.
        attention_mask : attention_core.masks.Mask or bool tensor, broadcastable to (..., H, M, N), optional
            True = may attend. One of as many axes as the query, (B, M, N), is one for each sample, as in Keras: one for
            each head is (1, H, M, N). A call also takes it as ``mask``, its name in all the libraries.
        query_mask, key_mask : bool tensor, shape (..., M) and (..., N), optional
            By default the masks that Keras attached to the inputs, as `keras.layers.MultiHeadAttention` uses them.
            The heads of a query that is masked out are exactly 0, so that its output is the bias of the output.
        bias, score_mod, prepare
            As in `attention_core.multi_head_attention`.
        seed : int or integer tensor, optional
            Of the dropout, instead of one drawn from the layer's generator.
        return_weights, return_logsumexp : bool
        training : bool, optional
            Whether weights are dropped.

        Returns
        -------
        tensor, shape (..., M, channels of the output)
            Or, if a return flag is set, a named tuple of output, and of weights and logsumexp where asked for.
        """
        query_mask, key_mask = place_masks(query, key, value, query_mask, key_mask=key_mask)
        return self._apply(
            query,
            key,
            value,
            mask=per_sample(attention_mask, query),
            query_mask=query_mask,
            key_mask=key_mask,
            bias=bias,
            score_mod=score_mod,
            prepare=prepare,
            seed=seed,
            return_weights=return_weights,
            return_logsumexp=return_logsumexp,
            training=training,
        )


@_registered
class FeedForward(Layer):
    """Linear, activation, linear, dropout, at every position, as a layer of Keras.

    Parameters
    ----------
    channels, inner, output_channels, bias, dropout, activation
        As in `attention_core.layers.FeedForward`.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one.

    Examples
    --------
    >>> layer = FeedForward(4, 16, output_channels=3)
    >>> tuple(layer(keras.ops.ones((2, 4))).shape)
    (2, 3)
    """

    kind = definitions.FeedForward

    def call(self, x: Array, *, seed: Any = None, training: bool | None = None) -> Array:
        """Apply to every position: (..., channels) -> (..., channels of the output)."""
        return self._apply(x, seed=seed, training=training)


@_registered
class EncoderLayer(AttentionLayer):
    """Encoder layer of a transformer, as a layer of Keras.

    Parameters
    ----------
    channels, num_heads, inner, norm_first, bias, epsilon, dropout, implementation, num_key_value_heads, is_causal
        As in `attention_core.layers.EncoderLayer`, and so is ``activation``.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or heads do not share out the channels evenly.

    Examples
    --------
    >>> model = keras.Sequential([keras.layers.Embedding(9, 4, mask_zero=True), EncoderLayer(4, 2, 16)])
    >>> tuple(model(keras.ops.array([[3, 1, 0]])).shape)  # the last token is padding: none attends to it
    (1, 3, 4)
    """

    kind = definitions.EncoderLayer

    def call(
        self,
        x: Array,
        *,
        attention_mask: Mask | Array | None = None,
        key_mask: Array | None = None,
        bias: Array | None = None,
        score_mod: Callable[..., Array] | None = None,
        seed: Any = None,
        hook: Callable[[str, Callable[[Array], Any], Array], Any] | None = None,
        return_weights: bool = False,
        training: bool | None = None,
    ) -> Any:
        """Apply to sequences: (..., L, C) -> (..., L, C).

        Parameters
        ----------
        x : tensor, shape (..., L, C)
        attention_mask : attention_core.masks.Mask or bool tensor, broadcastable to (..., H, L, L), optional
            True = may attend. One of as many axes as the query, (B, M, N), is one for each sample, as in Keras: one for
            each head is (1, H, M, N). A call also takes it as ``mask``, its name in all the libraries.
        key_mask : bool tensor, shape (..., L), optional
            By default the mask that Keras attached to ``x``. No place attends to those that are masked out. These
            attend to the others, but nothing else depends on their output.
        seed : int or integer tensor, optional
            Of the dropout, instead of one drawn from the layer's generator.
        bias, score_mod, hook, return_weights
            As in `attention_core.encoder_layer`.
        training : bool, optional
            Whether anything is dropped.

        Returns
        -------
        tensor, shape (..., L, C)
            Or, with ``return_weights``, a named tuple of output and weights.
        """
        key_mask = attached(x) if key_mask is None else key_mask
        options = {"key_mask": key_mask, "seed": seed, "hook": hook, "return_weights": return_weights}
        options |= {"bias": bias, "score_mod": score_mod}
        return self._apply(x, mask=per_sample(attention_mask, x), training=training, **options)


@_registered
class Embeddings(Layer):
    """Vectors of tokens at absolute positions, in segments, normalized, with dropout, as a layer of Keras.

    Parameters
    ----------
    num_tokens, num_positions, channels, num_segments, norm, epsilon, dropout
        As in `attention_core.layers.Embeddings`.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one.

    Examples
    --------
    >>> layer = Embeddings(100, 16, 4)
    >>> tuple(layer(keras.ops.array([[3, 1, 4]])).shape)
    (1, 3, 4)
    """

    kind = definitions.Embeddings

    def call(
        self,
        token_ids: Array,
        *,
        position_ids: Array | None = None,
        segment_ids: Array | None = None,
        seed: Any = None,
        training: bool | None = None,
    ) -> Array:
        """Look up: integers (..., L) -> (..., L, C). Ids are those of `attention_core.embed_tokens`."""
        return self._apply(token_ids, position_ids=position_ids, segment_ids=segment_ids, seed=seed, training=training)


@_registered
class SaganAttention(Layer):
    """Self-attention over feature maps, as in SAGAN, as a layer of Keras.

    The vectors of spectral normalization are weights that are not trained. They advance in training, by the step of
    power iteration that the call takes.

    Parameters
    ----------
    channels, head_channels, value_channels, output, output_channels, bias, pool, spectral_norm, data_format
        As in `attention_core.layers.SaganAttention`.
    seed : int, optional
        Of the first weights, which are then the same on every framework.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or the result would not have C channels.

    References
    ----------
    H. Zhang, I. Goodfellow, D. Metaxas, A. Odena, "Self-attention generative adversarial networks", 2018.

    Examples
    --------
    >>> layer, x = SaganAttention(16), keras.ops.ones((1, 4, 4, 16))
    >>> bool(keras.ops.all(layer(x) == x))  # sigma starts at 0
    True
    """

    kind = definitions.SaganAttention

    def call(self, x: Array, *, return_weights: bool = False, training: bool | None = None) -> Any:
        """Let every position attend to all positions.

        Parameters
        ----------
        x : tensor, shape (..., height, width, C)
            Or (..., C, height, width) with ``channels_first``.
        return_weights : bool
        training : bool, optional
            Whether the vectors of spectral normalization advance.

        Returns
        -------
        tensor
            Of the shape of ``x``; with ``return_weights``, a named tuple of output and weights.
        """
        return self._apply(x, return_weights=return_weights, training=training)

    def load_own_variables(self, store: Any) -> None:
        """Read the weights of a file, in which sigma has no axis if a former version wrote it."""
        arrays = {name: np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118 (a store of Keras is no mapping)
        super().load_own_variables({name: np.atleast_1d(array) for name, array in arrays.items()})


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
    from attention_files import safetensors  # noqa: PLC0415 (only who saves needs what files need)

    if not isinstance(layer, Layer):
        hint = ": its save writes models" if isinstance(layer, keras.Model) else safetensors.several_hint(layer)
        raise TypeError(f"expected a layer of attention_keras; got {type(layer).__name__}{hint}")
    safetensors.save_layer(path, layer.definition, *layer.to_numpy())


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
    from attention_files.safetensors import load_layer  # noqa: PLC0415 (only who loads needs what files need)

    definition, *arrays = load_layer(path)
    return Layer.from_numpy(definition.with_settings(**settings), *arrays, device=device, dtype=dtype)
