"""Masks, changes of scores, and comparisons of attention in blocks with the dense form."""

import importlib
import math

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


def derivatives(backend, options, arrays, implementations, dtype=None, compiled=quickly, inner=None):
    """Output, logsumexp, and the gradients of all arrays, of which those after the third make the options.

    The gradients for the numbers by which results are multiplied are the results themselves.
    """
    xp, put = backend.namespace, backend.from_numpy
    rng = np.random.default_rng(61)
    query, _, value = arrays[:3]
    factors = rng.standard_normal((*query.shape[:-1], value.shape[-1])), rng.standard_normal(query.shape[:-1])

    def results(implementation, *arrays):
        qkv_arrays, rest = arrays[:3], arrays[3:]
        return attention(*qkv_arrays, **options(*rest), return_logsumexp=True, implementation=implementation)[::2]

    def measure(implementation, of_output, of_logsumexp, *arrays):
        output, logsumexp = results(implementation, *arrays)
        logsumexp = xp.where(xp.equal(logsumexp, -math.inf), 0.0, logsumexp)
        parts = (
            xp.multiply(xp.astype(x, factor.dtype), factor)
            for x, factor in ((output, of_output), (logsumexp, of_logsumexp))
        )
        return xp.add(*(xp.astype(xp.sum(part), xp.float32) for part in parts))

    measured = measure if inner is None else inner(measure)

    def everything(*arrays):
        if not backend.differentiates:
            return [results(name, *arrays[2:]) for name in implementations]
        return [
            backend.value_and_grad(lambda *arrays, name=name: measured(name, *arrays))(*arrays)[1]
            for name in implementations
        ]

    found = compiled(backend, everything)(*put((*factors, *arrays), dtype=dtype))
    return [[each for each in backend.to_numpy(tuple(results)) if is_floating(each)] for results in found]


def is_floating(x):
    return isinstance(x, np.ndarray) and x.dtype.name in ("float16", "bfloat16", "float32", "float64")


def assert_equal(backend, options, arrays, *, dtype=None, close=1e-13, compiled=quickly):
    """Blocks give the results and gradients of the dense form, but for roundings relative to the largest of each."""
    dense, blocks = derivatives(backend, options, arrays, ("dense", "blockwise"), dtype, compiled)
    assert_same(blocks, dense, close)
    return blocks


def assert_same(actual, desired, close=1e-13):
    assert len(actual) == len(desired)
    for found, expected in zip(actual, desired, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        found, expected = (x.astype(np.float64) for x in (found, expected))
        scale = max(1.0, float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))))
        np.testing.assert_allclose(found, expected, rtol=0, atol=close * scale)


NONFINITE = [math.nan, math.inf, -math.inf]

OFFSETS, LENGTHS = np.array([0, 3, -4]), np.array([13, 0, 6])

QUERY_IDS, KEY_IDS = np.sort(np.random.default_rng(7).integers(0, 4, (2, B, N)))


def weighted(scores, batch, head, query, key, weight):
    xp = array_namespace(scores)
    return xp.multiply(scores, xp.astype(weight, scores.dtype))
