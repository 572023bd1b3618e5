"""Attention over blocks is attention: the same numbers and gradients, without all scores at once."""

import math

import numpy as np
import pytest
from blockwise_helpers import (
    KEY_IDS,
    LENGTHS,
    OFFSETS,
    QUERY_IDS,
    RUNS,
    TUNING,
    B,
    D,
    E,
    H,
    M,
    N,
    assert_equal,
    attention,
    qkv,
    quickly,
    weighted,
)

import attention_core as ac
from attention_core._attention.blocks import plan as _plan
from attention_core.backend import array_namespace
from attention_core.masks import And, Not, Or
from attention_core.scores import ScoreMod, alibi


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    """Blocks so small that there are several."""
    monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)


MASKS = {
    "full": (dict, ()),
    "causal": (lambda: {"is_causal": True}, ()),
    "causal later": (lambda: {"mask": ac.Causal(offset=2)}, ()),
    "causal earlier": (lambda: {"mask": ac.Causal(offset=-5)}, ()),
    "causal offsets": (lambda offset: {"mask": ac.Causal(offset=offset)}, (OFFSETS,)),
    "window": (lambda: {"mask": ac.SlidingWindow(left=2, right=1)}, ()),
    "window one-sided": (lambda offset: {"mask": ac.SlidingWindow(left=3, offset=offset)}, (OFFSETS,)),
    "lengths": (lambda lengths: {"mask": ac.KeyLengths(lengths)}, (LENGTHS,)),
    "segments": (lambda *ids: {"mask": ac.Segments(*ids)}, (QUERY_IDS[:, :M], KEY_IDS)),
    "segments shared": (lambda *ids: {"mask": ac.Segments(*ids)}, (QUERY_IDS[0, :M], KEY_IDS[1])),
    "function": (lambda: {"mask": ac.MaskFunction(lambda b, h, q, k: (q + 2 * k + h + b) % 3 > 0)}, ()),
    "function of an array": (
        lambda ends: {"mask": ac.MaskFunction(lambda b, h, q, k, ends: (q + k) % 3 < ends[2, 1], (ends,))},
        (np.asarray([[0, 0], [0, 0], [0, 2]]),),  # as many rows as there are samples
    ),
    "and": (lambda lengths: {"mask": And(ac.KeyLengths(lengths), ac.Causal(offset=1))}, (LENGTHS,)),
    "or": (lambda lengths: {"mask": Or(ac.Causal(offset=-3), ac.KeyLengths(lengths)), "is_causal": True}, (LENGTHS,)),
    "not": (lambda offset: {"mask": Not(ac.SlidingWindow(left=4, right=4, offset=offset))}, (OFFSETS,)),
    "lengths and function": (
        lambda lengths: {"mask": And(ac.KeyLengths(lengths), ac.MaskFunction(lambda b, h, q, k: k != q))},
        (LENGTHS,),
    ),
    "lengths and bias": (
        lambda lengths, bias: {"mask": ac.KeyLengths(lengths), "bias": bias},
        (LENGTHS, np.random.default_rng(3).standard_normal((H, 1, N))),
    ),
}


@pytest.mark.needs(
    lambda name, backend: not backend.loops.traced or name in ("causal offsets", "segments", "lengths and bias")
)
@pytest.mark.parametrize("name", MASKS)
def test_blocks_give_what_all_scores_at_once_give(name, backend, rng):
    options, arrays = MASKS[name]
    assert_equal(backend, options, [*qkv(rng), *arrays])


@pytest.mark.needs(lambda name, backend: not backend.loops.traced or name in ("causal offsets",))
@pytest.mark.parametrize("name", MASKS)
def test_so_they_do_where_exponentials_need_a_maximum(name, backend, rng):
    options, arrays = MASKS[name]
    query, *others = qkv(rng)
    assert_equal(backend, options, [query * 40.0, *others, *arrays], close=1e-11)


SHAPES = [(), (N,), (1,), (M, 1), (M, N), (1, 1, N), (H, 1, 1), (H, M, 1), (B, 1, 1, 1), (B, 1, M, N), (B, H, M, N)]


def of_shape(rng, shape, other):
    """A bias of one shape, with some of it -inf, and a mask of another shape."""
    bias, mask = rng.standard_normal(shape), rng.random(other) < 0.7
    return [np.where(rng.random(shape) < 0.1, -math.inf, bias) if len(shape) > 1 else bias, np.asarray(mask)]


@pytest.mark.needs(lambda number, backend: not backend.loops.traced or number in (7,))
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_biases_and_masks_of_every_shape(number, backend, rng):
    arrays = of_shape(rng, SHAPES[number], SHAPES[-1 - number])
    assert_equal(backend, lambda bias, mask: {"bias": bias, "mask": mask}, [*qkv(rng), *arrays])


def curved(scores, batch, head, query, key, weight, table, places):
    """A score modification of all positions, with arrays of floating point and of integers."""
    xp = array_namespace(scores)
    distance = xp.subtract(xp.add(key, head), xp.add(query, batch))
    steepness = xp.add(xp.astype(distance, scores.dtype), xp.astype(places[0], scores.dtype))
    change = xp.multiply(xp.multiply(steepness, 0.1), xp.astype(weight, scores.dtype))
    return xp.add(xp.multiply(scores, xp.astype(table[1], scores.dtype)), change)


def plain(scores, batch, head, query, key):
    xp = array_namespace(scores)
    return xp.subtract(scores, xp.multiply(xp.multiply(scores, scores), 0.1))


def lowered(scores, batch, head, query, key):
    """A whole block, and more, of minus infinity."""
    xp = array_namespace(scores)
    return xp.where(xp.less(key, 10), -math.inf, scores)


CURVED = np.array(0.7), np.array([0.2, -1.3]), np.array([2, 5])

CHANGES = {
    "softcap": (lambda: {"softcap": 1.5, "scale": 0.9, "is_causal": True}, ()),
    "arrays of softcap and scale": (
        lambda softcap, scale: {"softcap": softcap, "scale": scale, "is_causal": True},
        (np.array(1.25), np.array(0.8)),
    ),
    "score_mod": (lambda: {"score_mod": plain}, ()),
    "minus infinity": (lambda: {"score_mod": lowered}, ()),
    "score_mod with arrays": (
        lambda *arrays: {"score_mod": ScoreMod(curved, arrays), "softcap": 2.0, "mask": ac.SlidingWindow(left=4)},
        CURVED,
    ),
    "alibi": (lambda offset: {"score_mod": alibi(H, offset=offset)}, (OFFSETS,)),
    "dropout": (lambda: {"dropout": ac.Dropout(0.3, 2**40 + 5), "mask": ac.Causal(offset=1)}, ()),
    "dropout with a seed of words": (lambda seed: {"dropout": ac.Dropout(0.4, seed)}, (np.array([5, 7]),)),
    "sinks": (lambda sinks: {"sinks": sinks, "mask": ac.Causal(offset=-3)}, (np.array([0.3, -2.0, 1.0, 0.0]),)),
    "everything": (
        lambda bias, mask, lengths, softcap, *arrays: {
            "bias": bias,
            "mask": And(ac.KeyLengths(lengths), ac.masks.Given(mask)),
            "is_causal": True,
            "softcap": softcap,
            "score_mod": ScoreMod(curved, arrays),
            "dropout": ac.Dropout(0.2, 3),
        },
        (
            np.random.default_rng(3).standard_normal((H, 1, N)),
            np.random.default_rng(4).random((B, 1, M, N)) < 0.8,
            LENGTHS,
            np.array(3.0),
            *CURVED,
        ),
    ),
}


def plan_of(backend, monkeypatch, query, key, value, **options):
    """What is known of a call once its arrays are looked at."""
    seen, looked_at = [], _plan.with_value_facts
    monkeypatch.setattr(_plan, "with_value_facts", lambda *arguments: seen.append(looked_at(*arguments)) or seen[-1])
    with np.errstate(invalid="ignore"):
        attention(*backend.from_numpy([query, key, value]), implementation="blockwise", **options)
    return seen[0]


@pytest.mark.parametrize(
    ("argument", "number", "small_scores"),
    [
        ("query", 31.9, True),
        ("query", 32.1, False),
        ("query", 1e200, False),
        ("query", math.nan, False),
        ("query", math.inf, False),
        ("key", math.inf, False),
        ("key", math.nan, False),
        ("query", 1e-30, True),
        ("key", 1e14, True),
        ("key", 1e16, False),
        ("value", 0.0, True),
        ("value", -2e-15, True),
        ("value", 9e-16, False),
        ("value", -2e15, False),
        ("value", 9e14, True),
        ("value", math.nan, False),
    ],
)
def test_scores_are_small_by_the_norms_of_a_head_and_all_values(argument, number, small_scores, backend, monkeypatch):
    query, key, value = np.zeros((1, 2, M, D)), np.zeros((1, 2, N, D)), np.ones((1, 2, N, E))
    query[0, 0, 3, 1], query[0, 1, 3, 1] = 1.0, 1e-3
    key[0, 0, 5, 2], key[0, 1, 5, 2] = 1.0, 1e3  # products with queries of another head do not count
    if argument == "key":
        query[0, 0] = 0.0  # not even times 0 may a key be infinite, nor so large
        query[0, 0, 3, 1] = 1e-13 if number == 1e14 else 0.0
    if argument == "value":
        value[0, 1, 2, 4] = number
    else:
        {"query": query, "key": key}[argument][
            0, 0, 3 if argument == "query" else 5, 1 if argument == "query" else 2
        ] = number
    plan = plan_of(backend, monkeypatch, query, key, value, scale=1.0)
    assert plan.exp_without_max == (small_scores and not backend.loops.traced)


def test_a_row_of_small_values_with_large_ones_loses_nothing(backend):
    value = np.ones((1, 1, N, E))
    value[0, 0, 0] = 1.234567e-28
    arrays = backend.from_numpy([np.full((1, 1, M, 1), 5.5), np.full((1, 1, N, 1), -5.5), value], dtype="float32")
    found = backend.to_numpy(attention(*arrays, scale=1.0, is_causal=True, implementation="blockwise"))
    np.testing.assert_allclose(found[0, 0, 0], value[0, 0, 0], rtol=2e-7)


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"score_mod": plain}, {"bias": None}])
def test_changed_scores_are_not_small(options, backend, rng, monkeypatch):
    arrays = qkv(rng)
    if "bias" in options:
        options = {"bias": backend.from_numpy(np.ones((M, N)))}
    assert not plan_of(backend, monkeypatch, *arrays, **options).exp_without_max


@pytest.mark.parametrize("size", [1e-14, 1e14])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_small_scores_at_their_limit_lose_nothing(sign, size, backend, rng):
    """All scores of a query are near -32, or 32, and all values are small, or large."""
    query = sign * (31.0 + 0.9 * rng.random((1, 2, M, 1))) * np.ones(D) / D**0.5
    key = np.ones((1, 2, N, D)) / D**0.5 * (1 - 1e-3 * rng.random((1, 2, N, 1)))
    value = rng.standard_normal((1, 2, N, E)) * size
    found, exact = (
        backend.to_numpy(
            attention(*backend.from_numpy([query, key, value], dtype=dtype), scale=1.0, implementation=name)
        )
        for dtype, name in (("float32", "blockwise"), ("float64", "dense"))
    )
    np.testing.assert_allclose(found / size, exact / size, rtol=0, atol=2e-5)


@pytest.mark.needs(lambda name, backend: not backend.loops.traced or name in ("everything",))
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_scores_and_their_gradients(name, backend, rng):
    options, arrays = CHANGES[name]
    assert_equal(backend, options, [*qkv(rng), *arrays])


@pytest.mark.needs(lambda leading, backend: not backend.loops.traced or leading in ((2, 3),))
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_any_number_of_leading_axes(leading, backend, rng):
    shared = leading[1:]
    arrays = [*qkv(rng, leading), rng.integers(0, N, shared), rng.integers(-2, 5, leading), rng.standard_normal((N,))]
    assert_equal(
        backend,
        lambda lengths, offset, bias: {
            "mask": And(ac.KeyLengths(lengths), ac.Causal(offset=offset)),
            "bias": bias,
            "dropout": ac.Dropout(0.1, 2),
            "score_mod": alibi(H, offset=offset),
        },
        arrays,
    )


@pytest.mark.needs(lambda rows, columns, backend: not backend.loops.traced or (rows, columns) in ((5, 6),))
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 7), (7, 1), (4, 5), (5, 6), (8, 10), (3, 4), (13, 17)])
def test_any_lengths(rows, columns, backend, rng):
    """One, a prime, exactly one block, one more than a block, several blocks, and less than one."""
    arrays = [*qkv(rng, (2,), rows=rows, columns=columns), rng.standard_normal((H, rows, columns))]
    assert_equal(backend, lambda bias: {"bias": bias, "mask": ac.SlidingWindow(left=6, right=2)}, arrays)


@pytest.mark.needs("gradients")
def test_gradients_of_arrays_of_16_bits_are_added_up_in_float32(backend, rng):
    """Many blocks add to the gradient of one number, which rounding each time would spoil."""
    xp, put = backend.namespace, backend.from_numpy
    query, key, value = put([np.abs(x) for x in qkv(rng, (1,), 1, 1, 32, 45)], dtype="float32")
    weight = put(np.ones((1,)), dtype="bfloat16")

    def gradient(implementation):
        def measure(weight):
            mod = ScoreMod(weighted, (weight,))
            options = {"score_mod": mod, "return_logsumexp": True, "implementation": implementation}
            return xp.sum(attention(query, key, value, **options).logsumexp)

        return backend.to_numpy(quickly(backend, backend.value_and_grad(measure))(weight)[1][0]).astype(np.float64)

    dense = gradient("dense")
    np.testing.assert_allclose(gradient("blockwise"), dense, rtol=2.0**-7)


@pytest.mark.parametrize(
    ("implementation", "mode"), [("auto", "eager"), ("blockwise", "eager"), ("blockwise", "compiled")]
)
@pytest.mark.needs("gradients")
def test_the_logsumexp_of_a_large_bias_does_not_lose_the_sum(implementation, mode, backend, rng):
    """Scores that a bias makes equal have equal weights, also when those are computed once more for the gradients."""
    xp, put, shape = backend.namespace, backend.from_numpy, (1, 1, 32, 4)
    rows, count = 8, shape[-2]
    key, value, d_output = (rng.standard_normal(shape).astype("float32") for _ in range(3))

    def call(query, key, value, bias):
        return attention(query, key, value, bias=bias, implementation=implementation)

    call = call if mode == "eager" else backend.compile(call)

    def measure(query, value, bias):
        return xp.sum(xp.multiply(call(query, put(key), value, bias), put(d_output)))

    d_weights = d_output @ np.swapaxes(value, -2, -1)
    d_scores = (d_weights - d_weights.mean(axis=-1, keepdims=True)) / count
    for size in (-1e4, -1e9, -3e38, 1e9):
        bias = np.where(np.indices((count, count))[0] < rows, np.float32(size), np.float32(0.0))
        gradients = backend.value_and_grad(measure)(put(np.zeros(shape, "float32")), put(value), put(bias))[1]
        d_query, d_value = map(backend.to_numpy, gradients[:2])
        np.testing.assert_allclose(d_query, d_scores @ key / math.sqrt(shape[-1]), rtol=1e-4, atol=1e-6)
        d_values = np.broadcast_to(d_output.mean(-2, keepdims=True), shape)
        np.testing.assert_allclose(d_value, d_values, rtol=1e-4, atol=1e-6)
