"""Blocks in programs of JAX: loops, of as many operations for any length, and larger blocks on a GPU."""

import numpy as np
import pytest
from blockwise_helpers import weighted

import attention_core as ac

MASKS = {
    "full": lambda length: {},
    "causal": lambda length: {"is_causal": True},
    "window": lambda length: {"mask": ac.SlidingWindow(left=200, right=0)},
    "documents": lambda length: {"mask": ac.Segments(np.arange(length) // 100, np.arange(length) // 100)},
    "alibi": lambda length: {"score_mod": ac.scores.alibi(4)},
    "everything": lambda length: {
        "mask": ac.SlidingWindow(left=100) & ac.KeyLengths(77),
        "score_mod": ac.scores.ScoreMod(weighted, (ac.backend.get_backend("jax").from_numpy(np.float32(1.5)),)),
        "softcap": 3.0,
    },
}


def count(jaxpr):
    """How many operations a program has, those of its loops counted once."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else [parameter]:
                inner = getattr(part, "jaxpr", part)
                total += count(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.fixture
def jax(backend):
    import jax

    return jax


@pytest.mark.parametrize("name", MASKS)
def test_a_longer_program_has_no_more_operations(name, jax):
    counts = []
    for length in (1024, 8192):
        options = MASKS[name](length)

        def loss(query, key, value, options=options):
            return ac.scaled_dot_product_attention(query, key, value, **options, implementation="blockwise").sum()

        x = jax.ShapeDtypeStruct((2, 4, length, 64), np.float32)
        counts.append(count(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x).jaxpr))
    assert counts[1] <= counts[0] < 1000


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
