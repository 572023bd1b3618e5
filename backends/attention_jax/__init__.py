"""Attention on JAX."""

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
import attention_numpy  # noqa: F401 (likewise)
from attention_jax.backend import backend
from attention_jax.layers import (
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
from attention_jax.masks import register_mask

__all__ = [
    "Decoder",
    "DecoderLayer",
    "DotProductAttention",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "Layer",
    "MultiHeadAttention",
    "RMSNorm",
    "SaganAttention",
    "backend",
    "load",
    "register_mask",
    "save",
]
