"""The layers of `attention_keras`, under the address that they had when Keras ran on TensorFlow alone."""

import keras

if keras.backend.backend() != "tensorflow":
    raise RuntimeError(
        "expected Keras on TensorFlow, by KERAS_BACKEND=tensorflow before Keras is imported; "
        f"got Keras on {keras.backend.backend()}, for which attention_keras has the layers"
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
    "load",
    "save",
]
