"""Cases in which ordinary formulas of attention lose their digits, overflow or underflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import finfo

from attention_conformance.cases.case import Bound, Case, Draw, case, exact_scores, hard, long
from attention_conformance.problem import NumpyArray, Problem, put

AT: Any = np.s_


def one_head(draw: Draw, query: Any, key: Any, value: Any = None, **options: Any) -> Problem:
    """A problem of one head from rows of numbers; the values are drawn where none are given."""
    value = draw.normal(1, 1, len(key), 8) if value is None else draw.array([[value]])
    arrays = {"query": draw.array([[query]]), "key": draw.array([[key]]), "value": value}
    bias = options.pop("bias", None)
    return Problem(arrays if bias is None else {**arrays, "bias": bias}, options=options)


def wide(array: NumpyArray) -> NumpyArray:
    """Drawn numbers in float64, to be worked on further."""
    return array.astype(np.float64)


# Most cases have 3 queries, 37 keys and D = E = 8, so that what is compiled for one serves the others.


def near_ties(draw: Draw, sign: float = 1.0) -> Problem:
    """Scores about 1e4 that differ by little, so that a rounding of the score shows in the weights."""
    return one_head(draw, sign * (100.0 + wide(draw.normal(3, 8))), 35.0 + 1e-3 * wide(draw.normal(37, 8)))


def subnormal_values(draw: Draw) -> Problem:
    """Values below the least normal number."""
    magnitude, least = 2.0 ** -wide(draw.normal(37, 8, mean=3.0)), math.ldexp(1.0, finfo(draw.dtype).minexp)
    return one_head(draw, draw.normal(3, 8), draw.normal(37, 8), wide(draw.normal(37, 8)) * magnitude * least)


def one_key_dominates(draw: Draw) -> Problem:
    """A score of about 60 among scores of 0: all weights but one are tiny."""
    key = np.zeros((37, 8))
    key[11] = 10.5
    return one_head(draw, np.full((3, 8), 2.0), key)


def underflow_times_huge(draw: Draw) -> Problem:
    """Weights just below the least normal number times huge values, next to a weight of 1 times 0."""
    least = finfo("float64" if draw.dtype == "float64" else "float32").minexp
    depth, huge = 0.5 - math.floor(least * math.log(2.0)), math.ldexp(1.0, -least - 8)
    if draw.dtype == "float16":
        depth, huge = 11.0, 6e4
    key, value = np.zeros((37, 8)), np.zeros((37, 8))
    key[1:, 0] = -depth
    value[1:] = huge * wide(draw.normal(36, 8)).clip(-1.0, 1.0)
    return one_head(draw, np.tile(np.eye(1, 8), (3, 1)), key, value, scale=1.0)


def cancelling_values(draw: Draw) -> Problem:
    """Values of both signs whose average all but vanishes against the average of their magnitudes."""
    value, key = (np.repeat(wide(draw.normal(19, 8)), 2, axis=0)[:37] for _ in range(2))
    value[1::2] *= -1
    value[36] = 2.0**-20
    return one_head(draw, draw.normal(3, 8), key, value)


def largest_values(draw: Draw) -> Problem:
    """Values of which as many as there are keys, added up, are just below the largest number."""
    largest = {"float16": 6e4, "float64": 1.7e308 / 37}.get(draw.dtype, 3.3e38 / 37)
    return one_head(draw, draw.normal(3, 8), draw.normal(37, 8), largest * draw.signs(37, 8))


def product_overflows(draw: Draw) -> Problem:
    """Q k overflows, the scaled score does not: the scale must come before the product."""
    large = 2.0 ** (510.5 if draw.dtype == "float64" else 62.5)  # its inverse square is still a normal number
    factors = np.tile([1.0, 1.5, -2.0, 0.25, 1.75, -0.5], 7)[:37]
    query = np.outer([1.0, -1.0, 0.5], np.full(8, large))
    return one_head(draw, query, np.outer(factors, np.full(8, large)), scale=large**-2)


def large_bias(draw: Draw) -> Problem:
    """Biases of -1e4, the home-made mask, and of -inf."""
    bias = draw.normal(1, 3, 37)
    bias[..., ::3] = draw.array(-1e4)
    bias[..., ::5] = -math.inf
    return one_head(draw, draw.normal(3, 8), draw.normal(37, 8), bias=bias)


def _case(name: str, inputs: Callable[[Draw], Problem], bound: Bound = hard, **more: Any) -> Case:
    return case(name, inputs, bound, **more)


HARD = (
    _case("01-ordinary", lambda d: one_head(d, d.normal(8, 64), d.normal(128, 64), d.normal(128, 64))),
    _case("02-scores-1e4", lambda d: one_head(d, np.full((3, 8), 100.0), d.signs(37, 1) * np.full(8, 35.0)),
          exact_scores),
    _case("03-ties-1e4", lambda d: one_head(d, np.full((3, 8), 100.0), np.full((37, 8), 35.0)), exact_scores),
    _case("04-near-ties-1e4", near_ties),
    _case("05-all-minus-1e4", partial(near_ties, sign=-1.0)),
    _case("06-subnormal-values", subnormal_values),
    _case("07-one-key-dominates", one_key_dominates, exact_scores),
    _case("08-underflow-times-huge", underflow_times_huge, exact_scores),
    _case("09-long-row",
          lambda d: one_head(d, np.full((1, 1), 5.0), np.full((65536, 1), 2.0), d.normal(65536, 1, mean=0.5)), long),
    _case("10-long-row-spread", lambda d: one_head(d, d.normal(1, 4), d.normal(4999, 4), d.normal(4999, 4))),
    _case("11-cancelling-values", cancelling_values),
    _case("12-product-overflows", product_overflows, exact_scores, dtypes=("bfloat16", "float32", "float64")),
    _case("13-bias-minus-1e4", large_bias, exact_scores),
    _case("14-largest-values", largest_values),
    _case("15-half-overflow",
          lambda d: one_head(d, np.full((3, 8), 300.0), put(np.full((37, 8), 300.0), AT[3:, 0], 256.0)), exact_scores),
)  # fmt: skip
