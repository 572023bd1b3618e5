"""Every way to compute a call gives the numbers of the definition, and its gradients: all options, sizes and ways."""

import functools
import importlib
import itertools
import zlib

import numpy as np
import pytest
from blockwise_helpers import RUNS, TUNING, assert_same, quickly
from call_table import NAMES, Sizes, hide, options_of, shows
from shard_helpers import differentiated, with_arrays
from tracing_helpers import compiled as graph_of_torch

import attention_core as ac
from attention_core._attention import parts
from attention_core.backend import array_namespace
from attention_core.pieces import merge_partials, partial_attention

attention = ac.scaled_dot_product_attention
SIZES = {
    "blocks": Sizes(),
    "few queries": Sizes((3,), 6, 2, 2, 130, 5, 4),
    "one query": Sizes((2, 3), 4, 4, 1, 70, 4, 4),
    "few keys": Sizes((), 2, 1, 13, 4, 3, 3),
    "whole blocks": Sizes((2,), 2, 2, 8, 10, 4, 1),
    "one key": Sizes((1,), 4, 2, 7, 1, 5, 2),
    "many queries": Sizes((2,), 3, 1, 33, 70, 8, 8),
}


def asked(*arrays, **options):
    """Output and logsumexp of one call."""
    return attention(*arrays, **options, return_logsumexp=True)[::2]


def remembered(*arrays, **options):
    """The second of two calls, by what is remembered of the first, and the logsumexp of another."""
    attention(*arrays, **options)
    return attention(*arrays, **options), asked(*arrays, **options)[1]


def by_weights(query, key, value, **options):
    """The product of weights that are returned or, for half of the queries, computed by themselves."""
    output, weights, logsumexp = attention(query, key, value, **options, return_weights=True, return_logsumexp=True)
    if "dropout" in options:
        return output, logsumexp
    xp, half = array_namespace(value), query.shape[-2] // 2
    alone = ac.weights.attention_weights(query, key, **options, queries=slice(half, None))
    weights = xp.concat([weights[..., :half, :], alone], axis=-2)
    return xp.matmul(weights, xp.repeat(value, query.shape[-3] // key.shape[-3], axis=-3)), logsumexp


def in_pieces(query, key, value, bias=None, **options):
    """Pieces of queries and keys, merged in another order; masks and positions are those of the whole."""
    count, half, rows = key.shape[-2], query.shape[-2] // 2, []
    for at in (slice(0, half), slice(half, query.shape[-2])):
        part, found = bias if bias is None or bias.shape[-2:-1] in ((), (1,)) else bias[..., at, :], []
        for start, stop in ((count // 2, count), (0, count // 3), (count // 3, count // 2)):
            more = {} if bias is None else {"bias": part if bias.shape[-1] == 1 else part[..., start:stop]}
            arrays = query[..., at, :], key[..., start:stop, :], value[..., start:stop, :]
            found.append(partial_attention(*arrays, query_start=at.start, key_start=start, **options, **more))
        rows.append(merge_partials(*found))
    xp = array_namespace(query)
    return tuple(xp.concat([each[index] for each in rows], axis=index - 2) for index in (0, 1))


WAYS = {
    "auto": asked,
    "dense": functools.partial(asked, implementation="dense"),
    "in blocks": functools.partial(asked, implementation="blockwise"),
    "assumed finite": functools.partial(asked, assume_finite=True),
    "remembered": remembered,
    "by samples": remembered,
    "by weights": by_weights,
    "in pieces": in_pieces,
    "in pieces and blocks": functools.partial(in_pieces, implementation="blockwise"),
}
VALUES = ["ordinary", "steep", "hidden"]


SHOWING = ("assumed finite", "by weights")  # who does not look, and a product


def row(name, way):
    """A name and a way with values and sizes that depend on these two alone: what is added later changes no other row."""
    number = zlib.crc32(f"{name} {way}".encode())
    values = VALUES[number // len(SIZES) % (len(VALUES) - (way in SHOWING or shows(name)))]
    return name, way, values, list(SIZES)[number % len(SIZES)]


RAGGED = ("lengths", "lengths of uint8", "offsets to the end", "windows of two sides", "cache", "sinks and cache",
          "window and lengths", "one holds the other")  # fmt: skip
ROWS = [row(*each) for each in itertools.product(NAMES, WAYS) if not ("sinks" in each[0] and "pieces" in each[1])]
ROWS = dict.fromkeys([*ROWS, *((name, "by samples", "ordinary", sizes) for name in RAGGED for sizes in SIZES)])


def prepare(way, backend, monkeypatch):
    """Blocks so small that there are several, and calls of their own for samples that are small, too."""
    if "blocks" in way:
        monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)
    if way in ("by samples", "in pieces"):
        monkeypatch.setattr(parts, "MIN_SAVED", 1)
        if backend.name == "torch":
            monkeypatch.setattr("attention_torch.kernels.parts.MIN_ELEMENTS", 1)


def gradients(backend, way, arrays, options, compiled=quickly):
    """Of query, key and value, and of the arrays among options, for output and logsumexp."""
    xp, rng = backend.namespace, np.random.default_rng(5)

    def loss(arrays, extra):
        total = 0.0
        for each in way(*arrays, **with_arrays(options, extra)):
            factor = backend.from_numpy(rng.standard_normal(each.shape))
            total = xp.add(xp.sum(xp.multiply(xp.where(xp.isfinite(each), each, 0.0), factor)), total)
        return total

    of_arrays, of_extra = compiled(backend, backend.value_and_grad(loss))(tuple(arrays), differentiated(options))[1]
    return backend.to_numpy([*of_arrays, *of_extra.values()])


def is_taken(way, sizes, backend):
    """Whether this is a way of its own: samples are cut where no loop is traced; elsewhere each shape is compiled."""
    return not backend.loops.traced or (sizes == "few queries" and way != "by samples")


@pytest.mark.needs.with_args(is_taken)
@pytest.mark.parametrize(("name", "way", "values", "sizes"), ROWS)
def test_every_way_is_the_definition(name, way, values, sizes, backend, rng, monkeypatch):
    prepare(way, backend, monkeypatch)
    sizes = SIZES[sizes]
    query, *others = arrays = sizes.arrays(rng)
    arrays = [query * 40.0, *others] if values == "steep" else arrays
    plain, options = (options_of(name, sizes, put) for put in (np.asarray, backend.from_numpy))
    expected = WAYS["dense"](*arrays, **plain)
    inputs = backend.from_numpy(hide(arrays, plain, sizes) if values == "hidden" else arrays)
    close, run = 1e-11 if values == "steep" else 1e-13, functools.partial(WAYS[way], **options)
    run = quickly(backend, run) if "pieces" in way else run  # one program for all pieces, where each would be one
    with np.errstate(invalid="ignore", over="ignore"):
        assert_same(backend.to_numpy(run(*inputs)), expected, close)
    if way == "remembered" and values != "hidden" and not backend.loops.traced:  # asking for more changes no bit
        with np.errstate(invalid="ignore", over="ignore"):
            asked_twice = backend.to_numpy([attention(*inputs, **options), asked(*inputs, **options)[0]])
        np.testing.assert_array_equal(*asked_twice)
    if not backend.differentiates or way == "dense" or (name == "score_mod of infinities" and "pieces" in way):
        return  # of the last, a piece has no number, and gradients through it are NaN
    wanted = gradients(backend, WAYS["dense"], backend.from_numpy(arrays), options)
    assert all(np.isfinite(each).all() for each in wanted)
    assert_same(gradients(backend, WAYS[way], inputs, options), wanted, 10 * close)


# Where a library has a softmax of one pass, it has the last ones in chunks of queries.
PROGRAMS = {
    "everything of a user": Sizes(),
    "none": Sizes((1,), 1, 1, 1, 1, 4, 1),
    "causal earlier": Sizes(),
    "window": Sizes(rows=3),
    "or": Sizes(columns=6),
}


@pytest.mark.needs(
    "compilation",
    lambda mode_number, backend: len(backend.modes) > mode_number,
    lambda name, mode_number, backend: (
        name in ("everything of a user", "none") or (mode_number == 1 and backend.loops.softmax is not None)
    ),
)
@pytest.mark.parametrize("mode_number", [1, 2])
@pytest.mark.parametrize(("name", "sizes"), PROGRAMS.items())
def test_programs_of_blocks_are_the_definition(name, sizes, mode_number, backend, rng, monkeypatch):
    """In every mode that compiles; results and gradients of the second are single rows, each contiguous in another."""
    prepare("in blocks", backend, monkeypatch)
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(query_chunk=4))
    arrays, options = backend.from_numpy(sizes.arrays(rng)), options_of(name, sizes, backend.from_numpy)

    def compiled(backend, function):
        return backend.compile(function, mode=backend.modes[mode_number])

    way = WAYS["in blocks"]
    if backend.name == "torch":  # whose compiler differentiates what it has compiled
        way, compiled = graph_of_torch(importlib.import_module("torch"), way, "aot_eager"), quickly
    wanted = gradients(backend, WAYS["dense"], arrays, options)
    assert_same(gradients(backend, way, arrays, options, compiled), wanted, 1e-12)
