"""The definition of the decoder of a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from attention_core._arrays import Array, Namespace
from attention_core._attention.shards.splits import Shards
from attention_core.layers import DecoderLayer
from attention_core.layers._decoder import _OPTIONS, _SETTINGS, _DecoderSettings
from attention_core.layers._layer import Initial, all_masks, linear_spec, norm_spec
from attention_core.masks import Mask
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

    def __call__(
        self,
        parameters: trees.Decoder,
        token_ids: Array,
        /,
        *,
        cache: DecoderCache | None = None,
        num_new: Array | None = None,
        position_ids: Array | None = None,
        select: Array | None = None,
        mask: Mask | Array | None = None,
        key_mask: Array | None = None,
        memory: Array | None = None,
        memory_mask: Mask | Array | None = None,
        memory_key_mask: Array | None = None,
        donate: bool = False,
        seed: Any = None,
        hook: Callable[[str, Callable[[Array], Any], Array], Any] | None = None,
        shards: Shards | None = None,
        xp: Namespace | None = None,
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
        return decoder(
            parameters,
            token_ids,
            cache=cache,
            num_new=num_new,
            position_ids=position_ids,
            select=select,
            mask=all_masks(mask, xp, key_mask=(key_mask, token_ids, shards, cache, False)),
            memory=memory,
            memory_mask=all_masks(memory_mask, xp, memory_key_mask=(memory_key_mask, memory)),
            donate=donate,
            hook=hook,
            shards=shards,
            window=self.windows,
            embedding_scale=self.embedding_scale,
            logit_softcap=self.logit_softcap,
            xp=xp,
            **self._options(seed, *_OPTIONS),
        )
