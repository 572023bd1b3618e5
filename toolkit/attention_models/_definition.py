"""The definition of the decoder of a language model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Unpack

from attention_core._arrays import Array
from attention_core._functions.options import DECODER_DEFAULTS, DecoderOptions, takes
from attention_core.layers import DecoderLayer
from attention_core.layers._decoder import _OPTIONS, _SETTINGS, INPUTS, _DecoderSettings
from attention_core.layers._layer import Initial, all_masks, linear_spec, norm_spec
from attention_models import parameters as trees
from attention_models._decoder import DecoderCache, decoder, joined


@dataclass(frozen=True)
class Decoder(_DecoderSettings):
    """Language model: token embedding, decoder layers, normalization and logits, as `attention_models.decoder`.

    Parameters
    ----------
    num_tokens : int
        V.
    channels : int
        C.
    num_heads : int
        H.
    inner : int
        Channels inside the feed-forward.
    num_layers : int
    tied : bool
        Whether the logits are computed with the transposed table of tokens.
    embedding_scale, logit_softcap : float, optional
        As in `attention_models.decoder`.
    window : int, or tuple of int or None, optional
        As in `attention_models.decoder`: a tuple has one for each layer, as in Gemma.
    **settings
        The others of `DecoderLayer`, the same for all layers.
    """

    takes_ids: ClassVar[bool] = True
    num_tokens: int
    channels: int
    num_heads: int
    inner: int
    num_layers: int
    tied: bool = True
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    window: int | tuple[int | None, ...] | None = field(  # type: ignore[assignment]
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.windows) != self.num_layers:
            raise ValueError(f"expected window for {self.num_layers} layers; got {len(self.windows)}")
        _ = self.layer

    @property
    def layer(self) -> DecoderLayer:
        """The definition of one layer; the first, where their windows differ."""
        return DecoderLayer(**{name: getattr(self, name) for name in _SETTINGS} | {"window": self.windows[0]})

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.num_layers

    @property
    def parameters(self) -> trees.Decoder:
        """Specs of the table, the layers, the last normalization, and the map to logits unless it is tied."""
        return trees.Decoder(
            Initial((self.num_tokens, self.channels), "truncated_normal"),
            (self.layer.parameters,) * self.num_layers,
            norm_spec(self.channels, self.norm),
            None if self.tied else linear_spec(self.channels, self.num_tokens, False),
        )

    def empty_cache(self, leading: tuple[Any, ...], capacity: int, /, **options: Any) -> DecoderCache:
        """Make an empty cache of all layers; options are those of a `DecoderLayer`."""
        return joined([self.layer.empty_cache(leading, capacity, **options) for _ in range(self.num_layers)])

    @takes(*INPUTS, kind=DecoderOptions, defaults=DECODER_DEFAULTS)
    def __call__(
        self,
        parameters: trees.Decoder,
        token_ids: Array,
        /,
        *,
        select: Array | None = None,
        key_mask: Array | None = None,
        memory_key_mask: Array | None = None,
        seed: Any = None,
        **options: Unpack[DecoderOptions],
    ) -> Any:
        """Compute logits: integers (..., L) -> (..., L, V), and the cache if there is one.

        Parameters
        ----------
        parameters : attention_models.parameters.Decoder
        token_ids : Array of int, shape (..., L)
        cache, num_new, position_ids, select, mask, memory, memory_mask, donate, hook, shards, xp
            As in `attention_models.decoder`; `empty_cache` makes a cache.
        key_mask, memory_key_mask, seed
            As in `DecoderLayer`.

        Returns
        -------
        Array, shape (..., L, V), or a pair of it and the cache
        """
        xp, memory = options.get("xp"), options.get("memory")
        of_keys = key_mask, token_ids, options.get("shards"), options.get("cache"), False
        options["mask"] = all_masks(options.get("mask"), xp, key_mask=of_keys)
        of_memory = memory_key_mask, memory
        options["memory_mask"] = all_masks(options.get("memory_mask"), xp, memory_key_mask=of_memory)
        settings = self._options(seed, "embedding_scale", "logit_softcap", *_OPTIONS) | {"window": self.windows}
        return decoder(parameters, token_ids, select=select, **options, **settings)
