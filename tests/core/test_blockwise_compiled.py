"""Attention in blocks as compiled and transformed by the libraries, and differentiated again."""

import dataclasses
import functools
import importlib
import math
from typing import Any, ClassVar

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
    assert_equal,
    assert_same,
    attention,
    derivatives,
    qkv,
    weighted,
)

import attention_core as ac
from attention_core._arrays import take_rows
from attention_core._attention.blocks import backward as _backward
from attention_core.backend import array_namespace, get_backend
from attention_core.masks import And, Mask
from attention_core.scores import ScoreMod


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    """Blocks so small that there are several."""
    monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)


@dataclasses.dataclass(frozen=True, eq=False)
class Phased(Mask):
    """A rule of a user's own: numbers, arrays of two kinds, and another rule."""

    stride: int
    phases: Any
    shifts: Any
    inner: Mask
    axes: ClassVar[dict[str, int]] = {"phases": 1}

    def allowed(self, at, /, *, xp):
        phases = xp.astype(take_rows(self.phases, xp.reshape(at.query, (-1,)), axis=-1, xp=xp), xp.int32)
        shifts = xp.astype(self.shifts, xp.int32)
        if len(phases.shape) > 1:  # an axis for heads
            phases = xp.expand_dims(phases, axis=-2)
        if len(shifts.shape):
            shifts = xp.reshape(shifts, (-1, 1, 1, 1))
        behind = xp.add(xp.subtract(at.key, xp.expand_dims(phases, axis=-1)), shifts)
        return xp.logical_and(xp.not_equal(xp.remainder(behind, self.stride), 0), self.inner.allowed(at, xp=xp))


PHASES = np.random.default_rng(9).integers(0, 3, (B, M))


def with_own_rule(query, key, value, phases, shifts, bias, weight):
    return {
        "mask": Phased(3, phases, shifts, And(ac.Causal(offset=3), ac.KeyLengths(12))),
        "bias": bias,
        "score_mod": ScoreMod(weighted, (weight,)),
        "dropout": ac.Dropout(0.1, 4),
    }


OWN = PHASES, np.array([0, 1, 5]), np.random.default_rng(8).standard_normal((H, M, 1)), np.array(1.5)


def own_options(*arrays):
    return with_own_rule(None, None, None, *arrays)


@pytest.mark.needs("untraced loops")
def test_a_rule_of_ones_own(backend, rng):
    assert_equal(backend, own_options, [*qkv(rng), *OWN])


@pytest.mark.needs(lambda mode_number, backend: len(backend.modes) > mode_number)
@pytest.mark.parametrize("mode_number", [1, 2])
def test_compiled_blocks(mode_number, backend, rng):
    """All of it in every mode that compiles: a rule of one's own, a score modification with an array, bias, dropout."""
    arrays = [*qkv(rng), *OWN]
    (expected,) = derivatives(backend, own_options, arrays, ("dense",))

    def compiled(backend, function):
        return backend.compile(function, mode=backend.modes[mode_number])

    if backend.name == "torch":  # whose compiler differentiates what it has compiled
        (found,) = derivatives(backend, own_options, arrays, ("blockwise",), inner=graph_of_torch)
    else:
        (found,) = derivatives(backend, own_options, arrays, ("blockwise",), compiled=compiled)
    assert_same(found, expected)


@pytest.mark.needs(lambda mode_number, backend: len(backend.modes) > mode_number)
@pytest.mark.parametrize("mode_number", [1, 2])
def test_a_single_query_of_one_head_and_a_key_compiled(mode_number, backend, rng, put, get):
    """The results and the gradients are single rows, each contiguous where it is a part of another array."""
    arrays = put(list(map(rng.standard_normal, [(1, 1, 1, 4), (1, 1, 1, 4), (1, 1, 1, 1)])))

    def compiled(function):
        return backend.compile(function, mode=backend.modes[mode_number])

    def attend(implementation):
        return lambda *arrays: attention(*arrays, return_logsumexp=True, implementation=implementation)[::2]

    def total(implementation, *arrays):
        output, logsumexp = attend(implementation)(*arrays)
        xp = array_namespace(output)
        return xp.sum(xp.add(output[..., 0], logsumexp))

    assert_same(get(compiled(attend("blockwise"))(*arrays)), get(attend("dense")(*arrays)))
    if backend.differentiates:
        dense, blocks = (functools.partial(total, implementation) for implementation in ("dense", "blockwise"))
        if backend.name == "torch":  # whose compiler differentiates what it has compiled
            found = backend.value_and_grad(compiled(blocks))(*arrays)
        else:
            found = compiled(backend.value_and_grad(blocks))(*arrays)
        assert_same(get(found[1]), get(backend.value_and_grad(dense)(*arrays)[1]))


def graph_of_torch(function):
    """One graph; machine code is made of the same one."""
    torch = importlib.import_module("torch")
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")


def attend_some(query, key, value, lengths):
    mask = And(ac.KeyLengths(lengths), ac.Causal(offset=1))
    return attention(query, key, value, mask=mask, bias=value[0, 0, 0, 0], implementation="blockwise")


def sized(batch, length, put):
    rng = np.random.default_rng(batch * 100 + length)
    shapes = (batch, 6, length, 4), (batch, 3, length + 2, 4), (batch, 3, length + 2, 3)
    return put([*map(rng.standard_normal, shapes), rng.integers(0, length + 1, batch)])


def dense_some(query, key, value, lengths):
    mask = And(ac.KeyLengths(lengths), ac.Causal(offset=1))
    return attention(query, key, value, mask=mask, bias=value[0, 0, 0, 0], implementation="dense")


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
    for batch, length in ((3, 11), (1, 1)):
        blocks, dense = graph(*sized(batch, length, backend.from_numpy))
        np.testing.assert_allclose(blocks[0], dense[0], rtol=1e-12)
        for found, expected in zip(blocks[1][:3], dense[1][:3], strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.needs("tensorflow")
def test_tensorflow_with_open_lengths_that_turn_out_empty(backend):
    tf = importlib.import_module("tensorflow")
    spec = tf.TensorSpec([2, 2, None, 4], tf.float64)
    ids = tf.TensorSpec([2, None], tf.int32)

    @tf.function(input_signature=[spec] * 3 + [ids] * 2)
    def gradients(query, key, value, *ids):
        def measure(*arrays):
            options = {"mask": ac.Segments(*ids), "implementation": "blockwise"}
            return tf.reduce_sum(attention(*arrays, **options))

        return backend.value_and_grad(measure)(query, key, value)

    for rows, columns in ((3, 0), (0, 3), (0, 0)):
        query, key = (tf.ones((2, 2, length, 4), tf.float64) for length in (rows, columns))
        value, found = gradients(query, key, key, *(tf.ones((2, length), tf.int32) for length in (rows, columns)))
        assert value == 0
        assert [tuple(each.shape) for each in found] == [query.shape, key.shape, key.shape]


@pytest.mark.needs("jax")
def test_jax_export_with_open_batch_and_lengths(backend):
    jax, export = importlib.import_module("jax"), importlib.import_module("jax.export")
    scope = export.SymbolicScope()
    shapes = [
        jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), array.dtype)
        for array, text in zip(
            sized(2, 5, backend.from_numpy), ["b, 6, m, 4", "b, 3, m + 2, 4", "b, 3, m + 2, 3", "b"], strict=True
        )
    ]
    program = export.deserialize(export.export(jax.jit(attend_some))(*shapes).serialize())
    arrays = sized(3, 11, backend.from_numpy)
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
        mask = And(ac.KeyLengths(lengths), ac.Causal(offset=1))
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


def age_logarithm(scores, batch, head, query, key):
    """What is nan, or -inf, where the key comes after the query."""
    xp = array_namespace(scores)
    age = xp.astype(xp.subtract(query, key), scores.dtype)
    return xp.add(scores, xp.where(xp.less(age, 0.0), math.nan, age))


def root(scores, batch, head, query, key):
    """A function without a derivative at 0, which stands for a masked score."""
    xp = array_namespace(scores)
    return xp.multiply(xp.sign(scores), xp.sqrt(xp.abs(scores)))


@pytest.mark.parametrize("change", [age_logarithm, root])
def test_what_a_change_makes_of_masked_scores_does_not_leak(change, backend, rng):
    assert_equal(backend, lambda: {"mask": ac.Causal(), "score_mod": change}, qkv(rng))
