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
    x = tf.constant(rng.standard_normal((2, 4, 5, 6)))

    def attended(x, lengths):
        return scaled_dot_product_attention(x, x, x, mask=KeyLengths(lengths), implementation=implementation)

    def gradient(x, lengths):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.reduce_sum(attended(x, lengths) ** 2)
        return tape.gradient(found, x)

    for function, lengths in ((attended, [3, 0]), (gradient, [3, 1])):
        run = function if mode == "eager" else tf.function(function)
        assert np.isfinite(run(x, tf.constant(lengths))).all()
    with pytest.raises(tf.errors.InvalidArgumentError, match="NaN"):  # what is of the user
        tf.sqrt(-tf.abs(x))
