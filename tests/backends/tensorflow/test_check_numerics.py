"""Whoever lets TensorFlow look for numbers that are not finite sees those of arguments and results, and none of ours."""

import numpy as np
import pytest
import tensorflow as tf

from attention_core import KeyLengths, scaled_dot_product_attention


@pytest.fixture
def checked():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_masked_scores_are_not_looked_at(implementation, mode, rng, checked):
    x, lengths = tf.constant(rng.standard_normal((2, 4, 5, 6))), tf.constant([3, 0])
    # Sinks ask for logsumexp: the gradient of a condition in a graph takes that out of it, outside of the library.
    options = {"implementation": implementation, "sinks": tf.zeros(4, x.dtype) if mode == "eager" else None}

    def attended(x, lengths):
        return scaled_dot_product_attention(x, x, x, mask=KeyLengths(lengths), **options)

    def gradient(x, lengths):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.reduce_sum(attended(x, lengths) ** 2)
        return tape.gradient(found, x)

    for function in (attended, gradient):
        run = function if mode == "eager" else tf.function(function)
        assert np.isfinite(run(x, lengths)).all()
    with pytest.raises(tf.errors.InvalidArgumentError):  # what is of the user
        tf.sqrt(-tf.abs(x))
