"""Ragged batches: samples one by one, as NumPy takes them, have the results of the batch."""

import numpy as np
import pytest

import attention_core as ac
from attention_core._attention import parts, ways
from attention_core._functions.attention import make_call, rounded_attention
from attention_core.backend import find_cut, with_cut
from attention_core.masks import And, Or
from attention_core.scores import alibi

numpy_alone = pytest.mark.needs("numpy")
attention = ac.scaled_dot_product_attention
H, G, D, E, COLUMNS = 6, 2, 5, 4, 200
LENGTHS = np.asarray([7, 200, 0, 64])

RULES = {  # of four samples, for so many queries
    "lengths": lambda rows: ac.KeyLengths(LENGTHS),
    "lengths of uint8": lambda rows: ac.KeyLengths(LENGTHS.astype(np.uint8)),
    "offsets": lambda rows: ac.Causal(offset=np.asarray([3, 190, -rows, 60])),
    "windows": lambda rows: ac.SlidingWindow(left=9, right=0, offset=LENGTHS),
    "cache": lambda rows: And(ac.Causal(offset=LENGTHS), ac.KeyLengths(LENGTHS + rows)),
    "one window and lengths": lambda rows: And(ac.SlidingWindow(left=99, offset=150), ac.KeyLengths(LENGTHS)),
}


@pytest.mark.parametrize("leading", [(2,), (1, 2)])
def test_a_ragged_batch_of_every_library(leading, put, get, rng):
    """Of so many keys that samples are taken apart where that is done."""
    query, key, value = (rng.standard_normal((*leading, *dims)) for dims in ((4, 1, 64), (2, 2048, 64), (2, 2048, 64)))
    lengths = np.asarray([2000, 10]).reshape(leading)
    rule = ac.KeyLengths(put(lengths))
    array = put(np.arange(2048) < lengths[..., None, None, None])
    arrays = put([query, key, value])
    expected = attention(*arrays, mask=array, implementation="dense")
    np.testing.assert_allclose(get(attention(*arrays, mask=rule)), get(expected), rtol=1e-12, atol=1e-12)
    assert ac.explain_attention(*arrays, mask=rule).chosen in ("dense", "fused")


@pytest.fixture
def calls(monkeypatch):
    """How many samples were attended to one by one, in each call that was; whatever that saves."""
    counts = []

    def attend(call, cuts, **options):
        counts.append(len(cuts))
        return whole(call, cuts, **options)

    whole = ways._attend_per_sample
    monkeypatch.setattr(ways, "_attend_per_sample", attend)
    monkeypatch.setattr(parts, "MIN_SAVED", 1)
    return counts


def inputs(rng, rows, leading=(4,), width=E, dtype="float64"):
    shapes = (*leading, H, rows, D), (*leading, G, COLUMNS, D), (*leading, G, COLUMNS, width)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def as_array(rule, rows, leading=(4,)):
    return np.broadcast_to(
        rule.to_array(rows, COLUMNS, leading=leading, num_heads=H, xp=np), (*leading, H, rows, COLUMNS)
    )


@numpy_alone
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("name", RULES)
def test_samples_one_by_one_are_the_batch(name, rows, dtype, calls, rng):
    arrays, rule = inputs(rng, rows, dtype=dtype), RULES[name](rows)
    error = 1e-13 if dtype == "float64" else 2e-3
    for options in ({}, {"sinks": rng.standard_normal(H).astype(dtype)}, {"scale": 0.3, "softcap": 2.0}):
        expected = attention(
            *arrays, mask=as_array(rule, rows), implementation="dense", return_logsumexp=True, **options
        )
        calls.clear()
        found = attention(*arrays, mask=rule, return_logsumexp=True, **options)
        assert calls == [4]
        assert found.output.dtype == expected.output.dtype
        for one, other in zip(found[::2], expected[::2], strict=True):
            np.testing.assert_allclose(one, other, rtol=error, atol=error)
        np.testing.assert_array_equal(attention(*arrays, mask=rule, **options), found.output)
        assert calls == [4, 4]


@numpy_alone
@pytest.mark.parametrize(
    "options",
    [
        {"mask": ac.Causal(offset=150)},
        {"mask": ac.KeyLengths(50)},
        {"mask": ac.KeyLengths(np.asarray([9]))},
        {"mask": ac.KeyLengths(np.full(4, 50))},
        {"mask": ac.KeyLengths(LENGTHS) & ~ac.Causal(offset=-3)},
        {"mask": Or(ac.Causal(offset=3), ac.KeyLengths(LENGTHS))},
        {"mask": Or(ac.KeyLengths(5), ac.KeyLengths(LENGTHS))},
        {"mask": ac.KeyLengths(LENGTHS), "bias": np.zeros(COLUMNS)},
        {"mask": ac.KeyLengths(LENGTHS), "dropout": ac.Dropout(0.2, 1)},
        {"mask": ac.KeyLengths(LENGTHS), "score_mod": alibi(H)},
        {"mask": ac.KeyLengths(LENGTHS), "implementation": "dense"},
        {"mask": ac.KeyLengths(LENGTHS), "implementation": "blockwise"},
    ],
    ids=str,
)
def test_other_calls_stay_whole(options, calls, rng):
    arrays = inputs(rng, 2)
    found = attention(*arrays, **options)
    assert calls == []
    expected = attention(*arrays, **options | {"mask": as_array(options["mask"], 2), "implementation": "dense"})
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


@numpy_alone
def test_samples_are_taken_where_they_save_more_than_their_calls_cost(rng):
    key = np.zeros((4, 4, 1000, 64), np.float32)
    query = np.zeros((4, 16, 1, 64), np.float32)
    assert parts.MIN_SAVED == 2**16
    for lengths, is_apart in (([1000, 500, 100, 1000], True), ([1000, 1000, 990, 1000], False)):
        explained = ac.explain_attention(query, key, key, mask=ac.KeyLengths(np.asarray(lengths)))
        assert explained.chosen == "dense"
        note = "dense: 4 samples one by one, each with the keys that its lengths leave"
        assert (note in explained.notes) is is_apart
        assert ("slower than samples one by one" in str(explained)) is is_apart


@numpy_alone
def test_many_queries_of_a_sample_are_computed_in_blocks(rng):
    key, query = np.zeros((4, 4, 1000, 64), np.float32), np.zeros((4, 16, 64, 64), np.float32)
    assert ac.explain_attention(query, key, key, mask=ac.KeyLengths(np.asarray([1, 2, 3, 999]))).chosen == "blockwise"


@numpy_alone
@pytest.mark.parametrize("name", RULES)
def test_keys_of_a_piece_have_the_positions_of_the_whole(name, calls, rng):
    rows, start = 3, 8
    arrays, rule = inputs(rng, rows), RULES[name](rows)
    array = rule.to_array(rows, start + COLUMNS, leading=(4,), num_heads=H, xp=np)[..., start:]
    call = make_call(*arrays, mask=rule, starts=(0, start))
    found = rounded_attention(call, "auto").output
    assert calls == [4]
    expected = attention(*arrays, mask=array, implementation="dense")
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(
        rounded_attention(with_cut(call, find_cut(call)), "auto").output, expected, rtol=1e-13, atol=1e-13
    )
