"""Attention over blocks is attention: the same numbers and gradients, without all scores at once."""

import dataclasses
import importlib
import itertools
import math
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import attention_core as ac
from attention_core import get_backend
from attention_core._arrays import take_rows
from attention_core._attention.blocks import backward as _backward
from attention_core._attention.blocks import forward as _forward
from attention_core._attention.blocks import plan as _plan
from attention_core.backend import Tuning, array_namespace
from attention_core.masks import And, Mask, Not, Or, flatten, unflatten
from attention_core.masks._tree import leaves
from attention_core.scores import ScoreMod, alibi

attention = ac.scaled_dot_product_attention
B, H, G, M, N, D, E = 3, 4, 2, 11, 13, 5, 6
BLOCKS = 4, 5  # which fit into neither length


TUNING = Tuning(queries=1, keys=BLOCKS[1], min_queries=BLOCKS[0], dense_below=0, structured_below=0, backward_keys=5)
RUNS = TUNING._replace(keys=2 * BLOCKS[0] + 1)  # where loops are not traced, two blocks that a mask leaves are joined


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    """Blocks so small that there are several."""
    monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)


def qkv(rng, leading=(B,), heads=H, groups=G, rows=M, columns=N):
    shapes = (*leading, heads, rows, D), (*leading, groups, columns, D), (*leading, groups, columns, E)
    return [rng.standard_normal(shape) for shape in shapes]


def quickly(backend, function):
    """Compiled without optimization where compiling takes longest."""
    if backend.name != "jax":
        return function
    return importlib.import_module("jax").jit(function, compiler_options={"xla_backend_optimization_level": 0})


def derivatives(backend, options, arrays, implementations, dtype=None, compiled=quickly, inner=None):
    """Output, logsumexp, and the gradients of all arrays, of which those after the third make the options.

    The gradients for the numbers by which results are multiplied are the results themselves.
    """
    xp, put = backend.namespace, backend.from_numpy
    rng = np.random.default_rng(61)
    query, _, value = arrays[:3]
    factors = rng.standard_normal((*query.shape[:-1], value.shape[-1])), rng.standard_normal(query.shape[:-1])

    def results(implementation, *arrays):
        qkv_arrays, rest = arrays[:3], arrays[3:]
        return attention(*qkv_arrays, **options(*rest), return_logsumexp=True, implementation=implementation)[::2]

    def measure(implementation, of_output, of_logsumexp, *arrays):
        output, logsumexp = results(implementation, *arrays)
        logsumexp = xp.where(xp.equal(logsumexp, -math.inf), 0.0, logsumexp)
        parts = (
            xp.multiply(xp.astype(x, factor.dtype), factor)
            for x, factor in ((output, of_output), (logsumexp, of_logsumexp))
        )
        return xp.add(*(xp.astype(xp.sum(part), xp.float32) for part in parts))

    measured = measure if inner is None else inner(measure)

    def everything(*arrays):
        if not backend.differentiates:
            return [results(name, *arrays[2:]) for name in implementations]
        return [
            backend.value_and_grad(lambda *arrays, name=name: measured(name, *arrays))(*arrays)[1]
            for name in implementations
        ]

    found = compiled(backend, everything)(*put((*factors, *arrays), dtype=dtype))
    return [[each for each in backend.to_numpy(tuple(results)) if is_floating(each)] for results in found]


def is_floating(x):
    return isinstance(x, np.ndarray) and x.dtype.name in ("float16", "bfloat16", "float32", "float64")


def assert_equal(backend, options, arrays, *, dtype=None, close=1e-13, compiled=quickly):
    """Blocks give the results and gradients of the dense form, but for roundings relative to the largest of each."""
    dense, blocks = derivatives(backend, options, arrays, ("dense", "blockwise"), dtype, compiled)
    assert_same(blocks, dense, close)
    return blocks


def assert_same(actual, desired, close=1e-13):
    assert len(actual) == len(desired)
    for found, expected in zip(actual, desired, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        found, expected = (x.astype(np.float64) for x in (found, expected))
        scale = max(1.0, float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))))
        np.testing.assert_allclose(found, expected, rtol=0, atol=close * scale)


NONFINITE = [math.nan, math.inf, -math.inf]
OFFSETS, LENGTHS = np.array([0, 3, -4]), np.array([13, 0, 6])
QUERY_IDS, KEY_IDS = np.sort(np.random.default_rng(7).integers(0, 4, (2, B, N)))
MASKS = {
    "full": (dict, ()),
    "causal": (lambda: {"is_causal": True}, ()),
    "causal later": (lambda: {"mask": ac.Causal(2)}, ()),
    "causal earlier": (lambda: {"mask": ac.Causal(-5)}, ()),
    "causal offsets": (lambda offset: {"mask": ac.Causal(offset)}, (OFFSETS,)),
    "window": (lambda: {"mask": ac.SlidingWindow(left=2, right=1)}, ()),
    "window one-sided": (lambda offset: {"mask": ac.SlidingWindow(left=3, offset=offset)}, (OFFSETS,)),
    "lengths": (lambda lengths: {"mask": ac.KeyLengths(lengths)}, (LENGTHS,)),
    "segments": (lambda *ids: {"mask": ac.Segments(*ids)}, (QUERY_IDS[:, :M], KEY_IDS)),
    "segments shared": (lambda *ids: {"mask": ac.Segments(*ids)}, (QUERY_IDS[0, :M], KEY_IDS[1])),
    "function": (lambda: {"mask": ac.MaskFunction(lambda b, h, q, k: (q + 2 * k + h + b) % 3 > 0)}, ()),
    "and": (lambda lengths: {"mask": And(ac.KeyLengths(lengths), ac.Causal(1))}, (LENGTHS,)),
    "or": (lambda lengths: {"mask": Or(ac.Causal(-3), ac.KeyLengths(lengths)), "is_causal": True}, (LENGTHS,)),
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


CURVED = np.array(0.7), np.array([0.2, -1.3]), np.array([2, 5])
CHANGES = {
    "softcap": (lambda: {"softcap": 1.5, "scale": 0.9, "is_causal": True}, ()),
    "arrays of softcap and scale": (
        lambda softcap, scale: {"softcap": softcap, "scale": scale, "is_causal": True},
        (np.array(1.25), np.array(0.8)),
    ),
    "score_mod": (lambda: {"score_mod": plain}, ()),
    "score_mod with arrays": (
        lambda *arrays: {"score_mod": ScoreMod(curved, arrays), "softcap": 2.0, "mask": ac.SlidingWindow(left=4)},
        CURVED,
    ),
    "alibi": (lambda offset: {"score_mod": alibi(H, offset=offset)}, (OFFSETS,)),
    "dropout": (lambda: {"dropout": ac.Dropout(0.3, 2**40 + 5), "mask": ac.Causal(1)}, ()),
    "dropout with a seed of words": (lambda seed: {"dropout": ac.Dropout(0.4, seed)}, (np.array([5, 7]),)),
    "sinks": (lambda sinks: {"sinks": sinks, "mask": ac.Causal(-3)}, (np.array([0.3, -2.0, 1.0, 0.0]),)),
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


@pytest.mark.parametrize("implementation", ["blockwise", "auto"])
def test_large_keys_of_small_queries_need_a_maximum(implementation, backend, rng):
    query, key = np.full((1, 1, M, D), 1e-8), 1e10 * rng.random((1, 1, N, D))
    value = rng.standard_normal((1, 1, N, E))
    found, expected = (
        backend.to_numpy(attention(*backend.from_numpy([query, key, value]), scale=1.0, implementation=name))
        for name in (implementation, "dense")
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_queries_of_zero_do_not_let_keys_leak(nonfinite, backend, rng):
    query, key, value = qkv(rng)
    query[1] = 0.0
    key[1, :, 4:] = nonfinite
    mask = ac.KeyLengths(backend.from_numpy(np.array([N, 4, N])))
    found = backend.to_numpy(attention(*backend.from_numpy([query, key, value]), mask=mask, implementation="blockwise"))
    mean = np.repeat(value[1, :, :4].mean(axis=1), H // G, axis=0)
    np.testing.assert_allclose(found[1], np.broadcast_to(mean[:, None], found[1].shape), rtol=0, atol=1e-14)


def test_a_row_of_small_values_with_large_ones_loses_nothing(backend):
    value = np.ones((1, 1, N, E))
    value[0, 0, 0] = 1.234567e-28
    arrays = backend.from_numpy([np.full((1, 1, M, 1), 5.5), np.full((1, 1, N, 1), -5.5), value], dtype="float32")
    found = backend.to_numpy(attention(*arrays, scale=1.0, is_causal=True, implementation="blockwise"))
    np.testing.assert_allclose(found[0, 0, 0], value[0, 0, 0], rtol=2e-7)


@pytest.mark.needs("gradients")
def test_a_masked_value_that_times_a_gradient_overflows_leaks_nowhere(backend, rng):
    xp = backend.namespace
    query, key, value = (np.abs(x) for x in qkv(rng))
    value[:, :, 8:] = 3e38

    def measure(implementation, *arrays):
        output = attention(*arrays, mask=ac.KeyLengths(8), implementation=implementation)
        return xp.sum(xp.multiply(output, 10.0))

    for name in ("dense", "blockwise", "auto"):
        arrays = backend.from_numpy([query, key, value], dtype="float32")
        compute = quickly(backend, backend.value_and_grad(lambda *arrays, name=name: measure(name, *arrays)))
        for gradient in backend.to_numpy(compute(*arrays)[1]):
            assert np.isfinite(gradient).all()


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
            "mask": And(ac.KeyLengths(lengths), ac.Causal(offset)),
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


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (6, 2), (4, 1)])
def test_grouped_heads(heads, groups, backend, rng):
    arrays = [*qkv(rng, heads=heads, groups=groups), rng.standard_normal((heads, M, 1))]
    assert_equal(backend, lambda bias: {"bias": bias, "score_mod": alibi(heads)}, arrays)


@pytest.mark.needs(lambda backend: backend.name != "jax")
def test_float32(backend, rng):
    arrays = [*qkv(rng), rng.standard_normal((H, M, N))]
    assert_equal(backend, lambda bias: {"bias": bias, "mask": ac.Causal(2)}, arrays, dtype="float32", close=2e-6)


@pytest.mark.needs("dtype", lambda dtype, backend: not backend.loops.traced or dtype in ("bfloat16",))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_rounded_once(dtype, backend, rng):
    step = 2.0 ** (-8 if dtype == "bfloat16" else -11)
    arrays = [np.asarray(x, dtype=getattr(ml_dtypes, dtype, None) or dtype) for x in qkv(rng)]
    (blocks,) = derivatives(backend, lambda: {"mask": ac.Causal(2)}, arrays, ("blockwise",), dtype)
    exact = [x.astype(np.float64) for x in arrays]
    expected = attention(*exact, mask=ac.Causal(2), implementation="dense", return_logsumexp=True)
    np.testing.assert_allclose(blocks[0].astype(np.float64), expected.output, rtol=step, atol=1e-6)
    assert blocks[1 if not backend.differentiates else 0].dtype.name == (
        "float32" if not backend.differentiates else dtype
    )


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

        return backend.to_numpy(backend.value_and_grad(measure)(weight)[1][0]).astype(np.float64)

    dense = gradient("dense")
    np.testing.assert_allclose(gradient("blockwise"), dense, rtol=2.0**-7)


def weighted(scores, batch, head, query, key, weight):
    xp = array_namespace(scores)
    return xp.multiply(scores, xp.astype(weight, scores.dtype))


@pytest.mark.needs(
    lambda kind, nonfinite, backend: not backend.loops.traced or (kind, nonfinite) in (("array", math.nan),)
)
@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("kind", ["array", "lengths", "bias"])
def test_what_is_masked_leaks_neither_forward_nor_backward(kind, nonfinite, backend, rng):
    arrays = qkv(rng)
    empty, unseen = 2, N - 1  # a fully masked row, a key that no query attends to
    allowed = np.broadcast_to(np.arange(N) < unseen, (M, N)) & (np.arange(M) != empty)[:, None]
    bias = np.where(allowed, rng.standard_normal((M, N)), 0.0 if kind == "array" else -math.inf)
    if kind == "lengths":
        bias[:, unseen] = 0.0
    options = {
        "array": lambda bias, mask: {"bias": bias, "mask": mask, "softcap": 2.0},
        "lengths": lambda bias, mask: {"bias": bias, "mask": ac.KeyLengths(unseen)},
        "bias": lambda bias, mask: {"bias": bias},
    }[kind]
    spoilt = [x.copy() for x in (*arrays, bias)]
    spoilt[0][:, 1, empty] = spoilt[1][:, :, unseen] = spoilt[2][:, :, unseen] = nonfinite
    if kind == "array":
        spoilt[3][~allowed] = nonfinite
    with np.errstate(invalid="ignore"):
        (clean,) = derivatives(backend, options, [*arrays, bias, allowed], ("blockwise",))
        (found,) = derivatives(backend, options, [*spoilt, allowed], ("blockwise",))
    for each in found:
        assert not np.isnan(each).any()
    assert_same(found, clean)
    if backend.differentiates:
        _, _, of_query, of_key, of_value, of_bias = found
        assert not np.any(of_query[:, :, empty])
        assert not np.any(of_key[:, :, unseen])
        assert not np.any(of_value[:, :, unseen])
        assert not np.any(of_bias[~allowed])


def test_a_scale_that_makes_what_is_masked_overflow(backend):
    """Finite numbers, of which the scale makes infinity minus infinity."""
    key = np.full((1, 1, 3, 2), 1e-30)
    key[0, 0, 2] = 1e10
    query, key, value = backend.from_numpy(
        [np.full((1, 1, 2, 2), [1.0, -1.0]), key, np.ones((1, 1, 3, 2))], dtype="float32"
    )
    mask = backend.from_numpy(np.array([True, True, False]))
    with np.errstate(over="ignore", invalid="ignore"):
        for implementation in ("auto", "dense", "blockwise"):
            found = attention(query, key, value, mask=mask, scale=1e30, implementation=implementation)
            np.testing.assert_array_equal(backend.to_numpy(found), np.ones((1, 1, 2, 2)))


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize("nonfinite", [*NONFINITE, 3e38])
def test_a_bias_that_is_masked_leaks_neither_forward_nor_backward(nonfinite, backend, rng):
    """While queries, keys and values are finite."""
    arrays, bias, allowed = qkv(rng), rng.standard_normal((M, N)), rng.random((M, N)) < 0.6
    spoilt = np.where(allowed, bias, nonfinite)
    clean, found = (
        derivatives(backend, lambda bias, mask: {"bias": bias, "mask": mask}, [*arrays, each, allowed], ("blockwise",))
        for each in (bias, spoilt)
    )
    assert_same(found[0], clean[0])


@pytest.mark.needs(
    lambda masked, argument, nonfinite, backend: (
        not backend.loops.traced or (masked, argument, nonfinite) in ((True, "value", math.inf),)
    ),
    lambda argument, nonfinite: not (argument == "bias" and nonfinite == -math.inf),
)
@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("argument", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("masked", [True, False])
def test_what_is_attended_shows_as_in_the_dense_form(masked, argument, nonfinite, backend, rng):
    arrays = [*qkv(rng), rng.standard_normal((M, N))]
    target = arrays[("query", "key", "value", "bias").index(argument)]
    target[..., 6, 2] = nonfinite

    def options(bias):
        return ({"mask": ac.SlidingWindow(left=3, right=2)} if masked else {}) | (
            {"bias": bias} if masked or argument == "bias" else {}
        )

    with np.errstate(invalid="ignore"):
        dense, blocks = derivatives(backend, options, arrays, ("dense", "blockwise"))
    assert_same(blocks[:2], dense[:2])
    for found, expected in zip(blocks, dense, strict=True):
        seen = np.isfinite(expected)  # blocks that are skipped may keep a nan from more
        np.testing.assert_allclose(found[seen], expected[seen], rtol=0, atol=1e-12)


def test_an_infinite_value_pulls_only_who_attends_it(backend, rng):
    arrays = qkv(rng)
    arrays[2][0, 0, 5, 1], arrays[2][0, 0, 2, 1], arrays[2][0, 0, 2, 3] = math.inf, -math.inf, math.nan
    result = attention(*backend.from_numpy(arrays), is_causal=True, implementation="blockwise")
    output = backend.to_numpy(result)
    np.testing.assert_array_equal(np.isnan(output[0, :2, :, 3]), np.broadcast_to(np.arange(M) >= 2, (2, M)))
    expected = [0.0] * 2 + [-math.inf] * 3 + [math.nan] * 6
    np.testing.assert_array_equal(np.where(np.isfinite(output[0, 0, :, 1]), 0.0, output[0, 0, :, 1]), expected)
    assert np.isfinite(output[0, :, :, 0]).all()
    assert np.isfinite(output[1:]).all()


def test_a_fully_masked_row_gives_exactly_zero(backend, rng):
    (found,) = derivatives(
        backend,
        lambda lengths: {"mask": And(ac.KeyLengths(lengths), ac.Causal(-2))},
        [*qkv(rng), LENGTHS],
        ("blockwise",),
    )
    output, logsumexp, *gradients = found
    assert not np.any(output[1])
    assert not np.any(output[:, :, :2])
    if gradients:
        assert not any(np.any(gradient[1]) for gradient in gradients)
        assert not np.any(gradients[0][:, :, :2])
    else:
        assert (logsumexp[1] == -math.inf).all()
        assert (logsumexp[:, :, :2] == -math.inf).all()
        assert np.isfinite(logsumexp[0, :, 2:]).all()


def raised(scores, *_):
    return array_namespace(scores).add(scores, 1000.0)


@pytest.mark.needs("gradients")
def test_scores_of_any_size_leave_gradients_finite(backend, rng):
    """Rows that only fill up a block have such scores too."""
    assert_equal(backend, lambda: {"score_mod": raised}, qkv(rng), close=1e-10)


def lowered(scores, batch, head, query, key):
    xp = array_namespace(scores)
    return xp.where(xp.less(key, 10), -math.inf, scores)


@pytest.mark.needs("untraced loops")
def test_a_whole_block_of_scores_may_be_minus_infinity(backend, rng):
    assert_equal(backend, lambda: {"score_mod": lowered}, qkv(rng))


@pytest.mark.needs(lambda size, backend: not backend.loops.traced or size in (3e38,))
@pytest.mark.parametrize("size", [3e38, -3e38])
def test_biases_of_any_finite_size_are_no_masks(size, backend, rng):
    bias = np.where(np.arange(N) < 8, np.float32(size), 0.0)
    query, key, value, bias = backend.from_numpy([*qkv(rng), bias], dtype="float32")
    for some_bias in (bias, backend.from_numpy(np.full((N,), size), dtype="float32")):
        with np.errstate(over="ignore"):
            dense, blocks = (
                backend.to_numpy(
                    tuple(attention(query, key, value, bias=some_bias, return_logsumexp=True, implementation=name))
                )
                for name in ("dense", "blockwise")
            )
        np.testing.assert_allclose(blocks[0], dense[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(blocks[2], dense[2], rtol=1e-5)


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize("empty", [(0, H, G, M, N), (B, H, G, 0, N), (B, H, G, M, 0)])
def test_empty_axes(empty, backend, rng):
    entries, heads, groups, rows, columns = empty
    arrays = qkv(rng, (entries,), heads, groups, rows, columns)
    found = assert_equal(backend, lambda: {"mask": ac.Causal(1)}, arrays)
    assert not np.any(found[0])


# What is computed, and what is not


FINE = BLOCKS[0], min(BLOCKS)  # where loops are not traced, going forward


def expected_visits(allowed, blocks=BLOCKS):
    """How many blocks something, and how many everything, is allowed in."""
    sizes = [-(-length // -(-length // block)) for length, block in zip(allowed.shape, blocks, strict=True)]
    blocks = [
        allowed[i : i + sizes[0], j : j + sizes[1]]
        for i, j in itertools.product(
            *(range(0, length, size) for length, size in zip(allowed.shape, sizes, strict=True))
        )
    ]
    return sum(block.any() for block in blocks), sum(block.all() for block in blocks)


I, J = np.arange(M)[:, None], np.arange(N)[None, :]  # noqa: E741
SKIPPED = {
    "causal": (ac.Causal(), (J <= I)[None]),
    "window": (ac.SlidingWindow(left=1, right=0, offset=1), ((J <= I + 1) & (J >= I))[None]),
    "lengths": (lambda put: ac.KeyLengths(put(LENGTHS)), (LENGTHS[:, None, None] > J) & (I >= 0)),
    "segments": (
        lambda put: ac.Segments(put(np.arange(M) // 4), put(np.arange(N) // 5)),
        (I // 4 == J // 5)[None],
    ),
    "lengths and function": (
        lambda put: ac.KeyLengths(put(LENGTHS)) & ac.MaskFunction(lambda b, h, q, k: k >= 0),
        (LENGTHS[:, None, None] > J) & (I >= 0),
    ),
}


@pytest.mark.needs(
    lambda name, backend: not backend.loops.traced or (backend.name == "tensorflow" and name == "lengths and function")
)
@pytest.mark.parametrize("name", SKIPPED)
def test_blocks_in_which_nothing_is_allowed_are_not_computed(name, backend, rng, monkeypatch):
    """And blocks in which everything is allowed need no mask."""
    monkeypatch.setattr(backend, "tuning", TUNING)
    rule, allowed = SKIPPED[name]
    rule = rule if isinstance(rule, Mask) else rule(backend.from_numpy)
    found = []
    visits = _forward.make_visits

    def recorded(grid, **options):
        result = visits(grid, **options)
        found.append([np.sum(np.asarray(each)) for each in (result.seen, result.whole)])
        return result

    monkeypatch.setattr(_forward, "make_visits", recorded)
    attention(*backend.from_numpy(qkv(rng)), mask=rule, implementation="blockwise")
    blocks = BLOCKS if backend.loops.traced else FINE
    seen, whole = np.sum([expected_visits(each, blocks) for each in allowed], axis=0)
    assert seen < math.prod(-(-length // block) for length, block in zip((M, N), blocks, strict=True)) * len(allowed)
    for got in found:
        assert got[0] == seen
        if "function" not in name and not backend.loops.traced:  # of which what is padded needs a mask
            assert got[1] == whole


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize("by_key", [False, pytest.param(True, marks=pytest.mark.needs("gradients"))])
def test_a_block_is_visited_once(by_key, backend, rng, monkeypatch):
    """The scores of as many blocks are computed, forward and backward, as a window lets something through."""
    monkeypatch.setattr(backend, "tuning", TUNING)
    count, score_block = [], _forward.score_block
    for module in (_forward, _backward):
        monkeypatch.setattr(
            module, "score_block", lambda *arguments: count.append(arguments[-1]) or score_block(*arguments)
        )
    rule = ac.SlidingWindow(left=2, right=0)
    arrays = backend.from_numpy(tuple(qkv(rng)))
    xp = backend.namespace

    def measure(*arrays):
        return xp.sum(attention(*arrays, mask=rule, implementation="blockwise"))

    if by_key:
        backend.value_and_grad(measure)(*arrays)
    else:
        measure(*arrays)
    allowed = (J <= I) & (J >= I - 2)
    seen, whole = np.sum([expected_visits(allowed, each) for each in ((FINE, BLOCKS) if by_key else (FINE,))], axis=0)
    assert len(count) == B * seen < B * (12 + 9 * by_key)
    assert count.count(False) == B * whole


@pytest.mark.needs("untraced loops")
def test_neighbours_that_a_mask_leaves_are_computed_at_once(backend, rng, monkeypatch):
    """Of four blocks of keys, a causal mask leaves one, two or three to the blocks of queries."""
    found, score_block = [], _forward.score_block

    def recorded(*arguments):
        result = score_block(*arguments)
        found.append((result.scores.shape[-1], arguments[-1]))
        return result

    monkeypatch.setattr(_forward, "score_block", recorded)
    attention(*backend.from_numpy(qkv(rng)), mask=ac.Causal(), implementation="blockwise")
    assert found == [(4, True), (8, True), (8, False), (4, True)] * B


@pytest.mark.needs("untraced loops")
def test_a_rule_about_distance_is_asked_once_for_each(backend, rng, monkeypatch):
    """Blocks at the same distance from the diagonal, in all batches and heads, share what was found for one."""
    asked, allowed = [], ac.Causal.allowed
    monkeypatch.setattr(ac.Causal, "allowed", lambda mask, at, *, xp: asked.append(at) or allowed(mask, at, xp=xp))
    attention(*backend.from_numpy(qkv(rng)), mask=ac.Causal(), implementation="blockwise")
    assert [at.query.shape[0] for at in asked] == [4, 4, 3]
    attention(
        *backend.from_numpy(qkv(rng)),
        mask=ac.Causal() & ac.MaskFunction(lambda b, h, q, k: q >= b),
        implementation="blockwise",
    )
    assert len(asked) == 3 + B * 4


@dataclasses.dataclass(frozen=True, eq=False)
class LaterInLaterEntries(ac.Causal):
    def allowed(self, at, /, *, xp):
        return xp.logical_and(super().allowed(at, xp=xp), xp.greater_equal(at.key, at.batch))

    def blocks(self, query, key, /, *, xp):
        return super().blocks(query, key, xp=xp)[0], False


@pytest.mark.needs("untraced loops")
def test_a_rule_derived_from_one_about_distance_is_asked_everywhere(backend, rng, get):
    arrays = backend.from_numpy(qkv(rng))
    found, expected = (
        get(attention(*arrays, mask=LaterInLaterEntries(), implementation=each)) for each in ("blockwise", "dense")
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.needs("gradients")
@pytest.mark.needs("untraced loops")
def test_a_function_that_makes_a_number_of_nan_makes_it_backward_too(backend, rng, get):
    xp = backend.namespace
    query, key, value = qkv(rng)
    key[0, 0, 3, 1] = math.inf
    arrays = backend.from_numpy((query, key, value))

    def gradients(implementation):
        def measure(*arrays):
            options = {"mask": ac.Causal(2), "score_mod": lambda scores, *at: xp.where(xp.isnan(scores), 0.0, scores)}
            return xp.sum(xp.square(attention(*arrays, **options, implementation=implementation)))

        return get(backend.value_and_grad(measure)(*arrays)[1])

    for found, expected in zip(gradients("blockwise"), gradients("dense"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.needs("untraced loops")
def test_what_is_kept_of_blocks_does_not_grow(backend, monkeypatch):
    """Neither where blocks of queries and keys differ, nor for a rule that all blocks need."""
    monkeypatch.setattr(backend, "tuning", RUNS._replace(min_queries=64, keys=200))
    kept, make_grid = [], _forward.make_grid
    monkeypatch.setattr(_forward, "make_grid", lambda *arguments: kept.append(make_grid(*arguments)) or kept[-1])
    for mask, keys in ((ac.Causal(), 400), (ac.Causal(), 470), (~ac.Causal() | ac.SlidingWindow(3, 3), 400)):
        x, y = (backend.namespace.zeros((1, 1, length, 2)) for length in (400, keys))
        attention(x, y, y, mask=mask, implementation="blockwise")
    sizes = [0 if grid.cache is None else len(grid.cache) for grid in kept]
    assert 0 < sizes[0] <= 12
    assert sizes[1] == 0
    assert 0 < sizes[2] <= 64


@pytest.mark.needs("gradients", lambda name, backend: backend.name != "tensorflow" or name == "everything")
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_the_program_does_not_grow_with_the_length(name, backend, monkeypatch):
    monkeypatch.setattr(
        backend, "tuning", Tuning(queries=1, keys=128, min_queries=64, dense_below=0, structured_below=0)
    )

    def options(weight):
        mask = ac.Causal() if name == "causal" else And(ac.SlidingWindow(left=100), ac.KeyLengths(77))
        return {"mask": mask} | (
            {"score_mod": ScoreMod(weighted, (weight,)), "softcap": 3.0} if name != "causal" else {}
        )

    xp = backend.namespace

    def measure(query, key, value, weight):
        return xp.sum(attention(query, key, value, **options(weight), implementation="blockwise"))

    sizes = [
        COUNTERS[backend.name](
            backend.value_and_grad(measure), [(1, 2, length, 8), (1, 1, length, 8), (1, 1, length, 4), ()]
        )
        for length in (256, 4096)
    ]
    assert sizes[0] == sizes[1] > 0


@pytest.mark.needs("jax")
def test_memory_for_gradients_is_taken_when_the_output_is_there(backend, monkeypatch):
    """Going forward, there are the scaled query, the blocks of the output and the output; backward, three gradients."""
    monkeypatch.setattr(backend, "tuning", RUNS._replace(min_queries=64, keys=64, backward_keys=64))
    jax = importlib.import_module("jax")
    x = jax.ShapeDtypeStruct((1, 2, 4096, 64), np.float32)
    options = {"mask": ac.Causal(), "implementation": "blockwise"}
    gradients = jax.jit(jax.grad(lambda *arrays: attention(*arrays, **options).sum(), (0, 1, 2)))
    memory = gradients.lower(x, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 5 * math.prod(x.shape) * x.dtype.itemsize


@pytest.mark.needs("jax")
def test_the_program_of_jax_has_fewer_than_1000_lines(backend, monkeypatch):
    monkeypatch.setattr(backend, "tuning", type(backend).tuning)
    jax = importlib.import_module("jax")
    x = jax.ShapeDtypeStruct((1, 4, 16384, 64), np.float32)
    options = {"mask": ac.Causal(), "implementation": "blockwise"}
    gradients = jax.jit(jax.grad(lambda *arrays: attention(*arrays, **options).sum(), (0, 1, 2)))
    assert len(gradients.lower(x, x, x).as_text().splitlines()) < 1000


def equations(function, shapes):
    jax = importlib.import_module("jax")
    core = importlib.import_module("jax.extend.core")

    def count(jaxpr):
        inner = (
            each
            for equation in jaxpr.eqns
            for parameter in equation.params.values()
            for each in (parameter if isinstance(parameter, tuple | list) else (parameter,))
        )
        bodies = (each.jaxpr if isinstance(each, core.ClosedJaxpr) else each for each in inner)
        return len(jaxpr.eqns) + sum(count(body) for body in bodies if isinstance(body, core.Jaxpr))

    return count(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)).jaxpr)


def graph_nodes(function, shapes):
    tf = importlib.import_module("tensorflow")
    graph = tf.function(function, autograph=False).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes))
    definition = graph.graph.as_graph_def()
    nodes = (*definition.node, *(node for each in definition.library.function for node in each.node_def))
    return sum(node.op not in ("Const", "Fill") for node in nodes)  # large constants are filled


def fx_nodes(function, shapes):
    torch = importlib.import_module("torch")
    make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
    traced = make_fx(function, tracing_mode="fake")(*(torch.zeros(shape) for shape in shapes))
    return len(traced.graph.nodes)


COUNTERS = {"jax": equations, "tensorflow": graph_nodes, "torch": fx_nodes}


# Compiled


@dataclasses.dataclass(frozen=True, eq=False)
class Phased(Mask):
    """A rule of a user's own: numbers, arrays of two kinds, and another rule."""

    stride: int
    phases: Any
    shifts: Any
    inner: Mask
    axes: ClassVar[dict[str, int]] = {"phases": 1}

    def allowed(self, at, /, *, xp):
        phases = xp.astype(take_rows(self.phases, xp.reshape(at.query, (-1,)), axis=-1, xp=xp), xp.int32)
        shifts = xp.astype(self.shifts, xp.int32)
        if len(phases.shape) > 1:  # an axis for heads
            phases = xp.expand_dims(phases, axis=-2)
        if len(shifts.shape):
            shifts = xp.reshape(shifts, (-1, 1, 1, 1))
        behind = xp.add(xp.subtract(at.key, xp.expand_dims(phases, axis=-1)), shifts)
        return xp.logical_and(xp.not_equal(xp.remainder(behind, self.stride), 0), self.inner.allowed(at, xp=xp))


PHASES = np.random.default_rng(9).integers(0, 3, (B, M))


def with_own_rule(query, key, value, phases, shifts, bias, weight):
    return {
        "mask": Phased(3, phases, shifts, And(ac.Causal(3), ac.KeyLengths(12))),
        "bias": bias,
        "score_mod": ScoreMod(weighted, (weight,)),
        "dropout": ac.Dropout(0.1, 4),
    }


OWN = PHASES, np.array([0, 1, 5]), np.random.default_rng(8).standard_normal((H, M, 1)), np.array(1.5)


def own_options(*arrays):
    return with_own_rule(None, None, None, *arrays)


@pytest.mark.needs("untraced loops")
def test_a_rule_of_ones_own(backend, rng):
    assert_equal(backend, own_options, [*qkv(rng), *OWN])


@pytest.mark.needs(lambda mode_number, backend: len(backend.modes) > mode_number)
@pytest.mark.parametrize("mode_number", [1, 2])
def test_compiled_blocks(mode_number, backend, rng):
    """All of it in every mode that compiles: a rule of one's own, a score modification with an array, bias, dropout."""
    arrays = [*qkv(rng), *OWN]
    (expected,) = derivatives(backend, own_options, arrays, ("dense",))

    def compiled(backend, function):
        return backend.compile(function, mode=backend.modes[mode_number])

    if backend.name == "torch":  # whose compiler differentiates what it has compiled
        (found,) = derivatives(backend, own_options, arrays, ("blockwise",), inner=graph_of_torch)
    else:
        (found,) = derivatives(backend, own_options, arrays, ("blockwise",), compiled=compiled)
    assert_same(found, expected)


def graph_of_torch(function):
    """One graph; machine code is made of the same one."""
    torch = importlib.import_module("torch")
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")


def attend_some(query, key, value, lengths):
    mask = And(ac.KeyLengths(lengths), ac.Causal(1))
    return attention(query, key, value, mask=mask, bias=value[0, 0, 0, 0], implementation="blockwise")


def sized(batch, length, put):
    rng = np.random.default_rng(batch * 100 + length)
    shapes = (batch, 6, length, 4), (batch, 3, length + 2, 4), (batch, 3, length + 2, 3)
    return put([*map(rng.standard_normal, shapes), rng.integers(0, length + 1, batch)])


def dense_some(query, key, value, lengths):
    mask = And(ac.KeyLengths(lengths), ac.Causal(1))
    return attention(query, key, value, mask=mask, bias=value[0, 0, 0, 0], implementation="dense")


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_tensorflow_with_open_batch_and_lengths(jit_compile, backend):
    tf = importlib.import_module("tensorflow")
    signature = [
        tf.TensorSpec(dims, tf.float64) for dims in ([None, 6, None, 4], [None, 3, None, 4], [None, 3, None, 3])
    ]
    signature.append(tf.TensorSpec([None], tf.int64))

    def gradients(*arrays):
        return [
            backend.value_and_grad(lambda *arrays, of=of: tf.reduce_sum(of(*arrays) ** 2))(*arrays)
            for of in (attend_some, dense_some)
        ]

    graph = tf.function(gradients, input_signature=signature, jit_compile=jit_compile, autograph=False)
    for batch, length in ((2, 7), (3, 11), (1, 1)):
        blocks, dense = graph(*sized(batch, length, backend.from_numpy))
        np.testing.assert_allclose(blocks[0], dense[0], rtol=1e-12)
        for found, expected in zip(blocks[1][:3], dense[1][:3], strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.needs("tensorflow")
def test_tensorflow_with_open_lengths_that_turn_out_empty(backend):
    tf = importlib.import_module("tensorflow")
    spec = tf.TensorSpec([2, 2, None, 4], tf.float64)
    ids = tf.TensorSpec([2, None], tf.int32)

    @tf.function(input_signature=[spec] * 3 + [ids] * 2, autograph=False)
    def gradients(query, key, value, *ids):
        def measure(*arrays):
            options = {"mask": ac.Segments(*ids), "implementation": "blockwise"}
            return tf.reduce_sum(attention(*arrays, **options))

        return backend.value_and_grad(measure)(query, key, value)

    for rows, columns in ((3, 0), (0, 3), (0, 0)):
        query, key = (tf.ones((2, 2, length, 4), tf.float64) for length in (rows, columns))
        value, found = gradients(query, key, key, *(tf.ones((2, length), tf.int32) for length in (rows, columns)))
        assert value == 0
        assert [tuple(each.shape) for each in found] == [query.shape, key.shape, key.shape]


@pytest.mark.needs("jax")
def test_jax_export_with_open_batch_and_lengths(backend):
    jax, export = importlib.import_module("jax"), importlib.import_module("jax.export")
    scope = export.SymbolicScope()
    shapes = [
        jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), array.dtype)
        for array, text in zip(
            sized(2, 5, backend.from_numpy), ["b, 6, m, 4", "b, 3, m + 2, 4", "b, 3, m + 2, 3", "b"], strict=True
        )
    ]
    program = export.deserialize(export.export(jax.jit(attend_some))(*shapes).serialize())
    arrays = sized(3, 11, backend.from_numpy)
    np.testing.assert_allclose(program.call(*arrays), jax.jit(dense_some)(*arrays), rtol=0, atol=1e-13)


@pytest.mark.needs("jax")
def test_jax_vmap_over_everything(backend, rng):
    """The number of blocks to visit differs between what is mapped over."""
    jax = importlib.import_module("jax")
    arrays = backend.from_numpy([*qkv(rng, (B, 2)), np.array([13, 0, 6])])

    def measure(implementation, query, key, value, length):
        mask = And(ac.KeyLengths(length), ac.Causal(1))
        return (attention(query, key, value, mask=mask, implementation=implementation) ** 2).sum()

    dense, blocks = (
        jax.jit(jax.vmap(jax.grad(lambda *arrays, name=name: measure(name, *arrays), argnums=(0, 1, 2))))(*arrays)
        for name in ("dense", "blockwise")
    )
    assert_same(backend.to_numpy(blocks), backend.to_numpy(dense))


@pytest.mark.needs("torch")
def test_torch_transforms(backend, rng):
    torch = importlib.import_module("torch")
    arrays = backend.from_numpy([*qkv(rng), rng.standard_normal((H, M, 1))])

    def measure(implementation, query, key, value, bias):
        options = {"mask": ac.Causal(1), "bias": bias, "implementation": implementation}
        return (attention(query, key, value, **options) ** 2).sum()

    dense, blocks = (
        torch.func.grad(lambda *arrays, name=name: measure(name, *arrays), argnums=(0, 1, 2, 3))(*arrays)
        for name in ("dense", "blockwise")
    )
    assert_same(backend.to_numpy(blocks), backend.to_numpy(dense))


# Derivatives of their own kind


@pytest.mark.needs("torch")
@pytest.mark.parametrize("changed", [False, True])
def test_torch_gradcheck(changed, backend, rng):
    torch = importlib.import_module("torch")
    arrays = [*qkv(rng, (1,), 2, 1, 6, 7), rng.standard_normal((2, 1, 7)), np.array(1.3), np.array(0.8)]
    tensors = [each.requires_grad_() for each in backend.from_numpy(arrays)]

    def attend(query, key, value, bias, softcap, weight):
        options = {"bias": bias, "mask": ac.SlidingWindow(left=3, right=2)}
        if changed:
            options |= {"softcap": softcap, "score_mod": ScoreMod(weighted, (weight,))}
        else:
            value = value * weight / softcap
        return attention(query, key, value, **options, return_logsumexp=True, implementation="blockwise")[::2]

    assert torch.autograd.gradcheck(attend, tensors)


def curvature(backend, implementation, arrays):
    """The gradient of the square of the gradient."""
    xp = backend.namespace

    def measure(*arrays):
        return xp.sum(attention(*arrays, mask=ac.Causal(1), implementation=implementation) ** 2)

    def square(*arrays):
        _, gradients = backend.value_and_grad(measure)(*arrays)
        return xp.sum(gradients[0] ** 2) + xp.sum(gradients[1] ** 2) + xp.sum(gradients[2] ** 2)

    return backend.to_numpy(backend.value_and_grad(square)(*arrays)[1])


@pytest.mark.needs("gradients")
def test_second_derivatives_are_right_or_refused(backend, rng):
    """PyTorch and JAX, in blocks, refuse to differentiate twice; nobody gives a wrong number."""
    arrays = backend.from_numpy(tuple(qkv(rng, (1,), 2, 1, 6, 7)))
    try:
        found = curvature(backend, "blockwise", arrays)
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        assert "differentiat" in str(error)  # noqa: PT017
        return
    assert_same(found, curvature(backend, "dense", arrays), 1e-12)


# Plans


def test_a_mask_is_flattened_and_unflattened_to_the_same_rules(put):
    arrays = [put(each) for each in (OFFSETS, QUERY_IDS[:, :M], KEY_IDS, PHASES)]

    def rule(offset, query_ids, key_ids, table):
        inner = Or(ac.Causal(offset), ac.Segments(query_ids, key_ids))
        return And(Not(inner), ac.MaskFunction(weighted, (table, offset)))

    held, again = [], []
    form, other = flatten(rule(*arrays), held), flatten(rule(*reversed(arrays)), again)
    assert hash(form) == hash(other)
    assert form == other
    assert form != flatten(And(ac.Causal(1), ac.Causal(2)), [])
    assert flatten(ac.Causal(1), []) != flatten(ac.Causal(2), [])
    assert flatten(ac.Causal(1), []) != flatten(ac.KeyLengths(1), [])
    assert [leaf.axes for leaf in leaves(form)] == [0, 1, 1, -1, -1]
    assert [leaf.place for leaf in leaves(form)] == list(range(5))
    made = unflatten(form, held)
    assert type(made) is And
    assert [id(each) for each in made.second.arrays] == [id(arrays[3]), id(arrays[0])]
    assert made.first.mask.first.offset is arrays[0]
    assert made.first.mask.second.key_ids is arrays[2]
    assert made.second.function is weighted


@pytest.mark.needs("name")
@pytest.mark.parametrize("shape", [(H, M, 1), (B, H, M, N)])
@pytest.mark.parametrize("name", ["array_api_strict", "numpy"])
def test_going_backward_needs_the_array_api_alone(name, shape, backend, rng, monkeypatch):
    """Without differentiation by the library: the gradients are those of the dense form."""
    taken = []
    monkeypatch.setattr(
        type(backend),
        "custom_gradient",
        lambda self, operation, plan, arrays: taken.append((plan, arrays)) or operation.forward(plan, arrays, self),
    )
    arrays = [*qkv(rng), rng.standard_normal(shape), LENGTHS]

    def attend(implementation, *arrays):
        *inputs, bias, lengths = arrays
        mask = And(ac.KeyLengths(lengths), ac.Causal(1))
        return attention(*inputs, mask=mask, bias=bias, scale=1.0, implementation=implementation, return_logsumexp=True)

    output, _, logsumexp = backend.to_numpy(tuple(attend("blockwise", *backend.from_numpy(arrays))))
    ((plan, held),) = taken
    factors = rng.standard_normal(output.shape), rng.standard_normal(logsumexp.shape)
    grouped = [backend.from_numpy(x.reshape(B, G, H // G, *x.shape[2:])) for x in (output, logsumexp, *factors)]
    found = _backward.backward(plan, held, tuple(grouped[:2]), tuple(grouped[2:]), backend)
    found = [x.reshape(array.shape) for x, array in zip(backend.to_numpy(tuple(found[:4])), arrays[:4], strict=True)]
    numpy = get_backend("numpy")
    direction = [rng.standard_normal(x.shape) for x in arrays[:4]]

    def value(step):
        moved = [x + step * d for x, d in zip(arrays[:4], direction, strict=True)]
        result = attend("dense", *numpy.from_numpy([*moved, LENGTHS]))
        finite = np.where(np.isfinite(result.logsumexp), result.logsumexp, 0.0)
        return np.sum(result.output * factors[0]) + np.sum(finite * factors[1])

    difference = (value(1e-5) - value(-1e-5)) / 2e-5
    np.testing.assert_allclose(sum(np.sum(f * d) for f, d in zip(found, direction, strict=True)), difference, rtol=1e-7)


@pytest.mark.parametrize("nonfinite", [0.0, math.nan, math.inf, 1e300])
def test_what_could_not_be_read_while_compiling_is_read_when_the_program_runs(nonfinite, backend, rng, monkeypatch):
    """Nothing is cleaned that turns out to be finite, and its products too."""
    query, key, value = qkv(rng)
    query[0, 0, 0, 0], key[0, 0, -1, 0] = 1e300, nonfinite
    taken = []
    monkeypatch.setattr(
        type(backend),
        "custom_gradient",
        lambda self, operation, plan, arrays: taken.append((plan, arrays)) or operation.forward(plan, arrays, self),
    )
    attention(*backend.from_numpy([query, key, value]), mask=ac.Causal(), implementation="blockwise")
    ((plan, arrays),) = taken
    unseen = plan._replace(all_finite=False, exp_without_max=None)
    operands = _plan.unpack_operands(plan, arrays)
    assert _plan.with_value_facts(unseen, operands, backend).all_finite == (nonfinite == 0.0)
    assert not _plan.with_value_facts(unseen, operands._replace(bias=operands.query), backend).all_finite


def age_logarithm(scores, batch, head, query, key):
    """What is nan, or -inf, where the key comes after the query."""
    xp = array_namespace(scores)
    age = xp.astype(xp.subtract(query, key), scores.dtype)
    return xp.add(scores, xp.where(xp.less(age, 0.0), math.nan, age))


def root(scores, batch, head, query, key):
    """A function without a derivative at 0, which stands for a masked score."""
    xp = array_namespace(scores)
    return xp.multiply(xp.sign(scores), xp.sqrt(xp.abs(scores)))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("change", [age_logarithm, root])
def test_what_a_change_makes_of_masked_scores_does_not_leak(change, backend, rng):
    assert_equal(backend, lambda: {"mask": ac.Causal(), "score_mod": change}, qkv(rng))
