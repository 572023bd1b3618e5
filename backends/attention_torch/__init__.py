"""Attention on PyTorch: the backend, and layers that are modules."""

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
import attention_numpy  # noqa: F401 (likewise)
from attention_torch.backend import backend
from attention_torch.layers import (
    DotProductAttention,
    Embeddings,
    EncoderLayer,
    FeedForward,
    Layer,
    MultiHeadAttention,
    SaganAttention,
    load,
    save,
)

__all__ = [
    "DotProductAttention",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "Layer",
    "MultiHeadAttention",
    "SaganAttention",
    "backend",
    "load",
    "save",
]
