"""Tensors of TensorFlow, and comparisons with NumPy and the standard."""

import numpy as np
import tensorflow as tf

SIGNED = ("int8", "int16", "int32", "int64")

INTEGRAL = (*SIGNED, "uint8", "uint16", "uint32", "uint64")

FLOATING = ("float32", "float64")  # those of the standard

DTYPES = ("bool", *INTEGRAL, *FLOATING)

MODES = ["eager", "graph", "xla"]


def tensor(array, dtype=None):
    return tf.constant(np.asarray(array, dtype))


def assert_same(got, expected, *, rtol=0.0):
    """Fail unless a tensor has the values, the dtype and the shape of an array."""
    assert isinstance(got, tf.Tensor)
    expected = np.asarray(expected)
    assert got.dtype.as_numpy_dtype == expected.dtype
    assert tuple(got.shape) == expected.shape
    np.testing.assert_allclose(got.numpy().astype("complex128"), expected.astype("complex128"), rtol=rtol)
