"""Weights of chosen queries, keys and heads, and recorded calls."""

import threading
import tracemalloc

import numpy as np
import pytest
from blockwise_helpers import quickly
from call_table import Sizes, options_of

import attention_core as ac
from attention_core.parameters import Linear, MultiHeadAttention

B, H, G, M, N, D = 2, 4, 2, 13, 11, 8
RNG = np.random.default_rng(5)
QUERY, KEY = RNG.standard_normal((B, H, M, D)), RNG.standard_normal((B, G, N, D))
SIZES = Sizes((B,), H, G, M, N, D, D)
OPTIONS = ("none", "array of samples", "lengths", "bias with infinities", "alibi of a window", "sinks", "reproducible")
FEW = ("array of samples", "alibi of a window", "sinks")  # where every shape is compiled
CHOICES = [
    {"queries": [3, 1, -1], "heads": [1, 3]},
    {"queries": slice(4, 9), "keys": [0, -1, 4]},
    {"keys": slice(2, 7), "heads": slice(1, 2)},
    {"queries": np.asarray([5, 5])},
    {"queries": slice(None, None, -3), "keys": slice(5, 2)},
]


def placed(put, name):
    if name == "reproducible":
        return placed(put, "array of samples") | {"arithmetic": "reproducible"}
    return options_of(name, SIZES, lambda x: put(x.astype("float32") if x.dtype == np.float64 else x))


def dense(name):
    """Query and key, and all weights by the definition on NumPy."""
    query, key = QUERY.astype("float32"), KEY.astype("float32")
    wanted = placed(np.asarray, name) | {"return_weights": True}
    return query, key, ac.scaled_dot_product_attention(query, key, key, implementation="dense", **wanted).weights


def chosen_of(weights, heads=slice(None), queries=slice(None), keys=slice(None)):
    return weights[:, heads][:, :, queries][..., keys]


@pytest.mark.needs(lambda backend, name: backend.name in ("numpy", "torch") or name in FEW)
@pytest.mark.needs(lambda backend, name: name != "reproducible" or backend.name != "array_api_strict")
@pytest.mark.parametrize("name", OPTIONS)
def test_they_are_those_of_the_dense_form(name, backend, put, get):
    query, key, whole = dense(name)
    unit, options = np.finfo(np.float32).eps, placed(put, name)
    query, key = put([query, key])
    for choice in CHOICES[FEW.index(name) :: 3] if backend.loops.traced else CHOICES:
        expected = chosen_of(whole, **choice)

        def chosen(query, key, choice=choice):
            return ac.weights.attention_weights(query, key, **choice, **options)

        found = get(quickly(backend, chosen)(query, key))
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert abs(found - expected).max(initial=0) <= (0 if name == "reproducible" else 2 * unit)


@pytest.mark.needs("numpy")
def test_a_few_rows_of_a_long_sequence_need_little_memory(rng):
    length, rows = 65536, 16
    query, key = (rng.standard_normal((1, 1, length, D)).astype(np.float32) for _ in range(2))
    tracemalloc.start()
    weights = ac.weights.attention_weights(query, key, queries=range(100, 100 + rows), is_causal=True)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert weights.shape == (1, 1, rows, length)
    assert most < 10 * weights.nbytes  # all weights have 65,536 rows
    assert not weights[0, 0, 0, 101:].any()


def test_recorded_calls_compute_what_they_would_compute_otherwise(put, get, xp, rng):
    x = put(rng.standard_normal((2, 6, 8)).astype("float32"))
    square = put(rng.standard_normal((8, 8)).astype("float32"))
    linear = Linear(square, None)
    parameters = MultiHeadAttention(linear, linear, linear, linear)

    def run():
        heads = ac.split_heads(x, 2)
        first = ac.multi_head_attention(parameters, x, num_heads=2, is_causal=True)
        return first, ac.scaled_dot_product_attention(heads, heads, heads, mask=ac.SlidingWindow(left=1, right=1))

    expected = run()
    with ac.weights.record_attention() as records, ac.weights.record_attention() as others:
        found = run()
    run()
    assert [get(each).tobytes() for each in found] == [get(each).tobytes() for each in expected]
    assert len(records) == len(others) == 2
    assert repr(records[1]) == "RecordedAttention(query (2, 2, 6, 4), key (2, 2, 6, 4))"
    weights = ac.scaled_dot_product_attention(
        *[ac.split_heads(x, 2)] * 3, mask=ac.SlidingWindow(left=1, right=1), return_weights=True, implementation="dense"
    ).weights
    np.testing.assert_allclose(get(records[1].weights(queries=[4])), get(weights)[:, :, 4:5], rtol=1e-6)
    assert not get(records[0].weights(queries=[0], keys=slice(1, None))).any()


def test_calls_of_other_threads_are_not_recorded(put, xp):
    x = put(np.ones((1, 3, 4), "float32"))
    found = []

    def other():
        with ac.weights.record_attention() as records:
            barrier.wait()
            ac.scaled_dot_product_attention(x, x, x, xp=xp)
            barrier.wait()
        found.append(len(records))

    barrier = threading.Barrier(2, timeout=60)
    thread = threading.Thread(target=other)
    with ac.weights.record_attention() as records:
        thread.start()
        barrier.wait()
        for _ in range(2):
            ac.scaled_dot_product_attention(x, x, x, xp=xp)
        barrier.wait()
        thread.join()
    assert (len(records), found) == (2, [1])


@pytest.mark.needs(lambda backend: backend.name in ("torch", "jax", "tensorflow"))
def test_a_traced_call_is_not_recorded(backend, put):
    x = put(QUERY.astype("float32"))
    compiled = backend.compile(lambda x: ac.scaled_dot_product_attention(x, x, x))
    with (
        ac.weights.record_attention() as records,
        pytest.raises(Exception, match="expected eager calls while attention is"),
    ):
        compiled(x)
    assert records == []
    compiled(x)
