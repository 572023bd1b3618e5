"""Where a library has a softmax of one pass, a mask that reaches only so far leaves chunks to it, with the same answer."""

import dataclasses
import functools
import importlib
import itertools
import math

import numpy as np
import pytest
from call_table import Sizes, options_of

import attention_core as ac
from attention_core.masks import And, Not

attention = ac.scaled_dot_product_attention
CHUNK = 4  # which divides no length below
SIZES = Sizes((2,), 4, 2, 11, 13, 5, 6)
NAMES = ("causal later", "causal earlier", "causal of nothing", "causal of all", "window", "window far ahead",
         "window to the right", "and", "or")  # fmt: skip


def mask_of(name):
    return options_of(name, SIZES, np.asarray)["mask"]


@pytest.fixture
def chunks(backend, monkeypatch):
    """How many queries and keys each softmax of one pass is of: that of the library, or one that is put together here."""
    xp, found, loops = backend.namespace, [], type(backend.loops)
    small = {"dense_below": 0, "structured_below": 0, "min_queries": 3, "keys": 5, "query_chunk": CHUNK}
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(**small))

    def composed(scores):
        powers = xp.exp(xp.subtract(scores, xp.maximum(xp.max(scores, axis=-1, keepdims=True), -1e300)))
        return xp.divide(powers, xp.sum(powers, axis=-1, keepdims=True))

    softmax = backend.loops.softmax or composed
    monkeypatch.setattr(loops, "softmax", lambda _, scores: found.append(tuple(scores.shape[-2:])) or softmax(scores))
    return found


def qkv(rng, rows=11, columns=13):
    return SIZES._replace(rows=rows, columns=columns).arrays(rng)


def in_blocks(*arrays, **options):
    return ac.pieces.partial_attention(*arrays, **options, implementation="blockwise")


@pytest.mark.needs(lambda backend: backend.name not in ("torch", "jax"))  # which have no use for chunks
@pytest.mark.parametrize(("name", "starts"), list(zip(NAMES, itertools.cycle([(0, 0), (20, 17)]), strict=False)))
def test_chunks_on_any_library(name, starts, backend, chunks, rng):
    options = dict(zip(("query_start", "key_start"), starts, strict=True)) | {"mask": mask_of(name)}
    arrays = backend.from_numpy(qkv(rng))
    mode = backend.modes[min(1, len(backend.modes) - 1)]
    with np.errstate(invalid="ignore"):  # of scores that are all masked
        found = backend.compile(functools.partial(in_blocks, **options), mode=mode)(*arrays)
    assert len(chunks) == 3 or name == "causal of all"  # a mask that may be left out
    expected = ac.pieces.partial_attention(*arrays, **options, implementation="dense")
    for ours, theirs in zip(*map(backend.to_numpy, (tuple(found)[:2], tuple(expected)[:2])), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


@dataclasses.dataclass(frozen=True, eq=False)
class EvenQueries(ac.Causal):
    """A rule that looks at more than the distance."""

    def allowed(self, at, /, *, xp):
        return xp.logical_and(super().allowed(at, xp=xp), xp.equal(xp.remainder(at.query, 2), 0))


@pytest.mark.parametrize(
    "mask", [And(ac.Causal(), ac.KeyLengths(np.asarray([7, 13]))), EvenQueries(), Not(ac.Causal())]
)
def test_a_rule_that_looks_at_more_than_the_distance_leaves_no_chunks(mask, backend, chunks, rng):
    in_blocks(*backend.from_numpy(qkv(rng)), mask=mask)
    assert not chunks


def test_a_query_chunk_has_only_the_keys_within_reach(backend, chunks, rng):
    in_blocks(*backend.from_numpy(qkv(rng)), mask=ac.SlidingWindow(left=2, right=1))
    assert chunks == [(4, 5), (4, 7), (3, 6)]


@pytest.mark.needs("fused softmax")
def test_what_is_masked_leaks_nowhere_and_what_is_attended_shows(backend, chunks, rng):
    drawn = dict(zip(("query", "key", "value"), map(np.abs, qkv(rng)), strict=True))  # no score is -inf

    def attend(*arrays, implementation="blockwise"):
        found = attention(*arrays, is_causal=True, implementation=implementation, return_logsumexp=True)
        return found.output, found.logsumexp

    compiled = backend.compile(attend, mode="graph")
    numbers = {"query": (math.nan, math.inf), "key": (math.nan, math.inf, 1e200), "value": (math.nan, math.inf, 1e308)}
    for argument, number in [(name, number) for name in drawn for number in numbers[name]]:
        arrays = drawn | {argument: drawn[argument].copy()}
        arrays[argument][1, 1, 7, 2] = number
        tensors = backend.from_numpy(tuple(arrays.values()))
        with np.errstate(all="ignore"):
            found, expected = compiled(*tensors), attend(*tensors, implementation="dense")
        for one, other in zip(backend.to_numpy(found), backend.to_numpy(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    assert len(chunks) >= 3


@pytest.mark.needs("fused softmax")
def test_other_calls_take_blocks(backend, chunks, rng):
    """Also with starts that cannot be read."""

    def attend(start, *arrays):
        calls = [
            {"mask": None},
            {"mask": ac.KeyLengths(7)},
            {"is_causal": True, "softcap": 3.0},
            {"is_causal": True, "dropout": ac.Dropout(0.5, 3)},
            {"is_causal": True, "score_mod": lambda scores, *at: scores},
        ]
        found = [attention(*arrays, **options, implementation="blockwise") for options in calls]
        options = {"mask": ac.SlidingWindow(left=3, right=2), "query_start": start, "key_start": 2}
        return *found, ac.pieces.partial_attention(*arrays, **options, implementation="blockwise").output

    start = np.asarray(3, dtype=np.int32)
    backend.compile(attend, mode="graph")(backend.from_numpy(start), *backend.from_numpy(qkv(rng)))
    assert not chunks


@pytest.mark.needs("fused softmax")
@pytest.mark.parametrize("open_axis", [(0, 2), (1, 2)])
def test_what_has_open_lengths_takes_blocks_or_is_right(open_axis, backend, chunks, rng):
    tf = importlib.import_module("tensorflow")
    arrays = backend.from_numpy(qkv(rng))
    shapes = [list(array.shape) for array in arrays]
    shapes[open_axis[0]][open_axis[1]] = None
    signature = [tf.TensorSpec(shape, array.dtype) for shape, array in zip(shapes, arrays, strict=True)]

    def attend(*arrays):
        return attention(*arrays, is_causal=True, implementation="blockwise")

    found = tf.function(attend, input_signature=signature)(*arrays)
    expected = attention(*arrays, is_causal=True, implementation="dense")
    np.testing.assert_allclose(backend.to_numpy(found), backend.to_numpy(expected), rtol=0, atol=1e-13)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize(("length", "count"), [(8, 2), (40, 10), (100, 15), (4000, 16), (8000, 0)])
def test_chunks_are_no_more_and_hold_no_more_than_is_good(length, count, backend, chunks):
    """In a program that does not run: at most 16, and none whose scores take more than 128 MiB."""
    tf = importlib.import_module("tensorflow")
    attend = tf.function(
        functools.partial(in_blocks, mask=ac.Causal()), input_signature=[tf.TensorSpec([1, 1, length, 2])] * 3
    )
    attend.get_concrete_function()
    assert len(chunks) == count
