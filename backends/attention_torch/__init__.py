"""Attention on PyTorch: the backend, and layers that are modules."""

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
