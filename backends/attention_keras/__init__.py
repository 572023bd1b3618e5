"""The layers and functions of attention-core for Keras, on TensorFlow, JAX or PyTorch: ``KERAS_BACKEND`` decides."""

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
import attention_numpy  # noqa: F401 (likewise)
from attention_keras.functions import (
    FunctionCall,
    gelu,
    rms_norm,
    rotary_embedding,
    scaled_dot_product_attention,
    silu,
)
from attention_keras.layers import (
    Decoder,
    DecoderLayer,
    DotProductAttention,
    Embeddings,
    EncoderLayer,
    FeedForward,
    GatedFeedForward,
    Layer,
    MultiHeadAttention,
    RMSNorm,
    SaganAttention,
    load,
    save,
)
from attention_keras.library import backend

__all__ = [
    "Decoder",
    "DecoderLayer",
    "DotProductAttention",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "FunctionCall",
    "GatedFeedForward",
    "Layer",
    "MultiHeadAttention",
    "RMSNorm",
    "SaganAttention",
    "backend",
    "gelu",
    "load",
    "rms_norm",
    "rotary_embedding",
    "save",
    "scaled_dot_product_attention",
    "silu",
]
