"""Attention to pieces of the keys, merged in any order, is attention to all of them."""

import math

import numpy as np
import pytest
from blockwise_helpers import quickly

import attention_core as ac
from attention_core.backend import Tuning, array_namespace
from attention_core.pieces import Partial, merge_partials, partial_attention

attention = ac.scaled_dot_product_attention
B, H, G, M, N, D, E = 3, 4, 2, 7, 12, 5, 6
LENGTHS = np.array([12, 0, 5])


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    monkeypatch.setattr(backend, "tuning", Tuning(queries=1, keys=4, min_queries=3, dense_below=0, structured_below=0))


@pytest.fixture
def plain(rng):
    return [rng.standard_normal(shape) for shape in ((B, H, M, D), (B, G, N, D), (B, G, N, E))]


@pytest.fixture
def arrays(plain, put):
    return put(plain)


def whole(arrays, **options):
    result = attention(*arrays, **options, implementation="dense", return_logsumexp=True)
    return result.output, result.logsumexp


def piece(arrays, start, stop, rows=slice(None), bias=None, **options):
    """Attention of some rows to some keys, at the positions that they have in the whole unless options say so."""
    (query, key, value), at = arrays, slice(start, stop)
    options = {"query_start": rows.start or 0, "key_start": start} | options
    options |= {} if bias is None else {"bias": bias[:, :, :, at]}
    return partial_attention(query[:, :, rows, :], key[:, :, at, :], value[:, :, at, :], **options)


def same(actual, desired, get, close=1e-13):
    for found, expected in zip(get(tuple(actual)[: len(desired)]), desired, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=close)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_starts_may_be_arrays(implementation, plain, arrays, backend, put, get):
    options = {"mask": ac.SlidingWindow(left=4, right=1), "dropout": ac.Dropout(0.2, 5)}
    expected = whole(plain, **options)
    options["implementation"] = implementation

    def found(first, second, *arrays):
        spans = (0, 5, 0), (5, N, second)
        parts = [piece(arrays, *at, slice(4, None), query_start=first, key_start=key, **options) for *at, key in spans]
        return merge_partials(*parts)

    starts = put(np.array(4)), put(np.array(5, dtype=np.int32))
    compiled = found if backend.name == "torch" else backend.compile(found)
    same(compiled(*starts, *arrays), [x[:, :, 4:, ...] for x in expected], get)


def test_attention_to_no_keys_is_neutral_to_the_last_bit(arrays, put, get):
    query, key, value = arrays
    none = partial_attention(query, key[:, :, :0, :], value[:, :, :0, :], key_start=3)
    output, logsumexp, remainder = get(tuple(none))
    assert not np.any(output)
    assert not np.any(remainder)
    assert (logsumexp == -math.inf).all()
    masked = piece(arrays, 0, 5, mask=ac.KeyLengths(0))
    some = piece(arrays, 0, 5, mask=ac.KeyLengths(put(LENGTHS)))  # of which one batch is fully masked
    for empty in (none, masked):
        for merged in (merge_partials(some, empty), merge_partials(empty, some), merge_partials(empty, some, empty)):
            for found, expected in zip(get(tuple(merged)), get(tuple(some)), strict=True):
                np.testing.assert_array_equal(found, expected)
    for found, expected in zip(get(tuple(merge_partials(none, masked))), (output, logsumexp, remainder), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_rows_whose_attended_scores_are_all_infinitely_low_are_those_of_one_call(implementation, plain, arrays, get):
    """In any tree of merges, and unlike fully masked rows, which are 0."""

    def never(scores, batch, head, query, key):
        return array_namespace(scores).where(query > 1, scores, -math.inf)

    options, count = {"score_mod": never, "mask": ac.Causal(offset=-1)}, arrays[1].shape[-2]
    first, second, third = (
        piece(arrays, *at, **options, implementation=implementation) for at in ((0, 1), (1, 3), (3, count))
    )
    expected = get(tuple(whole(arrays, **options)))[:2]
    assert np.isnan(expected[0][..., 1, :]).all()
    assert (expected[0][..., 0, :] == 0).all()
    for merged in (merge_partials(merge_partials(first, second), third), merge_partials(third, first, second)):
        for found, wanted in zip(get(tuple(merged)), expected, strict=False):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.needs("dtype")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pieces_of_16_bits_stay_float32(dtype, plain, backend, get):
    rounded = backend.from_numpy(plain, dtype=dtype)
    pieces = [piece(rounded, start, start + 1, implementation="dense") for start in range(N)]
    for part in (*pieces, merge_partials(*pieces)):
        assert [x.dtype.name for x in get(tuple(part))] == ["float32"] * 3

    same(merge_partials(*pieces), whole([get(x).astype(np.float64) for x in rounded]), get, 2e-6)


@pytest.mark.needs("gradients")
def test_gradients_of_merging_nothing_are_exactly_zero(backend, put, get):
    xp = backend.namespace
    ends = put([np.full((2, 3), -math.inf), np.array([[-math.inf, 1.0, 0.0]] * 2)])
    outputs = put([np.zeros((2, 3, 4)), np.ones((2, 3, 4))])

    def total(first, second, *outputs):
        merged = merge_partials(Partial(outputs[0], first), Partial(outputs[1], second))
        logsumexp = xp.where(xp.equal(merged.logsumexp, -math.inf), 0.0, merged.logsumexp)
        return xp.add(xp.sum(merged.output), xp.sum(logsumexp))

    _, found = quickly(backend, backend.value_and_grad(total))(*ends, *outputs)
    first, second, *_ = get(found)
    np.testing.assert_array_equal(first, np.zeros((2, 3)))
    np.testing.assert_allclose(second, [[0.0, 1.0, 1.0]] * 2, atol=1e-15)


def test_a_share_that_underflows_hides_no_nan(put, get):
    parts = [Partial(put(np.full((1, 1, 2), x)), put(np.array([[low]]))) for x, low in ((1.0, 0.0), (math.nan, -1e3))]
    assert np.isnan(get(merge_partials(*parts).output)).all()


def test_the_sum_of_exponentials_neither_overflows_nor_loses_an_infinity(put, get):
    first = np.array([700.0, -900.0, -math.inf, -math.inf, 0.0, math.nan])
    second = np.array([710.0, -901.0, -math.inf, 3.0, 0.0, 1.0])
    with np.errstate(invalid="ignore"):
        merged = merge_partials(*(Partial(put(np.ones((1, 6, 1))), put(each[None])) for each in (first, second)))
        np.testing.assert_allclose(get(merged.logsumexp)[0], np.logaddexp(first, second), rtol=1e-15)
        np.testing.assert_allclose(get(merged.output)[0, :, 0], [1, 1, 0, 1, 1, np.nan], rtol=1e-15)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_a_logsumexp_without_place_for_the_number_of_keys_loses_no_digits(implementation, backend, get, rng):
    """Scores of 10,000 that deviate by one, and a row whose biases are all the lowest number."""
    bias = (1e4 + rng.standard_normal((1, 2, 3, N))).astype(np.float32)
    bias[..., 1, :] = np.finfo(np.float32).min
    value = 1 + rng.random((1, 2, N, E)).astype(np.float32)
    weights = np.exp(bias.astype(np.float64) - bias.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    query, key = (np.zeros((1, 2, rows, D), np.float32) for rows in (3, N))

    def merged(bias, *arrays):
        spans = (0, 1), (1, 4), (4, N)
        return merge_partials(*(piece(arrays, *at, bias=bias, implementation=implementation) for at in spans)).output

    found = quickly(backend, merged)(*backend.from_numpy((bias, query, key, value)))
    np.testing.assert_allclose(get(found), weights @ value, rtol=1e-6)
