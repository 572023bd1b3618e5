"""Layers as functions of their parameters, and what they are made of.

They raise `TypeError` and `ValueError` where dtypes, shapes, devices or numbers do not fit, before any computation.
"""

from ._functions.channels import feed_forward, gelu, layer_norm, linear, rms_norm, silu
from ._functions.decoder_layer import decoder_layer
from ._functions.embeddings import embed_tokens, rotary_embedding
from ._functions.encoder import encoder_layer
from ._functions.sagan import sagan_attention, spectral_norm
from ._keywords import publish

__all__ = [
    "decoder_layer",
    "embed_tokens",
    "encoder_layer",
    "feed_forward",
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
