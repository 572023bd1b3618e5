"""The array API of TensorFlow tensors in graphs, with unknown dimensions, and its gradients and backend."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_helpers import FLOATING, MODES, assert_same, tensor

from attention_tensorflow import backend, namespace as xp


def test_counting_in_fractions_gives_float32():
    assert_same(xp.arange(0.0, 1.0, 0.25), np.arange(0.0, 1.0, 0.25, dtype="float32"))
    assert_same(xp.arange(3), np.arange(3, dtype="int32"))


def test_results_do_not_follow_a_variable_that_changes():
    variable = tf.Variable([[1.0, 2.0]])
    value = variable.numpy()
    same = [
        xp.astype(variable, xp.float32),
        xp.asarray(variable),
        xp.squeeze(variable, ()),
        xp.clip(variable),
        xp.sum(variable, axis=()),
        xp.abs(variable),
        xp.reshape(variable, (1, 2)),
    ]
    variable.assign([[7.0, 8.0]])
    for each in same:
        assert_same(each, value)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_unknown_dimensions_become_tensors(mode):
    def sizes(x):
        assert all(isinstance(size, tf.Tensor) and size.dtype is xp.int32 for size in xp.shape(x))
        assert xp.shape(xp.expand_dims(x, axis=1))[1] == 1
        return xp.stack(xp.shape(x))

    assert xp.shape(tf.ones((2, 3))) == (2, 3)
    compiled = tf.function(sizes, input_signature=[tf.TensorSpec([None, None])], jit_compile=mode == "xla")
    assert_same(compiled(tf.ones((2, 3))), np.asarray([2, 3], "int32"))


def test_known_dimensions_stay_known():
    @tf.function(input_signature=[tf.TensorSpec([None, None, 8])])
    def split(x):
        batch, length, _ = xp.shape(x)
        heads = xp.reshape(x, (batch, length, 2, 4))
        assert heads.shape.as_list() == [None, None, 2, 4]
        assert xp.repeat(heads, 3, axis=2).shape.as_list()[3] == 4
        assert xp.broadcast_to(heads, (batch, length, 2, 4)).shape.as_list() == [None, None, 2, 4]
        return heads

    assert split(tf.ones((3, 5, 8))).shape == (3, 5, 2, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *FLOATING])
def test_limits_of_floating_point_are_those_of_ml_dtypes(dtype):
    expected = ml_dtypes.finfo(getattr(ml_dtypes, dtype, dtype))
    got = xp.finfo(tf.zeros(1, getattr(xp, dtype)))
    assert got.dtype is getattr(xp, dtype)
    for name in ("bits", "eps", "max", "min", "smallest_normal"):
        assert getattr(got, name) == getattr(expected, name)
        assert isinstance(getattr(got, name), int if name == "bits" else float)


def test_the_namespace_can_be_inspected():
    info = xp.__array_namespace_info__()
    assert xp.__array_api_version__ == "2024.12"
    assert info.default_dtypes()["integral"] is xp.arange(2).dtype
    assert info.default_dtypes()["real floating"] is xp.zeros(2).dtype
    assert info.devices()


def test_every_public_name_is_there_and_tensors_stay_bare():
    assert len(set(xp.__all__)) == len(xp.__all__)
    assert all(hasattr(xp, name) for name in xp.__all__)
    assert not hasattr(tf.ones(2), "astype")
    assert not hasattr(tf.ones(2), "__array_namespace__")
    with pytest.raises((TypeError, tf.errors.InvalidArgumentError)):
        tf.ones(2) + tf.ones(2, tf.float64)  # TensorFlow would promote, had anybody switched its NumPy behaviour on


class Parameters(NamedTuple):
    weight: object
    bias: object
    power: object


def test_xla_compiles_by_default_and_for_its_own_mode_only():
    def intermediate_code(mode):
        return backend.compile(lambda x: xp.exp(x), mode=mode).experimental_get_compiler_ir(tf.ones(2))()

    for mode in (None, "xla"):
        assert "exponential" in intermediate_code(mode)
    with pytest.raises(ValueError):
        intermediate_code("graph")


@pytest.mark.parametrize("mode", MODES)
def test_what_the_value_does_not_depend_on_has_gradient_zero(mode):
    def loss(parameters, unused, indices):
        return xp.sum(xp.take(parameters.weight, indices, axis=0))

    compiled = backend.compile(backend.value_and_grad(loss), mode=mode)
    parameters = Parameters(tf.ones((3, 2)), tf.Variable([1.0]), 2)
    value, (gradient, unused, indices) = compiled(parameters, [tf.ones(2, tf.bfloat16)], tensor([2, 0, 2]))
    assert_same(value, np.asarray(6, "float32"))
    assert_same(gradient.weight, np.asarray([[1, 1], [0, 0], [2, 2]], "float32"))  # a dense tensor, not slices
    assert_same(gradient.bias, np.zeros(1, "float32"))
    assert_same(unused[0], np.zeros(2, ml_dtypes.bfloat16))
    assert gradient.power is None
    assert indices is None


def test_dense_tensors_and_variables_are_owned():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    sparse = tf.sparse.from_dense([[0.0, 1.0]])
    assert backend.owns(tf.ones(1))
    assert backend.owns(tf.Variable(1.0))
    assert backend.is_concrete(tf.Variable(1.0))
    assert not any(backend.owns(x) for x in (ragged, sparse, np.ones(1), 1.0, None))
