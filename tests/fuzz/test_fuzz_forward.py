"""Outputs, weights and logsumexp of all implementations, in both arithmetics, against the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fuzz_corpus import FORWARD
from fuzz_problems import EPSILON, TINY, Drawn, called, dtypes_of, kappas, pool_of, problems, relative_bound

from attention_conformance.oracle.attention import Exact, Truth, attention
from attention_conformance.oracle.ulps import spacing
from attention_conformance.problem import Problem

CASES = 12


def differences(drawn: Drawn, problem: Problem, truth: Truth, found: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest error of each result, as a share of what is allowed."""
    bound = relative_bound(drawn, truth)
    values = largest(problem.arrays["value"], drawn, axis=-2)
    lost = TINY[drawn.wide] * 4 * (drawn.keys + 1) * (1 + values)
    size, weights = truth.arrays["output"].scale, truth.arrays["weights"].high
    smallest = TINY[drawn.wide] * 4
    if drawn.is_exact:
        bound = bound * 2.0**-12
    of_sum = 2 + 2 * kappas(truth) + abs(np.nan_to_num(truth.arrays["logsumexp"].high, neginf=0))
    allowed = {
        "output": size * bound[..., None] + 0.51 * spacing(size, drawn.dtype) + lost,
        "weights": weights * bound[..., None] + 0.51 * spacing(weights, drawn.dtype) + smallest,
        "logsumexp": bound + EPSILON[drawn.wide] * of_sum,
    }
    return {name: worst(each, truth.arrays[name], allowed[name]) for name, each in found.items()}


def largest(array: np.ndarray, drawn: Drawn, axis: int | tuple[int, ...]) -> np.ndarray:
    """The largest finite magnitude along axes, for every query head."""
    numbers = array.astype(float)
    found = np.where(np.isfinite(numbers), abs(numbers), 0).max(axis=axis, keepdims=True, initial=0)
    return np.repeat(found, drawn.heads // found.shape[-3], axis=-3)


def worst(got: np.ndarray, wanted: Exact, allowed: np.ndarray) -> float:
    """The largest error over its bound; infinite where a number is not finite and should be, or of another shape."""
    assert got.shape == wanted.high.shape, (got.shape, wanted.high.shape)
    numbers = got.astype(float)
    with np.errstate(invalid="ignore"):
        errors = abs((numbers - wanted.high) - wanted.low)
        share = np.where(numbers == wanted.high, 0, errors / np.maximum(allowed, 1e-320))
    return float(np.where(np.isnan(share), np.inf, share).max(initial=0))


def check(drawn: Drawn, backend: Any) -> None:
    problem = drawn.problem()
    found, truth = called(drawn, problem, backend), attention(problem)
    assert found["output"].dtype == problem.arrays["query"].dtype
    assert found["logsumexp"].dtype.name == drawn.wide
    assert ("weights" in found) == ("return_weights" in problem.options)
    shares = differences(drawn, problem, truth, found)
    assert max(shares.values()) <= 1, shares
    masked = ~truth.arrays["weights"].high.any(axis=-1)
    assert not found["output"][masked].astype(float).any(), "a fully masked row is not 0"


@pytest.mark.cases(CASES)
def test_forward(fuzz, backend):
    dtypes = dtypes_of(backend)
    strategy = problems(pool=pool_of(backend), dtypes=dtypes, arithmetics=("fast", "fast", "reproducible"))
    fuzz(lambda drawn: check(drawn, backend), strategy, [each for each in FORWARD if each.dtype in dtypes])
