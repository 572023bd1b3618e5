"""Layers of PyTorch, their inputs, and comparisons with their definitions."""

import importlib

import numpy as np

from attention_core.layers import named_arrays

torch = importlib.import_module("torch")

attention_torch = importlib.import_module("attention_torch")

SETTINGS = {
    "DotProductAttention": {"dropout": 0.3},
    "MultiHeadAttention": {"channels": 8, "num_heads": 4, "num_key_value_heads": 2, "key_channels": 5, "dropout": 0.3},
    "FeedForward": {"channels": 5, "inner": 7, "output_channels": 3, "dropout": 0.3},
    "EncoderLayer": {"channels": 6, "num_heads": 2, "inner": 10, "dropout": 0.3},
    "Embeddings": {"num_tokens": 11, "num_positions": 7, "channels": 4, "num_segments": 3, "dropout": 0.3},
    "SaganAttention": {"channels": 8, "head_channels": 2, "bias": True},
}

SHAPES = {
    "DotProductAttention": ((2, 3, 4), (2, 5, 4), (2, 5, 6)),
    "MultiHeadAttention": ((2, 3, 8), (2, 6, 5)),
    "FeedForward": ((2, 3, 5),),
    "EncoderLayer": ((2, 3, 6),),
    "SaganAttention": ((2, 8, 4, 6),),
}


def values_of(name):
    """The inputs of a layer in NumPy."""
    rng = np.random.default_rng(5)
    if name == "Embeddings":
        return (rng.integers(0, 11, (2, 5)),)
    return tuple(rng.standard_normal(shape) for shape in SHAPES[name])


def inputs_of(name, dtype=torch.float32):
    arrays = map(torch.from_numpy, values_of(name))
    return tuple(array.to(dtype) if array.is_floating_point() else array for array in arrays)


def layer_of(name, dtype=torch.float32, **options):
    """A layer in which nothing is 0, so that everything has an effect and a gradient."""
    layer = getattr(attention_torch, name)(**SETTINGS[name], **options, dtype=dtype, seed=3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim < 2:
                parameter += torch.rand(parameter.shape, generator=generator, dtype=torch.float64) / 2 + 0.25
    return layer


def equal(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def same_bits(trees, others):
    for tree, other in zip(trees, others, strict=True):
        first, second = named_arrays(tree), named_arrays(other)
        assert list(first) == list(second)
        for name, array in first.items():
            assert (array.dtype, array.shape) == (second[name].dtype, second[name].shape), name
            assert array.tobytes() == second[name].tobytes(), name
