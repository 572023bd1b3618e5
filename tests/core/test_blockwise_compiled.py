"""Attention in blocks as compiled and transformed by the libraries, and differentiated again."""

import functools
import importlib
import math

import numpy as np
import pytest
from blockwise_helpers import (
    LENGTHS,
    RUNS,
    TUNING,
    B,
    G,
    H,
    M,
    N,
    assert_same,
    attention,
    qkv,
)
from tracing_helpers import sized

import attention_core as ac
from attention_core._attention.blocks import backward as _backward
from attention_core.backend import get_backend
from attention_core.masks import And


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    """Blocks so small that there are several."""
    monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)


def attend_some(query, key, value, lengths, implementation="blockwise"):
    mask, bias = And(ac.KeyLengths(lengths), ac.Causal(offset=1)), value[0, 0, :, 0]
    return attention(query, key, value, mask=mask, bias=bias, implementation=implementation)


dense_some = functools.partial(attend_some, implementation="dense")


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_tensorflow_with_open_batch_and_lengths(jit_compile, backend):
    tf = importlib.import_module("tensorflow")
    signature = [
        tf.TensorSpec(dims, tf.float64) for dims in ([None, 6, None, 4], [None, 3, None, 4], [None, 3, None, 3])
    ]
    signature.append(tf.TensorSpec([None], tf.int64))

    def gradients(*arrays):
        return [
            backend.value_and_grad(lambda *arrays, of=of: tf.reduce_sum(of(*arrays) ** 2))(*arrays)
            for of in (attend_some, dense_some)
        ]

    graph = tf.function(gradients, input_signature=signature, jit_compile=jit_compile)
    for batch, rows, columns in ((3, 11, 13), (1, 1, 3), (2, 3, 0), (2, 0, 3), (2, 0, 0)):
        query, key, value, lengths = sized(batch, 11, backend.name)
        blocks, dense = graph(query[..., :rows, :], key[..., :columns, :], value[..., :columns, :], lengths)
        np.testing.assert_allclose(blocks[0], dense[0], rtol=1e-12)
        for found, expected in zip(blocks[1][:3], dense[1][:3], strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)
    assert graph.experimental_get_tracing_count() == 1


@pytest.mark.needs("jax")
def test_jax_export_with_open_batch_and_lengths(backend):
    jax, export = importlib.import_module("jax"), importlib.import_module("jax.export")
    scope = export.SymbolicScope()
    shapes = [
        jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), array.dtype)
        for array, text in zip(
            sized(2, 5, backend.name), ["b, 6, m, 4", "b, 3, m + 2, 4", "b, 3, m + 2, 3", "b"], strict=True
        )
    ]
    program = export.deserialize(export.export(jax.jit(attend_some))(*shapes).serialize())
    arrays = sized(3, 11, backend.name)
    np.testing.assert_allclose(program.call(*arrays), jax.jit(dense_some)(*arrays), rtol=0, atol=1e-13)


@pytest.mark.needs("jax")
def test_jax_vmap_over_everything(backend, rng):
    """The number of blocks to visit differs between what is mapped over."""
    jax = importlib.import_module("jax")
    arrays = backend.from_numpy([*qkv(rng, (B, 2)), np.array([13, 0, 6])])

    def measure(implementation, query, key, value, length):
        mask = And(ac.KeyLengths(length), ac.Causal(offset=1))
        return (attention(query, key, value, mask=mask, implementation=implementation) ** 2).sum()

    dense, blocks = (
        jax.jit(jax.vmap(jax.grad(lambda *arrays, name=name: measure(name, *arrays), argnums=(0, 1, 2))))(*arrays)
        for name in ("dense", "blockwise")
    )
    assert_same(backend.to_numpy(blocks), backend.to_numpy(dense))


def recorded_operations(backend, monkeypatch):
    """A list of the plan, arrays and results of all operations from now on, which the library does not differentiate."""
    taken = []

    def compute(self, operation, plan, arrays):
        taken.append((plan, arrays, operation.forward(plan, arrays, self)))
        return taken[-1][2]

    monkeypatch.setattr(type(backend), "custom_gradient", compute)
    return taken


def test_what_rounding_takes_from_the_logsumexp_is_kept(backend, monkeypatch):
    """With a bias of 1e17, that is the logarithm of the number of keys."""
    taken = recorded_operations(backend, monkeypatch)
    zeros, bias = backend.from_numpy([np.zeros((1, 1, 13, 4)), np.asarray([[1e17]] * 6 + [[0.0]] * 7)])
    attention(zeros, zeros, zeros, bias=bias, implementation="blockwise")
    *_, logsumexp, remainder = (backend.to_numpy(x).reshape(13) for x in taken[0][2][1:])
    np.testing.assert_array_equal(logsumexp[:6], 1e17)
    np.testing.assert_allclose(remainder[:6], math.log(13), rtol=1e-15)
    np.testing.assert_allclose(logsumexp[6:], math.log(13), rtol=1e-15)
    np.testing.assert_allclose(remainder[6:], 0.0, atol=1e-15)


@pytest.mark.needs("name")
@pytest.mark.parametrize("shape", [(H, M, 1), (B, H, M, N)])
@pytest.mark.parametrize("name", ["array_api_strict", "numpy"])
def test_going_backward_needs_the_array_api_alone(name, shape, backend, rng, monkeypatch):
    """Without differentiation by the library: the gradients are those of the dense form."""
    taken = recorded_operations(backend, monkeypatch)
    arrays = [*qkv(rng), rng.standard_normal(shape), LENGTHS]

    def attend(implementation, *arrays):
        *inputs, bias, lengths = arrays
        mask = And(ac.KeyLengths(lengths), ac.Causal(offset=N - M))  # which hides no key from all queries
        return attention(*inputs, mask=mask, bias=bias, scale=1.0, implementation=implementation, return_logsumexp=True)

    output, _, logsumexp = backend.to_numpy(tuple(attend("blockwise", *backend.from_numpy(arrays))))
    ((plan, held, results),) = taken
    factors = rng.standard_normal(output.shape), rng.standard_normal(logsumexp.shape)
    cotangents = [backend.from_numpy(x.reshape(B, G, H // G, *x.shape[2:])) for x in factors]
    found = _backward.backward(plan, held, results, (*cotangents, results[2]), backend)
    found = [x.reshape(array.shape) for x, array in zip(backend.to_numpy(tuple(found[:4])), arrays[:4], strict=True)]
    numpy = get_backend("numpy")
    direction = [rng.standard_normal(x.shape) for x in arrays[:4]]

    def value(step):
        moved = [x + step * d for x, d in zip(arrays[:4], direction, strict=True)]
        result = attend("dense", *numpy.from_numpy([*moved, LENGTHS]))
        finite = np.where(np.isfinite(result.logsumexp), result.logsumexp, 0.0)
        return np.sum(result.output * factors[0]) + np.sum(finite * factors[1])

    difference = (value(1e-5) - value(-1e-5)) / 2e-5
    np.testing.assert_allclose(sum(np.sum(f * d) for f, d in zip(found, direction, strict=True)), difference, rtol=1e-7)
