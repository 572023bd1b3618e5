"""What is remembered of a signature: never a value, never an error, and nothing for another signature."""

import gc
import threading
import weakref

import numpy as np
import pytest
from call_table import NAMES, Sizes, options_of

import attention_core as ac
from attention_core._attention import ways
from attention_core.backend import dtype_name

attention = ac.scaled_dot_product_attention
M, N, D, E = 5, 7, 3, 4

CAUSAL, BLOCKWISE = {"is_causal": True}, {"implementation": "blockwise"}


@pytest.fixture
def arrays(rng):
    return [rng.standard_normal(shape) for shape in ((1, 2, M, D), (1, 2, N, D), (1, 2, N, E))]


@pytest.fixture
def square(rng):
    return [rng.standard_normal((1, 2, M, D)) for _ in range(3)]


def defined(arrays):
    return attention(*arrays, implementation="dense")


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.needs(lambda backend: not backend.loops.traced)
def test_a_signature_does_not_answer_for_another(put, get, rng):
    """All options in turn, each after all others."""
    sizes = Sizes((1,), 2, 2, M, M, D, D)
    arrays = sizes.arrays(rng)
    named = [(name, BLOCKWISE) for name in ("causal", "window", "none")]
    named += [("none", {"is_causal": flag}) for flag in (np.True_, np.False_)]
    more = [(name, {}) for name in NAMES] + named + [("none", {"scale": 1}), ("causal", {"implementation": "dense"})]
    wanted = [attention(*arrays, **options_of(name, sizes, np.asarray), implementation="dense") for name, _ in more]
    wanted[-2], wanted[-4] = (attention(*arrays, **each, implementation="dense") for each in ({"scale": 1.0}, CAUSAL))
    for (name, options), want in zip(2 * more, 2 * wanted, strict=True):
        found = attention(*put(arrays), **options_of(name, sizes, put), **options)
        np.testing.assert_allclose(get(found), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", [{}, CAUSAL, CAUSAL | {"implementation": "dense"}, CAUSAL | BLOCKWISE])
def test_values_are_looked_at_in_every_call(options, square, put, get):
    """NaN and infinities, where they are masked and where they are not, after calls without any."""
    is_causal = "is_causal" in options
    want = get(attention(*put(square), **options))
    for which, bad in ((1, np.nan), (2, np.nan), (2, np.inf), (0, np.nan), (1, 1e30)):
        changed = [array.copy() for array in square]
        changed[which][:, :, -1, 0] = bad
        result = get(attention(*put(changed), **options))
        if is_causal and which:  # only the last query may attend to the last key
            np.testing.assert_allclose(result[:, :, :-1], want[:, :, :-1], rtol=1e-5, atol=1e-6)
        if not np.isfinite(bad):
            assert not np.isfinite(result[:, :, -1]).all()
        np.testing.assert_array_equal(get(attention(*put(square), **options)), want)


def test_dtypes_and_widths_have_plans_of_their_own(arrays, backend, put, get):
    query, key, value = arrays
    for dtype in (*backend.dtypes, *backend.dtypes):
        result = attention(*(backend.from_numpy(array, dtype=dtype) for array in arrays))
        assert dtype_name(result.dtype) == dtype
        bound = {"float16": 3e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
        np.testing.assert_allclose(get(result).astype("float64"), defined(arrays), rtol=bound, atol=bound)
    narrow = [query[..., :2], key[..., :2], value[..., :1]]
    np.testing.assert_allclose(get(attention(*put(narrow))), defined(narrow), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError):
        attention(*put([query, key[:, :, :-1, :], value]))


def test_settings_and_recorders_are_read_in_every_call(square, put, get):
    arrays = put(square)
    want = get(attention(*arrays, is_causal=True))
    with ac.config_context(assume_finite=True):
        np.testing.assert_allclose(get(attention(*arrays, is_causal=True)), want, rtol=1e-6, atol=1e-7)
    with ac.weights.record_attention() as record:
        attention(*arrays, is_causal=True)
    assert len(record) == 1


def test_a_backend_that_is_tuned_anew_is_asked_anew(square, backend, put, get, monkeypatch):
    want = get(attention(*put(square)))
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(dense_below=0, structured_below=0))
    monkeypatch.setattr(backend, "kernels", ())
    computed, taken = ways.blockwise, []
    monkeypatch.setattr(ways, "blockwise", lambda *arguments: taken.append(arguments) or computed(*arguments))
    np.testing.assert_allclose(get(attention(*put(square))), want, rtol=1e-6, atol=1e-7)
    assert taken


@pytest.mark.needs(lambda backend: backend.name in ("numpy", "torch"))
def test_small_calls_are_remembered(square, put, remembered):
    for options in ({}, {"is_causal": True}, {"scale": 0.5}, {"implementation": "dense"}):
        attention(*put(square), **options)
        attention(*put(square), **options)
    assert remembered == [True] * 8
    attention(*put(square), mask=put(np.tril(np.ones((M, M), bool))))
    attention(*put(square), return_logsumexp=True)
    assert remembered[8:] == [False, False]


def test_plans_are_shared_by_threads(square, put, get):
    arrays, found = put(square), []
    want = [get(attention(*arrays, scale=0.1 + index)) for index in range(3)]

    def work(index):
        for _ in range(20):
            found.append((index, get(attention(*arrays, scale=0.1 + index))))

    threads = [threading.Thread(target=work, args=(index % 3,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120
    for index, result in found:
        np.testing.assert_array_equal(result, want[index])


@pytest.mark.needs(lambda backend: backend.name in ("numpy", "torch"))
@pytest.mark.parametrize("options", [{}, CAUSAL, {"implementation": "dense"}, {"mask": [198, 150] * 5}, BLOCKWISE])
def test_no_array_is_kept(options, rng, put):
    """Nor are offsets of a mask."""
    batch, columns = (10, 300) if "mask" in options else (2, 4)
    query, *others = put([rng.standard_normal((batch, 1, rows, 5)) for rows in (4, columns, columns)])
    offsets = put(np.asarray(options.get("mask", [])))
    options = options | ({"mask": ac.Causal(offset=offsets)} if "mask" in options else {})
    arrays = query, *others, offsets, attention(query, *others, **options)
    kept = list(map(weakref.ref, arrays))
    del arrays, query, others, offsets, options
    gc.collect()
    assert [reference() for reference in kept] == [None] * 5
