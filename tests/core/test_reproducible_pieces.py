"""Pieces of the keys in reproducible arithmetic: merged in any order, they have the bits of the whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import attention_core as ac
from attention_core._attention.reproducible.pieces import merge_sums
from attention_core.pieces import (
    ExactPartial,
    Extent,
    attention_extent,
    complete_partial,
    merge_extents,
    merge_partials,
)

EXACTLY = {"arithmetic": "reproducible"}
B, H, G, M, N, D, E = 2, 4, 2, 7, 20, 5, 6


def drawn(rng, *dims):
    return rng.standard_normal(dims).astype(np.float32)


def qkv(rng, columns=N):
    return drawn(rng, B, H, M, D), drawn(rng, B, G, columns, D), drawn(rng, B, G, columns, E)


def in_pieces(arrays, cuts, order=None, dropout=None, piecewise=("bias",), **options):
    """Attention to pieces of the keys, merged in some order."""
    query, key, value = arrays
    spans = list(itertools.pairwise(cuts))
    spans = spans if order is None else [spans[index] for index in order]

    def of_piece(start, stop):
        piece_options = {
            name: option[..., start:stop] if name in piecewise else option for name, option in options.items()
        }
        return (query, key[..., start:stop, :], value[..., start:stop, :]), {**piece_options, "key_start": start}

    extents = [
        attention_extent(*piece_arrays, **piece_options)
        for piece_arrays, piece_options in (of_piece(*span) for span in spans)
    ]
    extent = merge_extents(*extents)
    partials = [
        ac.pieces.partial_attention(*piece_arrays, **piece_options, dropout=dropout, extent=extent, **EXACTLY)
        for piece_arrays, piece_options in (of_piece(*span) for span in spans)
    ]
    return complete_partial(merge_partials(*partials), dropout=dropout)


def same(found, wanted):
    for one, other in zip(found[:2], wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{other.itemsize}"))


def whole(arrays, **options):
    found = ac.scaled_dot_product_attention(*arrays, **options, return_logsumexp=True, **EXACTLY)
    return found.output, found.logsumexp


def nonfinite(rng):
    query, key, value = qkv(rng)
    value[0, 0, 3, 2], value[0, 0, 8, 2], value[1, 1, 9, 3], key[0, 1, 5, 0] = np.inf, -np.inf, np.nan, np.nan
    return query, key, value


OPTIONS = {
    "full": lambda put, rng: {},
    "causal": lambda put, rng: {"is_causal": True},
    "causal, later": lambda put, rng: {"mask": ac.Causal(offset=9), "softcap": 2.0, "scale": 0.7},
    "lengths": lambda put, rng: {"mask": ac.KeyLengths(put(np.array([N, 0])))},
    "array": lambda put, rng: {"mask": put(rng.random((B, 1, M, N)) < 0.4)},
    "bias": lambda put, rng: {"bias": put(drawn(rng, H, M, N))},
    "dropout": lambda put, rng: {"dropout": ac.Dropout(0.4, 11)},
}


@pytest.mark.needs(lambda name, inputs, backend: not backend.loops.traced or (name, inputs) == ("bias", nonfinite))
@pytest.mark.parametrize("inputs", [qkv, nonfinite], ids=["ordinary", "nonfinite"])
@pytest.mark.parametrize("name", OPTIONS)
def test_pieces_in_any_order_have_the_bits_of_the_whole(name, inputs, backend, put, get, rng):
    arrays, options = put(list(inputs(rng))), OPTIONS[name](put, rng)
    found = in_pieces(arrays, (0, 6, 6, 7, N), (2, 0, 3, 1), **options)
    same(get(tuple(found)), get(whole(arrays, **options)))


@pytest.mark.needs("dtype")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_16_bits_are_rounded_when_all_is_merged(dtype, backend, rng):
    arrays = backend.from_numpy(list(qkv(rng)), dtype=dtype)
    found = in_pieces(arrays, (0, 3, N))
    output = backend.namespace.astype(found.output, arrays[0].dtype)
    same(backend.to_numpy((output, found.logsumexp)), backend.to_numpy(whole(arrays)))


@pytest.mark.optimized
@pytest.mark.needs("compilation")
def test_pieces_are_merged_within_a_compiled_function(backend, rng):
    arrays = backend.from_numpy(list(qkv(rng)))

    def function(*arguments):
        return tuple(in_pieces(arguments, (0, 8, N), (1, 0), mask=ac.Causal(offset=3)))

    found = backend.to_numpy(backend.compile(function)(*arrays))
    same(found, backend.to_numpy(whole(arrays, mask=ac.Causal(offset=3))))


def test_more_keys_than_are_summed_at_once(put, get, rng):
    query, key, value = qkv(rng, 9001)
    arrays = put([query[:1, :2, :3], key[:1, :1], value[:1, :1]])
    same(get(tuple(in_pieces(arrays, (0, 100, 5000, 9001), (1, 2, 0)))), get(whole(arrays)))


@pytest.mark.needs(lambda empty, backend: not backend.loops.traced or empty == "keys")
@pytest.mark.parametrize(
    ("empty", "axis"), [("keys", -2), ("queries", -2), ("values", -1), ("batch", 0)], ids=lambda each: str(each)
)
def test_empty_pieces_have_the_bits_of_the_whole(empty, axis, backend, put, get, rng):
    arrays = list(qkv(rng))
    for argument in {"keys": (1, 2), "queries": (0,), "values": (2,), "batch": (0, 1, 2)}[empty]:
        arrays[argument] = np.take(arrays[argument], np.zeros(0, dtype=int), axis=axis)
    arrays = put(arrays)
    same(get(tuple(in_pieces(arrays, (0, 0, 0) if empty == "keys" else (0, 4, N)))), get(whole(arrays)))


def test_sums_of_unlimited_size_are_merged_limb_by_limb():
    rng = np.random.default_rng(0)
    numbers = [int(x) * 4000 for x in rng.integers(-(2**53), 2**53, 100)]

    def limbs(number):
        rest, low = divmod(number, 2**20)
        return np.asarray([[part] for part in (rest // 2**20, rest % 2**20, low)], dtype=np.int32)

    found = limbs(0)
    for number in numbers:
        found = merge_sums(found, limbs(number), np)
    np.testing.assert_array_equal(found, limbs(sum(numbers)))


def test_2048_partials_can_be_added_as_they_are(rng):
    """So a reduction of integers over machines merges them."""
    query, key, value = (x[:1, :1, :3] for x in qkv(rng, 3))
    keys, values = (np.tile(x, (1, 1, 2048, 1)) for x in (key, value))
    extent = attention_extent(query, keys, values)
    one = ac.pieces.partial_attention(query, key, value, extent=extent, **EXACTLY)
    added = ExactPartial(one.weights * np.int32(2048), one.values * np.int32(2048), extent)
    same(complete_partial(added), whole((query, keys, values)))


@pytest.mark.needs("gradients")
def test_a_gradient_is_refused(backend, rng):
    query, key, value = backend.from_numpy(list(qkv(rng)))
    with pytest.raises(NotImplementedError, match="not to be differentiated"):
        backend.value_and_grad(lambda q: backend.namespace.sum(in_pieces((q, key, value), (0, 8, N)).output))(query)


def test_errors_come_before_any_work(rng):
    arrays = query, key, value = qkv(rng)
    extent, partial = attention_extent(*arrays), ac.pieces.partial_attention
    wide = tuple(x.astype(np.float64) for x in extent)
    part = partial(*arrays, extent=extent, **EXACTLY)
    other = part._replace(extent=Extent(extent.scores, extent.values * 2))
    local = {"key_start": 3, "mask": np.ones((M, 4), bool)}
    piece, whole_mask = (
        (key[:, :, 3:7], value[:, :, 3:7]),
        "expected a mask over all positions of the whole, at least 7",
    )
    for call, message in (
        (lambda: partial(*arrays, **EXACTLY), "expected the extent of all keys .*; got none"),
        (lambda: partial(*arrays, extent=extent), "expected no extent with arithmetic='fast'; got one"),
        (lambda: partial(query[:, :, :3], key, value, extent=extent, **EXACTLY), "expected the scores of the extent of shape .*; got"),
        (lambda: partial(*arrays, extent=wide, **EXACTLY), "of dtype float32; got float64"),
        (lambda: partial(*arrays, extent=(1, 2), **EXACTLY), "expected the scores of"),
        (lambda: partial(query, *piece, **local), whole_mask),
        (lambda: attention_extent(query, *piece, **local), whole_mask),
        (lambda: attention_extent(*(x.astype(np.float64) for x in arrays)), "float64"),
        (lambda: merge_extents(([1], [2])), "expected the scores of"),
        (lambda: merge_extents(extent, 3), r"expected Extent\(scores, values\); got"),
        (lambda: merge_extents(extent, Extent(extent.scores, extent.values[..., :2])), "expected the values of all extents"),
        (lambda: merge_partials(part, other), "expected partials relative to one extent"),
        (lambda: merge_partials(part, complete_partial(part)), "expected ExactPartial like the first; got Partial"),
        (lambda: complete_partial(3), "expected Partial or ExactPartial; got int"),
        (lambda: complete_partial(extent), "expected Partial or ExactPartial; got Extent"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_scores_beyond_float32_in_one_piece_do_not_spoil_the_others():
    query = np.full((1, 1, 1), 2.0**70, np.float32)
    key = np.asarray([[[0.0], [1e-30], [-(2.0**70)], [-(2.0**70)]]], np.float32)
    value = np.arange(1, 5, dtype=np.float32).reshape(1, 4, 1)
    found = in_pieces((query, key, value), (0, 2, 4), scale=1.0)
    same(found, whole((query, key, value), scale=1.0))
    assert found.output[0, 0, 0] == 1.5
    for cuts in ((2, 4), (2, 3, 4)):  # alone, they are nan, however they are cut
        piece = query, key[:, 2:], value[:, 2:]
        merged = in_pieces(piece, [cut - 2 for cut in cuts], scale=1.0)
        same(merged, whole(piece, scale=1.0))
        assert np.isnan(merged.output).all()


def test_sums_keep_nan_where_the_maxima_of_a_library_lose_it(rng):
    query, key, value = qkv(rng)
    key[0, 0, 3, 1] = np.nan
    arrays = query, key, value
    extent = attention_extent(*arrays)
    key[0, 0, 3, 1] = 0.0
    careless = Extent(attention_extent(*arrays).scores, extent.values)
    key[0, 0, 3, 1] = np.nan
    spans = ((0, 5), (5, N))
    partials = [
        ac.pieces.partial_attention(query, key[:, :, a:b], value[:, :, a:b], extent=careless, **EXACTLY)
        for a, b in spans
    ]
    same(complete_partial(merge_partials(*partials)), whole(arrays))


def test_extents_of_subnormal_values_are_those_of_zeros(put, get, rng):
    query, key, value = qkv(rng)
    extent = get(attention_extent(*put([query, key, np.full_like(value, 1e-40)])))
    np.testing.assert_array_equal(extent.values, 0.0)


def test_extents_are_compared_by_all_of_their_parts():
    parts = [(1.0, 0.0, 0.0), (1.0, 2.0**-30, 0.0), (1.0, 2.0**-30, 2.0**-60), (1.0, 2.0**-30, -(2.0**-60))]
    extents = [Extent(np.asarray([[part]], np.float32), np.ones((1, 1), np.float32)) for part in parts]
    for order in itertools.permutations(extents):
        np.testing.assert_array_equal(merge_extents(*order).scores, [[parts[2]]])
