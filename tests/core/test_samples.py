"""Ragged batches: samples one by one, as NumPy takes them, have the results of the batch."""

import numpy as np
import pytest
from call_table import Sizes

import attention_core as ac
from attention_core._attention import parts, ways
from attention_core.masks import Or
from attention_core.scores import alibi

numpy_alone = pytest.mark.needs("numpy")
attention = ac.scaled_dot_product_attention
H, G, D, E, COLUMNS = 6, 2, 5, 4, 200
LENGTHS = np.asarray([7, 200, 0, 64])

SIZES = Sizes((4,), H, G, 2, COLUMNS, D, E)


@pytest.fixture
def calls(monkeypatch):
    """How many samples were attended to one by one, in each call that was; whatever that saves."""
    counts = []

    def attend(self, call, **options):
        counts.append(len(self.cuts))
        return whole(self, call, **options)

    whole = ways.Samples.run
    monkeypatch.setattr(ways.Samples, "run", attend)
    monkeypatch.setattr(parts, "MIN_SAVED", 1)
    return counts


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
        {"mask": ac.KeyLengths(LENGTHS), "bias": np.zeros(COLUMNS)},
        {"mask": ac.KeyLengths(LENGTHS), "dropout": ac.Dropout(0.2, 1)},
        {"mask": ac.KeyLengths(LENGTHS), "score_mod": alibi(H)},
        {"mask": ac.KeyLengths(LENGTHS), "implementation": "dense"},
        {"mask": ac.KeyLengths(LENGTHS), "implementation": "blockwise"},
    ],
    ids=str,
)
def test_other_calls_stay_whole(options, calls, rng):
    arrays = SIZES.arrays(rng)
    found = attention(*arrays, **options)
    assert calls == []
    array = options["mask"].to_array(2, COLUMNS, leading=(4,), num_heads=H, xp=np)
    expected = attention(*arrays, **options | {"mask": array, "implementation": "dense"})
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


@numpy_alone
def test_many_queries_of_a_sample_are_computed_in_blocks(rng):
    key, query = np.zeros((4, 4, 1000, 64), np.float32), np.zeros((4, 16, 64, 64), np.float32)
    assert ac.explain_attention(query, key, key, mask=ac.KeyLengths(np.asarray([1, 2, 3, 999]))).chosen == "blockwise"
