"""Layers of Keras, their inputs, and comparisons with their definitions."""

import keras
import numpy as np
import tensorflow as tf
from layer_helpers import perturbed

from attention_keras.layers import (
    Embeddings,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    SaganAttention,
)
from attention_models.keras import Decoder

CASES = {
    "multi_head": (
        MultiHeadAttention,
        {"channels": 6, "num_heads": 2, "num_key_value_heads": 1, "dropout": 0.25},
        (2, 5, 6),
    ),
    "feed_forward": (FeedForward, {"channels": 6, "inner": 7, "output_channels": 4, "dropout": 0.25}, (2, 5, 6)),
    "encoder": (EncoderLayer, {"channels": 6, "num_heads": 2, "inner": 7, "dropout": 0.25}, (2, 5, 6)),
    "embeddings": (Embeddings, {"num_tokens": 11, "num_positions": 9, "channels": 6, "dropout": 0.25}, (2, 5)),
    "decoder": (
        Decoder,
        {"num_tokens": 11, "channels": 6, "num_heads": 3, "inner": 7, "num_layers": 1, "num_key_value_heads": 1}
        | {"post_norm": True, "query_key_norm": True, "embedding_scale": 10.0, "dropout": 0.05},
        (2, 5),
    ),
    "sagan": (SaganAttention, {"channels": 8, "head_channels": 3, "value_channels": 5}, (2, 4, 6, 8)),
}

OF_TOKENS = ("embeddings", "decoder")

MODES = {"eager": None, "graph": {}, "xla": {"jit_compile": True}}


def made(name, rng, dtype="float32", **more):
    kind, settings, _ = CASES[name]
    definition = kind.kind(**{**settings, **more})
    return kind.from_numpy(definition, *perturbed(definition, dtype), dtype=dtype)


def example(name, rng, dtype="float32", dims=None):
    dims = CASES[name][2] if dims is None else dims
    if name in OF_TOKENS:
        return rng.integers(0, 11, dims).astype("int32")
    return rng.standard_normal(dims).astype(dtype)


def placeholder(name, dtype="float32"):
    """An input of which nothing is known but its channels."""
    dims = CASES[name][2]
    return (
        keras.Input([None] * (len(dims) - 1), dtype="int32")
        if name in OF_TOKENS
        else keras.Input([*[None] * (len(dims) - 2), dims[-1]], dtype=dtype)
    )


def compiled(function, mode):
    return function if mode == "eager" else tf.function(function, **MODES[mode])


def close(found, expected, tolerance):
    np.testing.assert_allclose(np.asarray(found, "float64"), np.asarray(expected, "float64"), rtol=0, atol=tolerance)


def same(found, expected):
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
