"""Layers of JAX, their inputs, and comparisons with their definitions."""

import functools
import importlib

import numpy as np
import pytest
from layer_helpers import CASES as ALL, FEW, Layers

from attention_core.backend import get_backend

jax = importlib.import_module("jax")

jnp = jax.numpy

attention_jax = importlib.import_module("attention_jax")

RNG = np.random.default_rng(29)

IDS = RNG.integers(0, 11, (2, 5))

X = RNG.standard_normal((2, 5, 6))

CASES = {name: ALL[name] for name in FEW}  # of every layer: settings, inputs, and options

few = pytest.mark.parametrize("name", ["EncoderLayer", "SaganAttention"])  # with options, and with a state


@functools.cache
def made(name, dtype="float64"):
    """A layer in which nothing is 0, its inputs and its options."""
    adapter = Layers(get_backend("jax"))
    return adapter.made(name, "float64").astype(dtype), *adapter.inputs(name, dtype)


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
