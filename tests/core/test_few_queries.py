"""A few queries against many keys, as in a cache: equal to the definition under the same mask as an array."""

import importlib

import numpy as np
import pytest
from call_table import Sizes

import attention_core as ac
from attention_core._attention import memo
from attention_core.backend import get_backend, rule_of

attention = ac.scaled_dot_product_attention
NUMPY = get_backend("numpy").namespace
B, H, G, D = 3, 6, 2, 5


def as_array(mask, rows, columns):
    """The mask of all scores, on NumPy."""
    counts = np.ix_(*(np.arange(count, dtype=np.int32) for count in (B, H, rows, columns)))
    return np.broadcast_to(mask.allowed(ac.masks.Positions(*counts), xp=NUMPY), (B, 1, rows, columns))


LENGTHS = [
    [40, 40, 40],
    [40, 40, 40],
    [99, 99, 99],
    [3, 130, 40],
    [3, 130, 40],
    [40, 40, 40],
    [200, 200, 200],
    [0, 7, 0],
]


@pytest.mark.parametrize(
    "rule", [ac.KeyLengths, lambda at: ac.Causal(offset=at), lambda at: ac.SlidingWindow(left=20, right=0, offset=at)]
)
def test_lengths_are_read_in_every_call(rule, backend, put, get, rng, monkeypatch):
    """What they decide is kept for calls with the same ones, and for no other."""
    rows, columns, made, planned = 2, 132, [], []
    monkeypatch.setattr(memo, "rule_of", lambda *arguments: made.append(1) or rule_of(*arguments))

    def output(*arguments, **options):
        planned.append(memo.output_of(*arguments, **options))
        return planned[-1]

    monkeypatch.setattr("attention_core._functions.attention.output_of", output)
    plain = Sizes((B,), H, G, rows, columns, D, D).arrays(rng)
    expected = [
        attention(*plain, mask=as_array(rule(np.asarray(numbers)), rows, columns), implementation="dense")
        for numbers in LENGTHS
    ]
    made.clear()
    arrays = put(plain)
    for numbers, output_of_array in zip(LENGTHS, expected, strict=True):
        mask = rule(put(np.asarray(numbers)))
        np.testing.assert_allclose(get(attention(*arrays, mask=mask)), output_of_array, rtol=0, atol=1e-13)
        if numbers in ([40] * B, [99] * B) and not backend.loops.traced:
            assert planned[-1] is not None
    assert len(made) == (0 if backend.loops.traced else 4)  # of shared lengths that are not those of the last call


@pytest.mark.needs("numpy")
def test_lengths_that_are_written_over_are_read(rng):
    arrays = Sizes((B,), H, G, 1, 300, D, D).arrays(rng)
    first, second = (np.asarray(numbers) for numbers in ([50, 50, 50], [70, 90, 300]))
    for lengths in (first, second, first, second):
        expected = attention(*arrays, mask=ac.KeyLengths(lengths.copy()), implementation="dense")
        np.testing.assert_allclose(attention(*arrays, mask=ac.KeyLengths(lengths)), expected, rtol=0, atol=1e-13)
        first += 1
        second[:] = 60


@pytest.mark.needs("jax")
def test_the_program_of_jax_transposes_no_key():
    jax = importlib.import_module("jax")
    query, key = (jax.ShapeDtypeStruct(dims, np.float32) for dims in ((1, 4, 3, 7), (1, 2, 400, 7)))
    program = jax.jit(lambda *arrays: attention(*arrays, mask=ac.Causal(offset=397))).lower(query, key, key)
    assert "x400x7x" in program.as_text()
    assert "x7x400x" not in program.as_text()
