"""The decoder of a language model and its parts as layers of Keras, with caches that go in and come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from attention_core import layers as definitions
from attention_core.backend import Array
from attention_core.masks import Mask
from attention_keras.layer import AttentionLayer, Layer, per_sample
from attention_keras.library import attached

__all__ = ["Decoder", "DecoderLayer", "GatedFeedForward", "RMSNorm"]

_registered = keras.saving.register_keras_serializable(package="attention_core")


@_registered
class RMSNorm(Layer):
    """Division of the channels by the root of their mean square, as a layer of Keras.

    Parameters
    ----------
    channels, epsilon, arithmetic
        As in `attention_core.layers.RMSNorm`.
    seed : int, optional
        Of nothing: the scale starts at 1.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.
    """

    kind = definitions.RMSNorm

    def call(self, x: Array, *, training: bool | None = None) -> Array:
        """Normalize: (..., channels) -> (..., channels)."""
        return self._apply(x, training=training)


@_registered
class GatedFeedForward(Layer):
    """Gated feed-forward block, at every position, as a layer of Keras.

    Parameters
    ----------
    channels, inner, output_channels, bias, dropout, arithmetic, activation
        As in `attention_core.layers.GatedFeedForward`.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Examples
    --------
    >>> tuple(GatedFeedForward(4, 16)(keras.ops.ones((2, 4))).shape)
    (2, 4)
    """

    kind = definitions.GatedFeedForward

    def call(self, x: Array, *, seed: Any = None, training: bool | None = None) -> Array:
        """Apply to every position: (..., channels) -> (..., channels of the output)."""
        return self._apply(x, seed=seed, training=training)


class _Decoding(AttentionLayer):
    """A layer with a cache: a call with one returns it, with the new keys and values, after the output."""

    def _decode(
        self, x: Array, attention_mask: Any, key_mask: Any, *, has_channels: bool, cache: Any, **options: Any
    ) -> Any:
        if key_mask is None and cache is None:  # that of Keras is over the new places, not over those of the cache
            key_mask = attached(x)
        mask = per_sample(attention_mask, x, has_channels=has_channels)
        return self._apply(x, mask=mask, key_mask=key_mask, cache=cache, **options)


@_registered
class DecoderLayer(_Decoding):
    """Decoder layer of a language model, as a layer of Keras.

    Parameters
    ----------
    channels, num_heads, inner
        As in `attention_core.layers.DecoderLayer`, and so are all other settings.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or the number of heads does not divide the channels.

    Examples
    --------
    >>> tuple(DecoderLayer(8, 2, 16)(keras.ops.ones((3, 5, 8))).shape)
    (3, 5, 8)
    """

    kind = definitions.DecoderLayer

    def call(
        self,
        x: Array,
        *,
        cache: Any = None,
        num_new: Array | None = None,
        position_ids: Array | None = None,
        attention_mask: Mask | Array | None = None,
        key_mask: Array | None = None,
        memory: Array | None = None,
        memory_mask: Mask | Array | None = None,
        donate: bool = False,
        seed: Any = None,
        hook: Callable[[str, Callable[[Array], Any], Array], Any] | None = None,
        training: bool | None = None,
    ) -> Any:
        """Apply to sequences: (..., L, C) -> (..., L, C), and the cache if there is one.

        Parameters
        ----------
        x : tensor, shape (..., L, C)
        attention_mask : attention_core.masks.Mask or bool tensor, broadcastable to (..., H, L, N), optional
            True = may attend. One of as many axes as ``x`` is one for each sample, as in Keras.
        key_mask : bool tensor, shape (..., N), optional
            By default, and without a cache, the mask that Keras attached to ``x``.
        cache, num_new, position_ids, memory, memory_mask, donate, hook
            As in `attention_core.decoder_layer`; ``definition.empty_cache`` makes a cache.
        seed : int or integer tensor, optional
            Of the dropout, instead of one drawn from the layer's generator.
        training : bool, optional
            Whether anything is dropped.

        Returns
        -------
        tensor, shape (..., L, C), or a pair of it and the cache
        """
        options = {"num_new": num_new, "position_ids": position_ids, "memory": memory, "memory_mask": memory_mask}
        options |= {"cache": cache, "donate": donate, "seed": seed, "hook": hook, "training": training}
        return self._decode(x, attention_mask, key_mask, has_channels=True, **options)


@_registered
class Decoder(_Decoding):
    """Language model, as a layer of Keras: from tokens to logits.

    Parameters
    ----------
    num_tokens, channels, num_heads, inner, num_layers
        As in `attention_core.layers.Decoder`, and so are all other settings.
    seed : int, optional
        Of the first weights, which are then the same on every framework, and of the dropout.
    **kwargs
        ``name``, ``dtype`` and ``trainable``, as every layer of Keras takes them.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or the number of heads does not divide the channels.

    Examples
    --------
    >>> model = Decoder(50, 8, 2, 16, num_layers=2)
    >>> tuple(model(keras.ops.array([[3, 14, 15]])).shape)
    (1, 3, 50)
    """

    kind = definitions.Decoder

    def call(
        self,
        token_ids: Array,
        *,
        cache: Any = None,
        num_new: Array | None = None,
        position_ids: Array | None = None,
        select: Array | None = None,
        attention_mask: Mask | Array | None = None,
        key_mask: Array | None = None,
        memory: Array | None = None,
        memory_mask: Mask | Array | None = None,
        donate: bool = False,
        seed: Any = None,
        hook: Callable[[str, Callable[[Array], Any], Array], Any] | None = None,
        training: bool | None = None,
    ) -> Any:
        """Compute logits: integers (..., L) -> (..., L, V), and the cache if there is one.

        Parameters
        ----------
        token_ids : integer tensor, shape (..., L)
        attention_mask : attention_core.masks.Mask or bool tensor, broadcastable to (..., H, L, N), optional
            True = may attend. One of an axis more than ``token_ids`` is one for each sample, as in Keras.
        key_mask : bool tensor, shape (..., N), optional
            By default, and without a cache, the mask that Keras attached to ``token_ids``.
        cache, num_new, position_ids, select, memory, memory_mask, donate, hook
            As in `attention_core.decoder`; ``definition.empty_cache`` makes a cache.
        seed : int or integer tensor, optional
            Of the dropout, instead of one drawn from the layer's generator.
        training : bool, optional
            Whether anything is dropped.

        Returns
        -------
        tensor, shape (..., L, V), or a pair of it and the cache
        """
        options = {"num_new": num_new, "position_ids": position_ids, "memory": memory, "memory_mask": memory_mask}
        options |= {"cache": cache, "donate": donate, "seed": seed, "hook": hook, "training": training}
        return self._decode(token_ids, attention_mask, key_mask, has_channels=False, select=select, **options)
