"""The oracle of the conformance kit: closed forms, another library of high precision, and its measure of errors."""

import itertools
import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest

import attention_core as ac
from attention_conformance.cases import CASES
from attention_conformance.oracle.attention import Exact, attention
from attention_conformance.oracle.changes import bucket
from attention_conformance.oracle.gradients import gradients
from attention_conformance.oracle.hashing import keep_pattern, mixed
from attention_conformance.oracle.positions import allowed
from attention_conformance.oracle.ulps import spacing, worst_error
from attention_conformance.problem import Problem, Rule, Seed, array, rounded

EVERYTHING = {"return_weights": True, "return_logsumexp": True}


def column(*numbers):
    return np.array([[[number] for number in numbers]])


def drawn_problem(rng, *, heads=2, groups=2, rows=3, columns=5, **more):
    arrays = {
        "query": rng.standard_normal((heads, rows, 4)),
        "key": rng.standard_normal((groups, columns, 4)),
        "value": rng.standard_normal((groups, columns, 2)),
        **more.pop("arrays", {}),
    }
    return Problem(arrays, **more)


def test_two_keys_with_scores_0_and_1_weigh_1_and_e():
    truth = attention(Problem({"query": column(1.0), "key": column(0.0, 1.0), "value": column(0.0, 1.0)}))
    mpmath.mp.dps = 40
    e = mpmath.e
    for found, expected in (
        (truth.arrays["weights"], [1 / (1 + e), e / (1 + e)]),
        (truth.arrays["output"], [e / (1 + e)]),
        (truth.arrays["logsumexp"], [mpmath.log(1 + e)]),
    ):
        sums = [
            mpmath.mpf(high) + mpmath.mpf(low) for high, low in zip(found.high.ravel(), found.low.ravel(), strict=True)
        ]
        assert max(abs(a - b) for a, b in zip(sums, expected, strict=True)) < 1e-31
    assert truth.kappa == 1.0
    np.testing.assert_array_equal(truth.arrays["output"].scale, truth.arrays["output"].high)


def mp_rows(allowed, query, key, value, bias):
    """One head in the arithmetic of mpmath; the softcap is 1.5, and the first query does not see the last key."""
    scale, output = 1 / mpmath.sqrt(len(query[0])), []
    for i, q in enumerate(query):
        scores = [1.5 * mpmath.tanh(mpmath.fdot(q, k) * scale / 1.5) + bias[i][j] for j, k in enumerate(key)]
        weights = [mpmath.exp(s) if allowed[i][j] else mpmath.mpf(0) for j, s in enumerate(scores)]
        total = mpmath.fsum(weights)
        output.append([mpmath.fdot(weights, channel) / total for channel in zip(*value, strict=True)])
    return output


def capped_problem(rng):
    mask = np.ones((3, 5), dtype=bool)
    mask[0, 4] = False
    arrays = {"mask": mask, "bias": rng.standard_normal((3, 5))}
    problem = drawn_problem(rng, heads=1, groups=1, arrays=arrays, mask=array("mask"), options={"softcap": 1.5})
    return replace(problem, cotangent=rng.standard_normal((1, 3, 2)))


def exact_numbers(array_):
    return [[mpmath.mpf(x) for x in row] for row in array_.reshape(-1, array_.shape[-1]).tolist()]


def test_it_agrees_with_mpmath(rng):
    problem = capped_problem(rng)
    mpmath.mp.dps = 40
    parts = [exact_numbers(problem.arrays[name]) for name in ("query", "key", "value", "bias")]
    expected = mp_rows(problem.arrays["mask"], *parts)
    found = attention(problem).arrays["output"]
    error = [
        abs(mpmath.mpf(high) + mpmath.mpf(low) - number)
        for high, low, number in zip(found.high.ravel(), found.low.ravel(), itertools.chain(*expected), strict=True)
    ]
    assert max(error) < 1e-31


def test_its_gradients_are_differences_in_mpmath(rng):
    problem = capped_problem(rng)
    mpmath.mp.dps = 60
    names = ("query", "key", "value", "bias")
    step = mpmath.mpf(10) ** -20
    cotangent = list(itertools.chain(*exact_numbers(problem.cotangent)))
    found = gradients(problem)

    def loss(moved, row, column_, by):
        parts = {name: exact_numbers(problem.arrays[name]) for name in names}
        parts[moved][row][column_] += by
        return mpmath.fdot(itertools.chain(*mp_rows(problem.arrays["mask"], *parts.values())), cotangent)

    for name in names:
        flat = found[name].high.reshape(-1, found[name].high.shape[-1])
        for row, column_ in ((0, 0), (1, 1), (2, 1)):
            difference = (loss(name, row, column_, step) - loss(name, row, column_, -step)) / (2 * step)
            assert abs(difference - flat[row, column_]) < 1e-15


def test_it_agrees_with_the_core_in_float64(rng):
    problem = drawn_problem(rng, heads=4, mask=Rule("Causal", {"offset": 1}), options=EVERYTHING)
    strict = ac.backend.get_backend("array_api_strict")
    arrays = strict.from_numpy(problem.arrays)
    result = ac.scaled_dot_product_attention(
        arrays["query"], arrays["key"], arrays["value"], mask=ac.Causal(offset=1), **EVERYTHING
    )
    truth = attention(problem)
    for name in ("output", "weights", "logsumexp"):
        found = strict.to_numpy(getattr(result, name))
        np.testing.assert_allclose(found, truth.arrays[name].high, rtol=1e-14, atol=1e-15)


def test_a_query_that_sees_nothing_has_weights_0_and_logsumexp_minus_infinity(rng):
    mask = np.array([[True] * 5, [False] * 5, [True] * 5])
    problem = drawn_problem(rng, arrays={"mask": mask}, mask=array("mask"), cotangent=rng.standard_normal((2, 3, 2)))
    truth = attention(problem)
    assert not truth.arrays["output"].high[:, 1].any()
    assert not truth.arrays["weights"].high[:, 1].any()
    assert np.all(truth.arrays["logsumexp"].high[:, 1] == -math.inf)
    assert not gradients(problem)["query"].high[:, 1].any()


def test_what_is_not_finite_shows_exactly_where_it_is_attended(rng):
    mask = np.array([[True, True, False, False, True]] * 3)
    problem = drawn_problem(rng, heads=1, groups=1, arrays={"mask": mask}, mask=array("mask"))
    problem.arrays["key"][0, 2] = math.nan
    problem.arrays["value"][0, 3] = math.inf
    clean = attention(problem).arrays["output"].high
    assert np.isfinite(clean).all()
    problem.arrays["value"][0, 4, 1] = math.inf
    seen = attention(problem).arrays["output"].high
    np.testing.assert_array_equal(seen[..., 0], clean[..., 0])
    assert np.all(seen[..., 1] == math.inf)
    for wrong in (math.inf, math.nan):
        problem.arrays["query"][0, 1, 0] = wrong
        truth = attention(problem)
        assert np.isnan(truth.arrays["output"].high).all(axis=-1).tolist() == [[False, True, False]]
        assert np.isnan(truth.arrays["logsumexp"].high).tolist() == [[False, True, False]]


def test_positions_follow_the_words_of_the_contract(rng):
    arrays = {
        "offset": np.array(-1),
        "lengths": np.array(4),
        "ids": np.array([0, 1, 1]),
        "key_ids": np.array([0, 0, 1, 1, 2]),
    }
    segments = Rule("Segments", {"query_ids": "ids", "key_ids": "key_ids"})
    pictures = (
        (Rule("Causal"), ["x....", "xx...", "xxx.."]),
        (Rule("Causal", {"offset": "offset"}), [".....", "x....", "xx..."]),
        (Rule("SlidingWindow", {"left": 1, "right": 0}), ["x....", "xx...", ".xx.."]),
        (Rule("KeyLengths", {"lengths": "lengths"}), ["xxxx.", "xxxx.", "xxxx."]),
        (segments, ["xx...", "..xx.", "..xx."]),
        (~segments & Rule("Causal"), [".....", "xx...", "xx..."]),
        (segments | Rule("Causal"), ["xx...", "xxxx.", "xxxx."]),
    )
    for rule, picture in pictures:
        found = allowed(drawn_problem(rng, arrays=arrays, mask=rule))[0]
        assert ["".join(".x"[seen] for seen in row) for row in found.tolist()] == picture, rule


def test_the_hash_is_the_finalizer_of_murmurhash3():
    assert (mixed(0), mixed(1), mixed(0xDEADBEEF)) == (0, 0x514E28B7, 0x0DE5C6A9)


def test_dropout_keeps_what_the_core_keeps():
    shape = (2, 3, 5, 7)
    for rate, seed in ((0.4, 7), (0.25, 2**63 + 2**33 + 5)):
        kept = ac.random.dropout_mask(
            ac.Dropout(rate, seed), np.zeros(shape), xp=ac.backend.get_backend("numpy").namespace
        )
        np.testing.assert_array_equal(keep_pattern(Seed(rate, seed), shape), kept)


@pytest.mark.parametrize(
    ("scale", "dtype", "expected"),
    [
        (1.0, "float32", 2.0**-23),
        (1.999, "float32", 2.0**-23),
        (3.0, "float16", 2.0**-9),
        (1.0, "bfloat16", 2.0**-7),
        (1.0, "float64", 2.0**-52),
        (0.0, "float16", 2.0**-24),
        (1e-40, "float32", 2.0**-149),
        (1e-310, "float64", 2.0**-1074),
    ],
)
def test_a_unit_in_the_last_place_is_the_distance_of_neighbours(scale, dtype, expected):
    assert spacing(np.array(scale), dtype) == expected
    if dtype != "bfloat16":
        assert np.spacing(np.dtype(dtype).type(scale)) == expected


def test_errors_are_counted_in_units_of_the_scale():
    exact = Exact(np.array([1.0, 0.0]), np.array([2.0**-30, 0.0]), np.array([4.0, 0.0]))
    error, where = worst_error(rounded([1.0 + 2.0**-20, 0.0], "float32"), exact, "float32")
    assert error == pytest.approx((2.0**-20 - 2.0**-30) / 2.0**-21, rel=1e-12)
    assert where.startswith("at (0,): expected 1; got 1.0000009")
    assert worst_error(rounded([1.0, 1e-45], "float32"), exact, "float32")[0] == 1.0


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (np.zeros(3, dtype=np.float32), "expected shape (2,); got (3,)"),
        (np.zeros(2), "expected dtype float32; got float64"),
        (np.array([0.0, math.nan], dtype=np.float32), "expected inf; got nan"),
        (np.array([math.nan, math.inf], dtype=np.float32), "expected 0; got nan"),
        (np.array([0.0, -math.inf], dtype=np.float32), "expected inf; got -inf"),
        (np.array([0.0, 3e38], dtype=np.float32), "expected inf; got 3.0"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_be_compared_is_infinitely_wrong(found, text):
    exact = Exact(np.array([0.0, math.inf]), np.zeros(2), np.ones(2))
    error, detail = worst_error(found, exact, "float32")
    assert error == math.inf
    assert text in detail


def test_a_sink_takes_its_share():
    problem = Problem(
        {"query": column(1.0), "key": column(0.0, 1.0), "value": column(0.0, 1.0), "sinks": np.array([2.0])}
    )
    truth = attention(problem)
    total = 1 + math.e + math.e**2
    np.testing.assert_allclose(truth.arrays["weights"].high.ravel(), [1 / total, math.e / total], rtol=1e-15)
    np.testing.assert_allclose(truth.arrays["logsumexp"].high.ravel(), math.log(total), rtol=1e-15)
    assert truth.kappa == 2.0
    nothing = attention(
        replace(problem, arrays={**problem.arrays, "mask": np.zeros(2, dtype=bool)}, mask=array("mask"))
    )
    assert (nothing.arrays["output"].high.item(), nothing.arrays["logsumexp"].high.item()) == (0.0, 2.0)


def test_rates_and_buckets_are_those_that_are_published():
    def falls(heads):
        query, key = np.zeros((heads, 1, 1)), np.zeros((heads, 2, 1))
        problem = Problem({"query": query, "key": key, "value": key}, score_mod=Rule("alibi", {"num_heads": heads}))
        weights = attention(problem).arrays["weights"].high
        return np.log2(np.log(weights[:, 0, 0] / weights[:, 0, 1]))

    np.testing.assert_allclose(falls(8), [-1, -2, -3, -4, -5, -6, -7, -8])
    np.testing.assert_allclose(falls(12), [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5])
    # T5: 32 buckets, 8 of them exact in each direction, up to a distance of 128
    near = [bucket(-distance, 32, 128) for distance in (0, 1, 7, 8, 11, 12, 15, 16, 31, 32, 64, 127, 128, 500)]
    assert near == [0, 1, 7, 8, 8, 9, 9, 10, 11, 12, 14, 15, 15, 15]
    assert [bucket(distance, 32, 128) for distance in (1, 8, 64, 500)] == [17, 24, 30, 31]
    one_way = [bucket(-distance, 32, 128, bidirectional=False) for distance in (-9, 0, 15, 16, 20, 64, 127, 500)]
    assert one_way == [0, 0, 15, 16, 17, 26, 31, 31]


@pytest.mark.parametrize("name", ["gradient-score-mod", "gradient-relative-bias", "gradient-sinks"])
def test_gradients_are_finite_differences(name):
    (case,) = (case for case in CASES if case.name == name)
    problem, step = case.problem("float64"), 1e-6
    found = gradients(problem)
    for variable in problem.variables[3:]:
        index = tuple(dim // 2 for dim in problem.arrays[variable].shape)

        def loss(change, variable=variable, index=index):
            changed = problem.arrays[variable].copy()
            changed[index] += change
            moved = replace(problem, arrays={**problem.arrays, variable: changed})
            return np.sum(attention(moved).arrays["output"].high * problem.cotangent)

        derivative = (loss(step) - loss(-step)) / (2 * step)
        assert abs(found[variable].high[index] - derivative) < 1e-7 * (1 + abs(derivative))
