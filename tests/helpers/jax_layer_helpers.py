"""Layers of JAX, their inputs, and comparisons with their definitions."""

import functools
import importlib

import numpy as np
import pytest

from attention_core import KeyLengths

jax = importlib.import_module("jax")

jnp = jax.numpy

ravel_pytree = importlib.import_module("jax.flatten_util").ravel_pytree

attention_jax = importlib.import_module("attention_jax")

RNG = np.random.default_rng(29)

IDS = RNG.integers(0, 11, (2, 5))

X = RNG.standard_normal((2, 5, 6))

MAPS = RNG.standard_normal((2, 4, 6, 8))

# Of every layer: settings, inputs, and options.
CASES = {
    "DotProductAttention": ({"softcap": 2.0, "dropout": 0.4}, (X, X[:, :3], X[:, 1:4] + 1), {"key_mask": np.asarray([[True, True, False], [True] * 3])}),
    "MultiHeadAttention": ({"channels": 6, "num_heads": 2, "num_key_value_heads": 1, "zero_attention": True, "is_causal": True, "dropout": 0.4}, (X,), {"mask": KeyLengths(np.asarray([5, 2]))}),
    "FeedForward": ({"channels": 6, "inner": 7, "output_channels": 3, "dropout": 0.4}, (X,), {}),
    "EncoderLayer": ({"channels": 6, "num_heads": 3, "inner": 7, "dropout": 0.4}, (X,), {"key_mask": np.arange(5) < np.asarray([[5], [3]])}),
    "Embeddings": ({"num_tokens": 11, "num_positions": 7, "channels": 6, "num_segments": 2, "dropout": 0.4}, (IDS,), {"segment_ids": IDS % 2}),
    "SaganAttention": ({"channels": 8, "head_channels": 3, "bias": True}, (MAPS,), {}),
}  # fmt: skip

every = pytest.mark.parametrize("name", CASES)


def shaken(layer, seed=1):
    """A layer whose biases are not zero, and whose scales are not one."""
    flat, back = ravel_pytree(layer.parameters)
    noise = np.random.default_rng(seed).standard_normal(flat.shape)
    return type(layer)(layer.definition, back(flat + 0.3 * jnp.asarray(noise, flat.dtype)), layer.state)


@functools.cache
def made(name, dtype="float64"):
    settings, inputs, options = CASES[name]
    layer = shaken(getattr(attention_jax, name).init(3, **settings, dtype="float64")).astype(dtype)
    return layer, jax.tree.map(lambda x: as_input(x, dtype), inputs), jax.tree.map(jnp.asarray, options)


def as_input(x, dtype):
    return jnp.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else None)


def numbers(tree):
    return jax.tree.leaves(jax.tree.map(lambda x: np.asarray(x, np.float64), tree))


def close(actual, desired, tolerance=1e-12):
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for found, expected in zip(numbers(actual), numbers(desired), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * max(1, np.abs(expected).max()))


def equal(actual, desired):
    """Bit for bit, of the same types."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for found, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        assert found.dtype == expected.dtype
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
