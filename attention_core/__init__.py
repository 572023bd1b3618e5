"""Attention, written once against the Python array API standard."""

from attention_core._attention import Attention, attention_scores, scaled_dot_product_attention
from attention_core._encoder import encoder_layer, multi_head_attention
from attention_core._gelu import gelu
from attention_core._heads import merge_heads, split_heads
from attention_core._layers import embed_tokens, feed_forward, layer_norm, linear
from attention_core._sagan import sagan_attention, spectral_norm
from attention_core.backend import Backend, available_backends, get_backend
from attention_core.masks import (
    Causal,
    KeyLengths,
    Mask,
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

__all__ = [
    "Attention",
    "Backend",
    "Causal",
    "Dropout",
    "KeyLengths",
    "Mask",
    "Segments",
    "SlidingWindow",
    "attention_scores",
    "available_backends",
    "embed_tokens",
    "encoder_layer",
    "feed_forward",
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
    "merge_heads",
    "multi_head_attention",
    "sagan_attention",
    "scaled_dot_product_attention",
    "spectral_norm",
    "split_heads",
]
