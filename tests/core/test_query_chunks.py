"""Where a library has a softmax of one pass, a mask that reaches only so far leaves chunks to it, with the same answer."""

import dataclasses
import importlib
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from call_table import Sizes, options_of

import attention_core as ac
from attention_core._attention.blocks import forward as _forward
from attention_core._attention.blocks.plan import make_plan
from attention_core._attention.call import Call
from attention_core.backend import unpack
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
    """The chunks of each call while a graph is made."""
    found, chunks_of = [], _forward.query_chunks
    monkeypatch.setattr(
        backend,
        "tuning",
        backend.tuning._replace(dense_below=0, structured_below=0, min_queries=3, keys=5, query_chunk=CHUNK),
    )

    def recorded(*arguments):
        found.append(chunks_of(*arguments))
        return found[-1]

    monkeypatch.setattr(_forward, "query_chunks", recorded)
    return found


def qkv(rng, rows=11, columns=13):
    return SIZES._replace(rows=rows, columns=columns).arrays(rng)


def run(backend, arrays, mode, mask):
    """Compute a call in blocks in a program."""

    def attend(*arrays):
        return attention(*arrays, mask=mask, implementation="blockwise")

    return backend.compile(attend, mode=mode)(*backend.from_numpy(arrays))


def lent(backend):
    """A library with a softmax, which is put together here."""
    xp = backend.namespace

    def softmax(scores):
        powers = xp.exp(xp.subtract(scores, xp.maximum(xp.max(scores, axis=-1, keepdims=True), -1e300)))
        return xp.divide(powers, xp.sum(powers, axis=-1, keepdims=True))

    lent = object.__new__(type(backend))  # a copy of a backend may be the backend
    loops, tuning = SimpleNamespace(softmax=softmax, traced=True), backend.tuning._replace(query_chunk=CHUNK)
    vars(lent).update(vars(backend) | {"loops": loops, "tuning": tuning})
    return lent


def cut(backend, arrays, mask, starts=(0, 0)):
    """What `attend_query_chunks` takes: parts of a call."""
    call = unpack(*make_plan(Call(*arrays, backend.namespace, backend, mask=mask, starts=starts)), backend)
    return _forward.query_chunks(call)


@pytest.mark.needs(lambda backend: backend.name not in ("torch", "jax"))  # which have no use for chunks
@pytest.mark.parametrize(("name", "starts"), list(zip(NAMES, itertools.cycle([(0, 0), (20, 17)]), strict=False)))
def test_chunks_on_any_library(name, starts, backend, rng):
    options = dict(zip(("query_start", "key_start"), starts, strict=True)) | {"mask": mask_of(name)}
    arrays = backend.from_numpy(qkv(rng))
    chunks = cut(lent(backend), arrays, mask_of(name), starts)
    assert len(chunks) == 3
    with np.errstate(invalid="ignore"):  # of scores that are all masked
        output, logsumexp, _ = backend.to_numpy(_forward.attend_query_chunks(chunks))
    expected, normalizer, _ = backend.to_numpy(
        tuple(ac.pieces.partial_attention(*arrays, **options, implementation="dense"))
    )
    np.testing.assert_allclose(output.reshape(expected.shape), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(logsumexp.reshape(normalizer.shape), normalizer, rtol=0, atol=1e-13)


@dataclasses.dataclass(frozen=True, eq=False)
class EvenQueries(ac.Causal):
    """A rule that looks at more than the distance."""

    def allowed(self, at, /, *, xp):
        return xp.logical_and(super().allowed(at, xp=xp), xp.equal(xp.remainder(at.query, 2), 0))


@pytest.mark.parametrize("mask", [And(ac.Causal(), ac.KeyLengths(7)), EvenQueries(), Not(ac.Causal())])
def test_a_rule_that_looks_at_more_than_the_distance_leaves_no_chunks(mask, backend, rng):
    assert cut(lent(backend), backend.from_numpy(qkv(rng)), mask) == []


def test_a_query_chunk_has_only_the_keys_within_reach(backend, rng):
    chunks = cut(lent(backend), backend.from_numpy(qkv(rng)), ac.SlidingWindow(left=2, right=1))
    sizes = [(*part.starts, part.query.shape[-2], part.key.shape[-2]) for part in chunks]
    assert sizes == [(0, 0, 4, 5), (4, 2, 4, 7), (8, 6, 3, 6)]


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
    assert all(chunks)


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
    assert not any(chunks)


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


@pytest.mark.needs("fused softmax")
def test_chunks_are_no_more_and_hold_no_more_than_is_good(backend, chunks, rng, monkeypatch):
    def attend(rows):
        chunks.clear()
        importlib.import_module("attention_tensorflow.programs")._program.cache_clear()
        run(backend, qkv(rng, rows=rows, columns=rows), "graph", ac.Causal())
        return len(chunks[0])

    assert attend(40) == 10
    monkeypatch.setattr(_forward, "MAX_CHUNKS", 3)
    assert attend(40) == 3
    monkeypatch.setattr(_forward, "MAX_SCORE_BYTES", 8 * 2 * 4 * (14 * 14 + 14 * 28 + 12 * 40))
    assert attend(40) == 3
    assert attend(41) == 0
