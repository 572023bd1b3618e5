"""The gated feed-forward, the normalization and the layer of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Unpack

from .. import parameters as trees
from .._arrays import Array, Namespace
from .._checks import check_choice, check_positive
from .._functions.channels import rms_norm
from .._functions.decoder_layer import decoder_layer
from .._functions.embeddings import ROTARY, check_rotation
from .._functions.options import DECODER_DEFAULTS, DecoderOptions, takes
from ..cache import KeyValueCache, empty_cache
from ._attention import MultiHeadAttention
from ._layer import Initial, Layer, all_masks, norm_spec, settings_of
from ._transformer import FeedForward


@dataclass(frozen=True)
class RMSNorm(Layer):
    """Division of the channels of each position by the root of their mean square.

    Parameters
    ----------
    channels : int
    epsilon : float
    arithmetic : {"fast", "reproducible"}
    """

    channels: int
    epsilon: float = 1e-6
    arithmetic: str = "fast"

    @property
    def parameters(self) -> trees.RMSNorm:
        """Spec of the scale."""
        return trees.RMSNorm(Initial((self.channels,), "ones"))

    def __call__(self, parameters: trees.RMSNorm, x: Array, /, *, xp: Namespace | None = None) -> Array:
        """Normalize: (..., channels) -> (..., channels)."""
        return rms_norm(parameters.scale, x, epsilon=self.epsilon, arithmetic=self.arithmetic, xp=xp)


@dataclass(frozen=True)
class GatedFeedForward(FeedForward):
    """Gated feed-forward block, at every position: SwiGLU or GeGLU.

    Parameters
    ----------
    channels, inner : int
    output_channels : int, optional
        By default ``channels``.
    bias : bool
    dropout : float
    arithmetic : {"fast", "reproducible"}
    activation : {"silu", "gelu", "gelu_tanh", "relu"}
        Of the gate.
    """

    bias: bool = False
    activation: str = "silu"

    @property
    def parameters(self) -> trees.GatedFeedForward:  # type: ignore[override]
        """Specs of the three linear maps."""
        maps = super().parameters
        return trees.GatedFeedForward(maps.expand, *maps)


@dataclass(frozen=True, kw_only=True)
class _DecoderSettings(Layer):
    """What a decoder layer and a stack of them are told alike, by keywords."""

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    output_bias: bool | None = None
    feed_forward_bias: bool = False
    norm: str = "rms"
    norm_first: bool = True
    query_key_norm: bool = False
    post_norm: bool = False
    gated: bool = True
    activation: str = "silu"
    epsilon: float = 1e-6
    rotary_base: float | None = 10000.0
    rotary_width: int | None = None
    rotary_divisors: tuple[float, ...] | None = None
    interleaved: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    memory_channels: int | None = None
    dropout: float = 0.0
    implementation: str = "auto"
    arithmetic: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("norm", self.norm, ("rms", "layer"))


INPUTS = ("cache", "num_new", "position_ids", "mask", "memory", "memory_mask", "donate", "hook", "shards", "xp")


@dataclass(frozen=True)
class DecoderLayer(_DecoderSettings):
    """Decoder layer of a transformer: `attention_core.functions.decoder_layer`.

    Parameters
    ----------
    channels : int
        C.
    num_heads : int
        H.
    inner : int
        Channels inside the feed-forward.
    num_key_value_heads : int, optional
        G, a divisor of H; by default H.
    head_dim : int, optional
        D; by default C / H, which must be an integer.
    attention_bias, output_bias, feed_forward_bias : bool
        Whether query, key and value, the output of attention, and the feed-forward have biases. By default the output
        has one where query, key and value do.
    norm : {"rms", "layer"}
        The kind of all normalizations: by the root of the mean square (Llama), or by mean and variance.
    norm_first : bool
        Whether to normalize the input of each branch, or the sum after it (the first transformer, BART).
    query_key_norm : bool
        Whether query and key heads are normalized, as in Qwen 3.
    post_norm : bool
        Whether the results of attention and feed-forward are normalized, too, as in Gemma 2.
    gated : bool
        Whether the feed-forward is gated.
    activation : {"silu", "gelu", "gelu_tanh", "relu"}
    epsilon : float
        Of all normalizations.
    rotary_base : float, optional
        As in `attention_core.functions.rotary_embedding`; ``None`` rotates nothing.
    rotary_width : int, optional
    rotary_divisors : tuple of float, optional
    interleaved : bool
    window : int, optional
        How many keys a query attends to at most, the newest ones with its own.
    scale, softcap : float, optional
        Of the scores.
    memory_channels : int, optional
        Those of the output of an encoder, for cross-attention; by default there is none.
    dropout : float
    implementation : {"auto", "dense", "blockwise", "fused"}
    arithmetic : {"fast", "reproducible"}
    """

    channels: int
    num_heads: int
    inner: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            check_positive("window", self.window)
        if self.rotary_base is not None:
            width = self.attention.parameters.query.weight.dims[1] // self.num_heads
            check_rotation(width, *(getattr(self, name) for name in ROTARY))

    @property
    def attention(self) -> MultiHeadAttention:
        """The definition of the projections of self-attention."""
        return MultiHeadAttention(
            self.channels,
            self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            bias=self.attention_bias,
            output_bias=self.output_bias,
        )

    @property
    def parameters(self) -> trees.DecoderLayer:
        """Specs of attention, feed-forward and normalizations."""
        attention = self.attention.parameters
        width = attention.query.weight.dims[1] // self.num_heads
        norm, head_norm = norm_spec(self.channels, self.norm), norm_spec(width, self.norm)
        kind = GatedFeedForward if self.gated else FeedForward
        cross = None
        if self.memory_channels is not None:
            cross = replace(self.attention, key_channels=self.memory_channels).parameters
        return trees.DecoderLayer(
            attention,
            norm,
            kind(self.channels, self.inner, bias=self.feed_forward_bias).parameters,
            norm,
            query_norm=head_norm if self.query_key_norm else None,
            key_norm=head_norm if self.query_key_norm else None,
            attention_post_norm=norm if self.post_norm else None,
            feed_forward_post_norm=norm if self.post_norm else None,
            cross_attention=cross,
            cross_attention_norm=None if cross is None else norm,
        )

    def empty_cache(self, leading: tuple[Any, ...], capacity: int, /, **options: Any) -> KeyValueCache:
        """Make an empty cache of the layer; options are those of `attention_core.cache.empty_cache`."""
        heads, width = self.attention.groups, self.attention.parameters.query.weight.dims[1] // self.num_heads
        return empty_cache(leading, heads, capacity, width, **options)

    @takes(*INPUTS, kind=DecoderOptions, defaults=DECODER_DEFAULTS)
    def __call__(
        self,
        parameters: trees.DecoderLayer,
        x: Array,
        /,
        *,
        key_mask: Array | None = None,
        memory_key_mask: Array | None = None,
        seed: Any = None,
        **options: Unpack[DecoderOptions],
    ) -> Any:
        """Apply to sequences: (..., L, C) -> (..., L, C), and the cache if there is one.

        Parameters
        ----------
        parameters : attention_core.parameters.DecoderLayer
        x : Array, shape (..., L, C)
        cache, num_new, position_ids, mask, memory, memory_mask, donate, hook, shards, xp
            As in `attention_core.functions.decoder_layer`; `empty_cache` makes a cache.
        key_mask, memory_key_mask : Arrays of bool, shapes (..., N) and (..., M), optional
            False masks a key, of the sequence or of the memory.
        seed : int or Array of int, optional
            Of the dropout; without it nothing is dropped.

        Returns
        -------
        Array, shape (..., L, C), or a pair of it and the cache
        """
        xp, memory = options.get("xp"), options.get("memory")
        of_keys = key_mask, x, options.get("shards"), options.get("cache")
        options["mask"] = all_masks(options.get("mask"), xp, key_mask=of_keys)
        of_memory = memory_key_mask, memory
        options["memory_mask"] = all_masks(options.get("memory_mask"), xp, memory_key_mask=of_memory)
        return decoder_layer(parameters, x, **options, **self._options(seed, *_OPTIONS))


_SETTINGS = tuple(each.name for each in fields(DecoderLayer))
_OPTIONS = settings_of(DecoderLayer, decoder_layer)
