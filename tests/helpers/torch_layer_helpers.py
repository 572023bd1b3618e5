"""Layers of PyTorch, their inputs, and comparisons with their definitions."""

import importlib

from layer_helpers import (
    CASES,
    FEW,
    Layers,
    alike as same_bits,  # noqa: F401 (for the tests)
)

from attention_core.backend import dtype_name, get_backend

torch = importlib.import_module("torch")
attention_torch = importlib.import_module("attention_torch")

SETTINGS = {name: CASES[name][0] for name in FEW}


def inputs_of(name, dtype=torch.float32):
    inputs, _ = Layers(get_backend("torch")).inputs(name, dtype_name(dtype))
    return inputs


def layer_of(name, dtype=torch.float32):
    """A layer in which nothing is 0, so that everything has an effect and a gradient."""
    return Layers(get_backend("torch")).made(name, dtype_name(dtype))


def equal(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
