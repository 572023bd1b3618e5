"""Attention on TensorFlow: the backend, and the layers of `attention_keras` where Keras runs on TensorFlow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
import attention_numpy  # noqa: F401 (likewise)
from attention_tensorflow.backend import backend

if TYPE_CHECKING:
    from attention_tensorflow.layers import (
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


_keras = getattr(sys.modules.get("keras"), "backend", None)  # as TensorFlow has imported it
if _keras is not None and _keras.backend() == "tensorflow":  # its models' files know only layers that are registered
    import attention_keras  # noqa: F401


def __getattr__(name: str) -> Any:
    """Import the layers, and Keras with them, when one is asked for: the backend does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attention_tensorflow import layers  # noqa: PLC0415 (it imports Keras)

    return getattr(layers, name)
