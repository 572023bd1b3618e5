"""Feed-forward, encoder layer and token embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

from .. import parameters as trees
from .._arrays import Array, Namespace
from .._functions.channels import feed_forward
from .._functions.embeddings import embed_tokens
from .._functions.encoder import encoder_layer
from .._functions.options import Options, takes
from ._attention import MultiHeadAttention
from ._layer import Initial, Layer, all_masks, linear_spec, norm_spec, settings_of


@dataclass(frozen=True)
class FeedForward(Layer):
    """Feed-forward block: linear, activation, linear, dropout, at every position.

    Parameters
    ----------
    channels, inner : int
    output_channels : int, optional
        By default ``channels``.
    bias : bool
    dropout : float
    arithmetic : {"fast", "reproducible"}
    activation : {"gelu", "gelu_tanh", "relu", "silu"}
    """

    channels: int
    inner: int
    output_channels: int | None = None
    bias: bool = True
    dropout: float = 0.0
    arithmetic: str = "fast"
    activation: str = "gelu"

    @property
    def parameters(self) -> trees.FeedForward:
        """Specs of the two linear maps."""
        output = self.channels if self.output_channels is None else self.output_channels
        return trees.FeedForward(
            linear_spec(self.channels, self.inner, self.bias), linear_spec(self.inner, output, self.bias)
        )

    def __call__(
        self,
        parameters: trees.FeedForward | trees.GatedFeedForward,
        x: Array,
        /,
        *,
        seed: Any = None,
        xp: Namespace | None = None,
    ) -> Array:
        """Apply to every position: (..., channels) -> (..., channels of the output).

        Without a seed nothing is dropped.
        """
        return feed_forward(parameters, x, xp=xp, **self._options(seed, "activation", "arithmetic"))


@dataclass(frozen=True)
class EncoderLayer(Layer):
    """Encoder layer of a transformer: self-attention and feed-forward, each with its normalization and a residual.

    Parameters
    ----------
    channels, num_heads : int
    inner : int
        Channels inside the feed-forward.
    norm_first : bool
        Whether to normalize the input of each branch, or the sum after it.
    bias : bool
        Of all linear maps.
    epsilon : float
        Of both normalizations.
    dropout : float
        Of the weights of attention, and of both branches.
    implementation : {"auto", "dense", "blockwise", "fused"}
    arithmetic : {"fast", "reproducible"}
    num_key_value_heads : int, optional
        A divisor of the number of heads; by default that number.
    is_causal : bool
    activation : {"gelu", "gelu_tanh", "relu", "silu"}
        Of the feed-forward.
    """

    channels: int
    num_heads: int
    inner: int
    norm_first: bool = True
    bias: bool = True
    epsilon: float = 1e-5
    dropout: float = 0.0
    implementation: str = "auto"
    arithmetic: str = "fast"
    num_key_value_heads: int | None = None
    is_causal: bool = False
    activation: str = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._attention

    @property
    def _attention(self) -> MultiHeadAttention:
        return MultiHeadAttention(self.channels, self.num_heads, self.num_key_value_heads, bias=self.bias)

    @property
    def parameters(self) -> trees.EncoderLayer:
        """Specs of attention, feed-forward and their normalizations."""
        norm = norm_spec(self.channels)
        feed = FeedForward(self.channels, self.inner, bias=self.bias)
        return trees.EncoderLayer(self._attention.parameters, norm, feed.parameters, norm)

    @takes("mask", "bias", "score_mod", "return_weights", "shards", "xp")
    def __call__(
        self,
        parameters: trees.EncoderLayer,
        x: Array,
        /,
        *,
        key_mask: Array | None = None,
        seed: Any = None,
        hook: Callable[[str, Callable[[Array], Any], Array], Any] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Apply to sequences: (..., L, C) -> (..., L, C).

        Parameters
        ----------
        parameters : attention_core.parameters.EncoderLayer
        x : Array, shape (..., L, C)
        mask, key_mask, seed
            As in `MultiHeadAttention`.
        bias, score_mod, hook, return_weights, shards, xp
            As in `attention_core.functions.encoder_layer`.

        Returns
        -------
        Array, shape (..., L, C)
            Or, with ``return_weights``, output and weights.
        """
        of_keys = key_mask, x, options.get("shards")
        options["mask"] = all_masks(options.get("mask"), options.get("xp"), key_mask=of_keys)
        return encoder_layer(parameters, x, hook=hook, **options, **self._options(seed, *_OPTIONS))


_OPTIONS = settings_of(EncoderLayer, encoder_layer)


@dataclass(frozen=True)
class Embeddings(Layer):
    """Token embeddings: tokens, absolute positions and segments, normalized, with dropout.

    Parameters
    ----------
    num_tokens, num_positions, channels : int
    num_segments : int, optional
        By default no table of segments.
    norm : bool
    epsilon : float
        Of the normalization.
    dropout : float
    arithmetic : {"fast", "reproducible"}
    """

    takes_ids: ClassVar[bool] = True
    num_tokens: int
    num_positions: int
    channels: int
    num_segments: int | None = None
    norm: bool = True
    epsilon: float = 1e-12
    dropout: float = 0.0
    arithmetic: str = "fast"

    @property
    def parameters(self) -> trees.Embeddings:
        """Specs of the tables and the normalization."""
        token, position, segment = (
            None if rows is None else Initial((rows, self.channels), "truncated_normal")
            for rows in (self.num_tokens, self.num_positions, self.num_segments)
        )
        return trees.Embeddings(token, position, segment, norm_spec(self.channels) if self.norm else None)

    def __call__(
        self,
        parameters: trees.Embeddings,
        token_ids: Array,
        /,
        *,
        position_ids: Array | None = None,
        segment_ids: Array | None = None,
        seed: Any = None,
        xp: Namespace | None = None,
    ) -> Array:
        """Look up: integers (..., L) -> (..., L, C).

        Ids are those of `attention_core.functions.embed_tokens`; without a seed nothing is dropped.
        """
        options = self._options(seed, "epsilon", "arithmetic")
        options |= {"position_ids": position_ids, "segment_ids": segment_ids}
        return embed_tokens(parameters, token_ids, xp=xp, **options)
