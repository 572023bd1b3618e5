"""Values that are assumed to be finite: the same results, without a look at any value."""

import math
import threading

import numpy as np
import pytest

import attention_core as ac
from attention_core import layers

NOTE = "assume_finite: no value is looked at, and a masked NaN may leak"


@pytest.fixture
def arrays(put, rng):
    return put([rng.standard_normal(dims) for dims in ((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8))])


def leaks(arrays, put, get, **options):
    """Whether the dense form lets a masked NaN leak, as it does if it does not look."""
    query, key, value = arrays
    spoilt = np.array(get(value))
    spoilt[:, :, 6] = math.nan
    rule = {} if "mask" in options else {"is_causal": True}
    options = {"implementation": "dense"} | rule | options
    return bool(np.isnan(get(ac.scaled_dot_product_attention(query, key, put(spoilt), **options))[..., :6, :]).any())


@pytest.mark.parametrize("name", ["causal", "array"])  # by a plan of the signature on some libraries, and without
def test_the_context_is_read_by_each_call_and_the_argument_goes_before_it(name, arrays, put, get):
    mask = {"mask": put(np.arange(7)[:, None] >= np.arange(9))} if name == "array" else {}

    def leak(**options):
        return leaks(arrays, put, get, **mask, **options)

    assert not leak()
    assert leak(assume_finite=True)
    with ac.config_context(assume_finite=True):
        assert leak()
        assert not leak(assume_finite=False)
        with ac.config_context(assume_finite=False):
            assert not leak()
            assert leak(assume_finite=True)
        with ac.config_context():
            assert not leak()
        assert leak()
    assert not leak()


def test_the_context_is_one_of_its_thread_and_ends_with_an_error(arrays):
    def note():
        return NOTE in ac.explain_attention(*arrays, is_causal=True).notes

    found = []
    with ac.config_context(assume_finite=True):
        found.append(note())
        thread = threading.Thread(target=lambda: found.append(note()))
        thread.start()
        thread.join()
    with pytest.raises(TypeError), ac.config_context(assume_finite=True):
        ac.explain_attention(1, 2, 3)
    assert [*found, note()] == [True, False, False]


def test_the_explanation_says_so(arrays, put):
    assert NOTE in ac.explain_attention(*arrays, assume_finite=True).notes
    assert NOTE not in ac.explain_attention(*arrays).notes
    single = put([np.ones((2, 3, 4), np.float32)] * 3)
    assert ac.explain_attention(*single, arithmetic="reproducible", assume_finite=True).notes == (NOTE,)


def test_layers_and_functions_above_obey_it(put, get, rng):
    layer = layers.MultiHeadAttention(8, 2, is_causal=True, implementation="dense")
    parameters = put(layer.init(0, xp=np))
    x = rng.standard_normal((1, 5, 8)).astype("float32")
    x[:, 4] = math.inf
    x = put(x)
    assert np.isfinite(get(layer(parameters, x))[:, :4]).all()
    with ac.config_context(assume_finite=True):
        assert np.isnan(get(layer(parameters, x))[:, :4]).all()
    options = {"num_heads": 2, "is_causal": True, "implementation": "dense"}
    assert np.isnan(get(ac.multi_head_attention(parameters, x, **options, assume_finite=True))[:, :4]).all()
    assert np.isfinite(get(ac.multi_head_attention(parameters, x, **options))[:, :4]).all()
