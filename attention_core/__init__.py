"""Attention, written once against the Python array API standard."""

import typing as _typing

from attention_core._attention.call import Attention
from attention_core._attention.explanation import Explanation
from attention_core._attention.reproducible.pieces import ExactPartial, Extent
from attention_core._attention.shards.splits import Shards
from attention_core._functions.attention import attention_scores, explain_attention, scaled_dot_product_attention
from attention_core._functions.cache import KeyValueCache, append, cache_mask, empty_cache
from attention_core._functions.config import config_context
from attention_core._functions.decoder import DecoderCache, decoder, empty_decoder_cache
from attention_core._functions.decoder_layer import decoder_layer
from attention_core._functions.embeddings import embed_tokens
from attention_core._functions.encoder import encoder_layer
from attention_core._functions.feed_forward import feed_forward, gated_feed_forward, gelu, linear, silu
from attention_core._functions.heads import merge_heads, split_heads
from attention_core._functions.multi_head import multi_head_attention
from attention_core._functions.normalization import layer_norm, rms_norm
from attention_core._functions.pieces import (
    Partial,
    attention_extent,
    complete_partial,
    merge_extents,
    merge_partials,
    partial_attention,
)
from attention_core._functions.prepared import prepare_weights
from attention_core._functions.rotary import rotary_embedding
from attention_core._functions.sagan import sagan_attention, spectral_norm
from attention_core._functions.sampling import sample_tokens
from attention_core._functions.shards import shard, shard_positions, unshard
from attention_core._functions.weights import RecordedAttention, attention_map, attention_weights, record_attention
from attention_core._keywords import publish as _publish
from attention_core.backend import Backend, available_backends, get_backend
from attention_core.masks import (
    Causal,
    KeyLengths,
    Mask,
    MaskFunction,
    Segments,
    SlidingWindow,
    mask_from_additive,
    mask_from_ignore,
    mask_from_integers,
    mask_from_lengths,
    mask_from_padding,
    mask_from_query_key,
)
from attention_core.random import Dropout
from attention_core.scores import ScoreMod, alibi, relative_bias

__all__ = [
    "Attention",
    "Backend",
    "Causal",
    "DecoderCache",
    "Dropout",
    "ExactPartial",
    "Explanation",
    "Extent",
    "KeyLengths",
    "KeyValueCache",
    "Mask",
    "MaskFunction",
    "Partial",
    "RecordedAttention",
    "ScoreMod",
    "Segments",
    "Shards",
    "SlidingWindow",
    "alibi",
    "append",
    "attention_extent",
    "attention_map",
    "attention_scores",
    "attention_weights",
    "available_backends",
    "cache_mask",
    "complete_partial",
    "config_context",
    "decoder",
    "decoder_layer",
    "embed_tokens",
    "empty_cache",
    "empty_decoder_cache",
    "encoder_layer",
    "explain_attention",
    "feed_forward",
    "gated_feed_forward",
    "gelu",
    "get_backend",
    "layer_norm",
    "linear",
    "mask_from_additive",
    "mask_from_ignore",
    "mask_from_integers",
    "mask_from_lengths",
    "mask_from_padding",
    "mask_from_query_key",
    "merge_extents",
    "merge_heads",
    "merge_partials",
    "multi_head_attention",
    "partial_attention",
    "prepare_weights",
    "record_attention",
    "relative_bias",
    "rms_norm",
    "rotary_embedding",
    "sagan_attention",
    "sample_tokens",
    "scaled_dot_product_attention",
    "shard",
    "shard_positions",
    "silu",
    "spectral_norm",
    "split_heads",
    "unshard",
]

if _typing.TYPE_CHECKING:  # by that name alone checkers know it
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """The version, which is read when it is first asked for: that takes longer than importing the core."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version  # noqa: PLC0415

        globals()[name] = version("attention-core")
        return globals()[name]


for _name in __all__:
    if "._" in vars()[_name].__module__:
        _publish(vars(), [_name])
        vars()[_name].__module__ = __name__  # by which pickles and documentation know it
