"""`jax.debug_infs` raises no false alarm: masked scores are -inf inside, where output and gradients are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_core as ac

LOWER = np.tril(np.ones((4, 4), bool))
MASKS = {
    "causal": {"is_causal": True},
    "lengths": {"mask": ac.KeyLengths(np.asarray([0, 3])), "sinks": np.ones(2, "float32")},
    "window": {"mask": ac.SlidingWindow(1, 1), "softcap": 2.0},
    "empty row": {"mask": LOWER & (np.arange(4) != 0)},
    "bias": {"bias": jnp.where(jnp.asarray(LOWER), jnp.float32(0), -jnp.inf)},
}


def gradients(x, **options):
    with jax.debug_infs(True):
        return jax.grad(lambda x: jnp.sum(ac.scaled_dot_product_attention(x, x, x, **options)))(x)


@pytest.mark.parametrize("name", MASKS)
def test_masks_raise_no_alarm(name, rng):
    x = jnp.asarray(rng.standard_normal((2, 2, 4, 3), "float32"))
    with jax.debug_infs(True):
        output = ac.scaled_dot_product_attention(x, x, x, implementation="dense", **MASKS[name])
    expected = ac.scaled_dot_product_attention(x, x, x, implementation="dense", **MASKS[name])
    assert np.array_equal(output, expected)
    assert np.isfinite(gradients(x, implementation="dense", **MASKS[name])).all()


def test_blocks_raise_no_alarm_of_an_empty_row(rng):
    x = jnp.asarray(rng.standard_normal((2, 2, 4, 3), "float32"))
    with jax.debug_infs(True):
        output = ac.scaled_dot_product_attention(x, x, x, **MASKS["empty row"], implementation="blockwise")
    assert np.isfinite(output).all()


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_results_that_are_infinite_raise_an_alarm(implementation):
    x, value = jnp.zeros((1, 4, 3)), jnp.full((1, 4, 3), jnp.inf)
    with jax.debug_infs(True), pytest.raises(FloatingPointError):
        ac.scaled_dot_product_attention(x, x, value, is_causal=True, implementation=implementation)
    with jax.debug_infs(True), pytest.raises(FloatingPointError):  # of its logsumexp
        ac.scaled_dot_product_attention(
            x, x, x, mask=MASKS["empty row"]["mask"], implementation=implementation, return_logsumexp=True
        )
