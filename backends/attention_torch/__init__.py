"""Attention on PyTorch: the backend, and layers that are modules."""

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
import attention_numpy  # noqa: F401 (likewise)
from attention_torch.backend import backend
from attention_torch.layers import (
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
    "save",
]
