"""Layers as functions of their parameters, and what they are made of.

They raise `TypeError` and `ValueError` where dtypes, shapes, devices or numbers do not fit, before any computation.
"""

from attention_core._functions.decoder_layer import decoder_layer
from attention_core._functions.embeddings import embed_tokens
from attention_core._functions.encoder import encoder_layer
from attention_core._functions.feed_forward import feed_forward, gated_feed_forward, gelu, linear, silu
from attention_core._functions.normalization import layer_norm, rms_norm
from attention_core._functions.rotary import rotary_embedding
from attention_core._functions.sagan import sagan_attention, spectral_norm
from attention_core._keywords import publish

__all__ = [
    "decoder_layer",
    "embed_tokens",
    "encoder_layer",
    "feed_forward",
    "gated_feed_forward",
    "gelu",
    "layer_norm",
    "linear",
    "rms_norm",
    "rotary_embedding",
    "sagan_attention",
    "silu",
    "spectral_norm",
]

publish(vars(), __all__)
