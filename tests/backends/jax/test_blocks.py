"""Blocks in programs of JAX, which are compiled once."""

import numpy as np
import pytest

import attention_core as ac


@pytest.fixture
def jax(backend):
    import jax

    return jax


@pytest.mark.parametrize("option", ["mask", "score_mod"])
def test_arrays_of_a_function_that_is_compiled_once_may_change(option, jax, rng):
    """What the function itself reads is that of its first call."""
    arrays = [jax.numpy.asarray(rng.standard_normal((1, 2, 70, 4)), "float32") for _ in range(3)]

    def mask(batch, head, query, key, number):
        return key < query + number

    def score_mod(scores, batch, head, query, key, number):
        return scores * number

    def attend(number, implementation):
        held = (jax.numpy.asarray(number, jax.numpy.int32),)
        rule = ac.masks.MaskFunction(mask, held) if option == "mask" else ac.scores.ScoreMod(score_mod, held)
        return ac.scaled_dot_product_attention(*arrays, **{option: rule}, implementation=implementation)

    for number in (2, 5):
        expected = attend(number, "dense")
        np.testing.assert_allclose(attend(number, "blockwise"), expected, rtol=0, atol=1e-5)
