"""Masks, changes of scores, and comparisons of attention in blocks with the dense form."""

import importlib

import numpy as np

import attention_core as ac
from attention_core.backend import Tuning, array_namespace

attention = ac.scaled_dot_product_attention

B, H, G, M, N, D, E = 3, 4, 2, 11, 13, 5, 6

BLOCKS = 4, 5  # which fit into neither length

TUNING = Tuning(queries=1, keys=BLOCKS[1], min_queries=BLOCKS[0], dense_below=0, structured_below=0, backward_keys=5)

RUNS = TUNING._replace(keys=2 * BLOCKS[0] + 1)  # where loops are not traced, two blocks that a mask leaves are joined


def qkv(rng, leading=(B,), heads=H, groups=G, rows=M, columns=N):
    shapes = (*leading, heads, rows, D), (*leading, groups, columns, D), (*leading, groups, columns, E)
    return [rng.standard_normal(shape) for shape in shapes]


def quickly(backend, function):
    """Compiled without optimization where compiling takes longest."""
    if backend.name != "jax":
        return function
    return importlib.import_module("jax").jit(function, compiler_options={"xla_backend_optimization_level": 0})


def assert_same(actual, desired, close=1e-13):
    assert len(actual) == len(desired)
    for found, expected in zip(actual, desired, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        found, expected = (x.astype(np.float64) for x in (found, expected))
        scale = max(1.0, float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))))
        np.testing.assert_allclose(found, expected, rtol=0, atol=close * scale)


LENGTHS = np.array([13, 0, 6])


def weighted(scores, batch, head, query, key, weight):
    xp = array_namespace(scores)
    return xp.multiply(scores, xp.astype(weight, scores.dtype))
