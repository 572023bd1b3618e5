"""Changes of scores by positions: published rates and buckets, any shape of positions, and gradients."""

import numpy as np
import pytest

from attention_core import Causal, scaled_dot_product_attention
from attention_core.scores import ScoreMod, alibi, relative_bias

H, M, N = 6, 5, 7
LENGTHS = np.asarray([2, 9], dtype=np.int32)


def where(batch=2, heads=H, rows=M, columns=N):
    """Positions of scores (batch, heads, rows, columns)."""
    counted = (np.arange(size, dtype=np.int32) for size in (batch, heads, rows, columns))
    return tuple(array.reshape(-1, *[1] * axes) for array, axes in zip(counted, (3, 2, 1, 0), strict=True))


def normal(rng, dtype="float64"):
    return rng.standard_normal((2, H, M, N)).astype(dtype)


def added(mod, scores, at, put, get):
    """What is added to scores of 0, after a check that the same is added to others, to the last rounding but one."""
    result = get(mod(put(scores), *map(put, at)))
    assert result.dtype == scores.dtype
    assert result.shape == scores.shape
    bias = get(mod(put(np.zeros_like(scores)), *map(put, at)))
    np.testing.assert_allclose(result, scores + bias, rtol=0, atol=4 * np.finfo(scores.dtype).eps * np.abs(bias).max())
    return bias


# What the authors' code gives.
RATES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    8: [2.0**-n for n in range(1, 9)],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    12: [*(2.0**-n for n in range(1, 9)), *(2.0 ** -(n / 2) for n in (1, 3, 5, 7))],
}


@pytest.mark.parametrize("heads", RATES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_alibi_has_the_published_slopes(heads, dtype, put, get):
    at = where(1, heads, 1, 2)
    result = get(alibi(heads)(put(np.zeros((1, heads, 1, 2), dtype)), *map(put, at)))
    np.testing.assert_array_equal(result[0, :, 0, 1], -np.asarray(RATES[heads], dtype))
    np.testing.assert_array_equal(result[0, :, 0, 0], 0)


def offsets(kind):
    """An offset, as a number, an array of one, or of one for every entry; and its value for scores."""
    return {"number": (3, 3), "array": (np.asarray(3), 3), "ragged": (LENGTHS, LENGTHS[:, None, None, None])}[kind]


@pytest.mark.parametrize("kind", ["number", "array", "ragged"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_alibi_falls_with_the_distance(kind, dtype, put, get, rng):
    argument, offset = offsets(kind)
    mod = alibi(H, offset=argument if kind == "number" else put(argument))
    _, _, query, key = at = where()
    rates = np.asarray(RATES[H])[:, None, None]
    bias = added(mod, normal(rng, dtype), at, put, get)
    np.testing.assert_array_equal(bias, np.broadcast_to(-rates * np.abs(query + offset - key), bias.shape))


@pytest.mark.parametrize("kind", ["number", "array", "ragged"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_is_the_number_of_the_bucket(bidirectional, kind, dtype, put, get, rng):
    argument, offset = offsets(kind)
    table = rng.standard_normal((8, H)).astype(dtype)
    mod = relative_bias(
        put(table),
        bidirectional=bidirectional,
        max_distance=7,
        offset=argument if kind == "number" else put(argument),
    )
    _, head, query, key = at = where()
    bias = added(mod, normal(rng, dtype), at, put, get)
    bucket = BUCKETS[bidirectional][np.clip(key - query - offset, -9, 9) + 9]
    np.testing.assert_array_equal(bias, np.broadcast_to(table[bucket, head], bias.shape))


# Of distances -9 to 9, for 8 buckets and max_distance 7: in two directions 2 are exact, 2 + 2 log(r / 2) / log(3.5) after;
# in one 4 are exact, 4 + 4 log(r / 4) / log(7 / 4) after.
BUCKETS = {
    True: np.asarray([3, 3, 3, 3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7, 7, 7, 7]),
    False: np.asarray([7, 7, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
}


@pytest.mark.needs("bfloat16")
def test_a_table_of_16_bits_is_widened(backend, rng):
    table = backend.from_numpy(rng.standard_normal((8, H)), dtype="bfloat16")
    at, scores = backend.from_numpy(where()), backend.from_numpy(normal(rng, "float32"))
    wide = backend.namespace.astype(table, backend.namespace.float32)
    results = [backend.to_numpy(relative_bias(each)(scores, *at)) for each in (table, wide)]
    assert results[0].dtype == np.float32
    np.testing.assert_array_equal(*results)


def test_equal_rules_are_known_as_equal():
    """A compiler that keeps what it compiled by function finds it again."""
    assert alibi(4).function == alibi(4).function
    assert hash(alibi(4, offset=2).function) == hash(alibi(4, offset=2).function)
    assert alibi(4).function != alibi(4, offset=2).function
    table = np.zeros((8, 2))
    assert relative_bias(table).function == relative_bias(table + 1).function
    assert relative_bias(table).function != relative_bias(table, max_distance=9).function


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("mask", [None, Causal(offset=N - M)])
def test_arrays_that_take_the_place_of_scores_are_left_alone(implementation, mask, put, get, rng):
    """Exponentials may be written over scores, but not over what belongs to the user."""
    query, key, value = put([rng.standard_normal((1, H, length, 4)) for length in (M, N, N)])
    table = rng.standard_normal((1, H, M, N))
    held = put(table)
    whole = ScoreMod(lambda scores, batch, head, row, column, held: held, (held,))
    if implementation == "blockwise":  # of which one has all scores, with an axis for heads that share a key
        whole = ScoreMod(lambda scores, batch, head, row, column, held: held[0, :, None, :, :], (held,))
    found = [
        get(scaled_dot_product_attention(query, key, value, mask=mask, score_mod=whole, implementation=implementation))
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(get(held), table)


@pytest.mark.parametrize("buckets", [4, 8, 12, 20, 32, 54])
def test_buckets_begin_where_powers_of_integers_say(buckets):
    """The last of log(r / e) / log(D / e) >= step / steps, in integers, at every distance up to the greatest."""
    exact = buckets // 2
    steps = buckets - exact
    for farthest in (*range(exact + 1, 90), exact * 2**5, exact * 3**4, 1000, 1024, 2187):
        bias = relative_bias(np.ones((buckets, 1)), bidirectional=False, max_distance=farthest)
        before = bias.function.buckets[farthest::-1]
        for distance, bucket in enumerate(before):
            reached = [s for s in range(steps) if distance**steps >= farthest**s * exact ** (steps - s)]
            assert bucket == (distance if distance < exact else exact + max(reached))


def test_a_backend_may_keep_tables(backend, put, xp, rng, monkeypatch):
    asked = []

    def kept(numbers, dtype, like, /):
        asked.append(list(numbers))
        return xp.asarray(list(numbers), dtype=dtype)

    monkeypatch.setattr(backend, "array_of", kept, raising=False)  # not the class: what it has is remembered
    x = put(rng.standard_normal((1, 2, 5, 8)))
    scaled_dot_product_attention(x, x, x, score_mod=alibi(2), implementation="dense")
    assert [2**-4, 2**-8] in asked
