"""Attention on chunked arrays of dask: lazy, equal to attention on arrays in memory, without tasks for what is masked."""

import importlib
import itertools

import numpy as np
import pytest
from call_table import NAMES, Sizes, options_of

from attention_core import Causal, Dropout, KeyLengths, SlidingWindow, scaled_dot_product_attention

pytestmark = pytest.mark.needs("dask", "numpy")
SIZES = Sizes((2,), 4, 2, 13, 17, 8, 5)
ARRAYS = SIZES.arrays(np.random.default_rng(0))
FAST = ("sinks", "score_mod", "alibi", "relative bias", "everything", "number")  # which have no reproducible arithmetic
CHUNKS = {  # of the query, and of key and value
    "cut": ((1, 2, 4, 3), (2, 1, 5)),
    "heads that hold no whole groups": ((2, 3, 6, 8), (1, 2, 3)),
    "one": ((2, 4, 13, 8), (2, 2, 17)),
}


def lazy(arrays, chunks="cut"):
    """The arrays in chunks."""
    library, (of_query, of_keys) = importlib.import_module("dask.array"), CHUNKS[chunks]
    query, *rest = arrays
    return [library.from_array(query, of_query), *(library.from_array(x, (*of_keys, 5)) for x in rest)]


def tasks(array, word):
    return sum(word in str(key) for key in array.__dask_graph__())


@pytest.fixture
def attention():
    return importlib.import_module("attention_dask").attention


def made(name, dtype, sizes=SIZES):
    """Options of a name, and the arrays that they hold."""
    held = []

    def put(x):
        held.append(np.array(x, dtype if np.asarray(x).dtype == np.float64 else None))
        return held[-1]

    return options_of(name, sizes, put), held


@pytest.mark.parametrize(
    ("name", "chunks", "implementation"),
    list(zip(NAMES, itertools.cycle(CHUNKS), itertools.cycle(("dense", "blockwise")), strict=False)),
)
def test_chunks_give_what_arrays_in_memory_do(name, chunks, implementation, attention):
    """Whatever is written to the arrays of options after the call."""
    options, held = made(name, np.float64)
    options |= {"implementation": implementation, "assume_finite": implementation == "blockwise"}
    want = scaled_dot_product_attention(*ARRAYS, return_logsumexp=True, **options)
    found = attention(*lazy(ARRAYS, chunks), return_logsumexp=True, split_every=2, **options)
    for x in held:
        x[...] = 0
    np.testing.assert_allclose(found.output.compute(), want.output, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found.logsumexp.compute(), want.logsumexp, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in NAMES if not any(each in name for each in FAST)])
def test_chunks_have_the_bits_of_the_whole(name, attention):
    arrays, options = [x.astype(np.float32) for x in ARRAYS], made(name, np.float32)[0] | {"arithmetic": "reproducible"}
    found = attention(*lazy(arrays), **options).compute()
    assert found.tobytes() == scaled_dot_product_attention(*arrays, **options).tobytes()


def test_all_tasks_see_one_draw_of_a_generator(attention):
    found = attention(*lazy(ARRAYS), dropout=Dropout(0.5, np.random.default_rng(3)))
    want = scaled_dot_product_attention(*ARRAYS, dropout=Dropout(0.5, np.random.default_rng(3)))
    for _ in range(2):
        np.testing.assert_allclose(found.compute(), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_output_has_the_dtype_of_the_query_and_is_rounded_once(dtype, attention):
    arrays = [x.astype(dtype) for x in ARRAYS]
    found, want = attention(*lazy(arrays)), scaled_dot_product_attention(*(x.astype(np.float64) for x in arrays))
    assert found.dtype == found.compute().dtype == dtype
    np.testing.assert_allclose(found.compute(), want, rtol=0, atol=8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["none", "causal", "dropout", "segments"])
def test_an_empty_axis_gives_what_it_does_in_memory(name, attention):
    """Of no heads, chunks hold no groups, and key heads of no query heads are told as of arrays in memory."""
    for empty in ({"heads": 0, "groups": 0}, {"leading": (0,)}, {"rows": 0}, {"columns": 0}):
        sizes, library = SIZES._replace(**empty), importlib.import_module("dask.array")
        arrays, (options, _) = sizes.arrays(np.random.default_rng(0)), made(name, np.float64, sizes)
        found = attention(*map(library.from_array, arrays), **options).compute()
        np.testing.assert_array_equal(found, scaled_dot_product_attention(*arrays, **options))
    with pytest.raises(ValueError):
        attention(*lazy([ARRAYS[0][:, :0], *ARRAYS[1:]]), **options)


def test_nothing_is_computed_before_it_is_asked_for_and_what_is_masked_has_no_task(attention):
    library = importlib.import_module("dask.array")

    def refused(block):
        raise AssertionError("nobody asked for it")

    x = library.ones((1, 1, 64, 4), chunks=(1, 1, 8, 4)).map_blocks(refused, dtype=float, meta=np.ones((0, 0, 0, 0)))
    for options, pairs in (
        ({}, 64),
        ({"is_causal": True}, 36),
        ({"mask": Causal(offset=1)}, 43),
        ({"mask": SlidingWindow(left=8, right=0)}, 15),
        ({"mask": KeyLengths(np.array([9]))}, 16),
        ({"mask": KeyLengths(0)}, 0),
    ):
        assert tasks(attention(x, x, x, **options), "-piece") == pairs
    merges = attention(x, x, x, split_every=4)
    assert tasks(merges, "-merge") == 8 * (2 + 1)


def test_it_runs_in_processes(attention):
    x = importlib.import_module("dask.array").ones((1, 2, 16, 4), chunks=(1, 2, 8, 4))
    found = attention(x, x, x, is_causal=True).compute(scheduler="processes", num_workers=1)
    np.testing.assert_allclose(found, 1.0, rtol=1e-15)


def test_wrong_arguments_are_told_before_a_task_is_made(attention):
    query, key, value = lazy(ARRAYS)
    for arrays, options in (
        ((query, key, ARRAYS[2]), {}),
        ((query, key, value[..., :3, :]), {}),
        ((query, key, value[:, :, value[0, 0, :, 0] > 0]), {}),
        ((query, key, value), {"mask": np.ones((3, 3), bool)}),
        ((query, key, value), {"mask": query > 0}),
        ((query, key, value), {"bias": np.ones((4, 13, 16))}),
        ((query, key, value), {"return_weights": True}),
        ((query, key, value), {"implementation": "fused"}),
        ((query, key, value), {"split_every": 1}),
        ((query, key, value), {"is_causal": 1}),
    ):
        with pytest.raises((TypeError, ValueError)):
            attention(*arrays, **options)
