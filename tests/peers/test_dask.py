"""Attention on chunked arrays of dask: lazy, equal to attention on arrays in memory, without tasks for what is masked."""

import importlib

import numpy as np
import pytest

from attention_core import (
    Causal,
    Dropout,
    KeyLengths,
    MaskFunction,
    Segments,
    SlidingWindow,
    scaled_dot_product_attention,
)
from attention_core.scores import ScoreMod, alibi

pytestmark = pytest.mark.needs("dask", "numpy")
RNG = np.random.default_rng(0)
ARRAYS = [RNG.normal(size=shape) for shape in ((2, 4, 13, 8), (2, 2, 17, 8), (2, 2, 17, 5))]
IDS = np.repeat([[0, 1, 2]], [5, 4, 4], axis=1), np.repeat([[0, 1, 2]], [5, 6, 6], axis=1)
CHUNKS = {  # of the query, and of key and value
    "cut": ((1, 2, 4, 3), (2, 1, 5)),
    "heads that hold no whole groups": ((2, 3, 6, 8), (1, 2, 3)),
    "one": ((2, 4, 13, 8), (2, 2, 17)),
}
OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "lengths": {"mask": KeyLengths(np.array([17, 0])), "is_causal": True},
    "window": {"mask": SlidingWindow(left=2, right=1)},
    "documents": {"mask": Segments(*IDS)},
    "not": {"mask": ~Causal()},
    "array": {"mask": RNG.random((2, 1, 13, 17)) > 0.5},
    "array of heads": {"mask": RNG.random((4, 1, 17)) > 0.5},
    "array of pairs": {"mask": RNG.random((13, 17)) > 0.5},
    "function": {"mask": MaskFunction(lambda batch, head, query, key: (batch + head + query + key) % 3 != 0)},
    "bias": {"bias": RNG.normal(size=(4, 13, 17))},
    "bias of samples": {"bias": RNG.normal(size=(2, 1, 1, 17)), "scale": 0.3},
    "sinks": {"sinks": RNG.normal(size=4), "mask": KeyLengths(np.array([3, 0]))},
    "softcap": {"softcap": 2.0},
    "alibi": {"score_mod": alibi(4)},
    "dropout": {"dropout": Dropout(0.3, 7)},
    "dense": {"implementation": "dense", "is_causal": True},
    "blocks": {"implementation": "blockwise", "mask": ~Causal()},
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


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", OPTIONS)
def test_chunks_give_what_arrays_in_memory_do(name, chunks, attention):
    want = scaled_dot_product_attention(*ARRAYS, return_logsumexp=True, **OPTIONS[name])
    found = attention(*lazy(ARRAYS, chunks), return_logsumexp=True, split_every=2, **OPTIONS[name])
    np.testing.assert_allclose(found.output.compute(), want.output, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found.logsumexp.compute(), want.logsumexp, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"sinks", "alibi"}))
def test_chunks_have_the_bits_of_the_whole(name, attention):
    arrays = [x.astype(np.float32) for x in ARRAYS]
    options = {**OPTIONS[name], "arithmetic": "reproducible"}
    options |= {"bias": options["bias"].astype(np.float32)} if "bias" in options else {}
    found = attention(*lazy(arrays), **options).compute()
    assert found.tobytes() == scaled_dot_product_attention(*arrays, **options).tobytes()


HELD = {  # options that hold arrays, made of these
    "array": (lambda ids: {"mask": ids}, RNG.random((13, 17)) > 0.5),
    "lengths": (lambda ids: {"mask": ~KeyLengths(ids)}, np.array([3, 9])),
    "offset": (lambda ids: {"mask": Causal(offset=ids) | KeyLengths(4)}, np.array([3, -2])),
    "window": (lambda ids: {"mask": SlidingWindow(left=2, right=1, offset=ids)}, np.array([3, -2])),
    "documents": (
        lambda ids: {"mask": Segments(ids[:, :13], ids) & Causal(offset=9)},
        np.sort(RNG.integers(0, 4, (1, 17))),
    ),
    "function": (
        lambda ids: {"mask": MaskFunction(lambda b, h, query, key, ids: (ids[query] > key) | (key == 1), (ids,))},
        np.arange(13),
    ),
    "bias": (lambda ids: {"bias": ids}, RNG.normal(size=(4, 13, 17))),
    "sinks": (lambda ids: {"sinks": ids}, RNG.normal(size=4)),
    "scale": (lambda ids: {"scale": ids}, np.asarray(0.7)),
    "score_mod": (
        lambda ids: {"score_mod": ScoreMod(lambda scores, b, h, query, key, ids: scores * ids[key], (ids,))},
        RNG.normal(size=17),
    ),
    "seed": (lambda ids: {"dropout": Dropout(0.5, ids)}, np.array([3, 4], np.int32)),
}


@pytest.mark.parametrize("name", HELD)
def test_what_is_written_after_the_call_changes_nothing(name, attention):
    make, held = HELD[name]
    held = held.copy()
    want, found = scaled_dot_product_attention(*ARRAYS, **make(held)), attention(*lazy(ARRAYS), **make(held))
    held[...] = 0
    np.testing.assert_allclose(found.compute(), want, rtol=0, atol=1e-13)


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


@pytest.mark.parametrize("name", ["nothing", "causal", "dropout"])
def test_no_heads_and_no_samples_have_the_empty_output(name, attention):
    """Of no heads, chunks hold no groups, and key heads of no query heads are told as of arrays in memory."""
    for arrays in ([x[:, :0] for x in ARRAYS], [x[:0] for x in ARRAYS]):
        found, library = scaled_dot_product_attention(*arrays, **OPTIONS[name]), importlib.import_module("dask.array")
        assert attention(*map(library.from_array, arrays), **OPTIONS[name]).compute().shape == found.shape
    with pytest.raises(ValueError, match=r"expected key \(2, 0, N, 8\)"):
        attention(*lazy([ARRAYS[0][:, :0], *ARRAYS[1:]]), **OPTIONS[name])


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
    for arrays, options, message in (
        ((query, key, ARRAYS[2]), {}, "expected value as an array of dask; got ndarray"),
        ((query, key, value[..., :3, :]), {}, "expected value"),
        (
            (query, key, value[:, :, value[0, 0, :, 0] > 0]),
            {},
            "expected value in chunks of known sizes; got unknown ones",
        ),
        ((query, key, value), {"mask": np.ones((3, 3), bool)}, "expected mask to broadcast to"),
        ((query, key, value), {"mask": query > 0}, "expected mask as a rule or an array of NumPy"),
        ((query, key, value), {"bias": np.ones((4, 13, 16))}, "expected bias to broadcast to"),
        ((query, key, value), {"return_weights": True}, "expected no return_weights with arrays of dask"),
        ((query, key, value), {"implementation": "fused"}, "expected an implementation out of auto, dense, blockwise"),
        ((query, key, value), {"split_every": 1}, "expected split_every >= 2; got 1"),
        ((query, key, value), {"is_causal": 1}, "expected is_causal as True or False; got int"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            attention(*arrays, **options)
