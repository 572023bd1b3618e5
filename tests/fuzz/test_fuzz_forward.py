"""Outputs, weights and logsumexp of all implementations, in both arithmetics, against the formula."""

from __future__ import annotations

from typing import Any

import fuzz_oracle as oracle
import numpy as np
import pytest
from fuzz_corpus import FORWARD
from fuzz_problems import Built, Problem, arrays_of, forced_blocks, planted, problems, wide_name

import attention_core as ac

CASES = 12


def differences(problem: Problem, arrays: dict[str, np.ndarray], result: Any) -> dict[str, float]:
    """The largest error of each result, as a share of what is allowed."""
    truth, exact = oracle.attention(problem, arrays), problem.arithmetic == "reproducible"
    bound = oracle.relative_bound(problem, truth)
    wide, values = wide_name(problem.dtype), np.where(np.isfinite(v := arrays["value"].astype(float)), v, 0)
    values = np.repeat(abs(values).max(axis=-2, keepdims=True, initial=0), problem.heads // problem.groups, axis=-3)
    lost = oracle.TINY[wide] * 4 * (problem.columns + 1) * (1 + values)
    top = (truth.weights * truth.kept).max(axis=-1, keepdims=True, initial=0).astype(float)
    rounding = 0.51 * oracle.spacing(truth.output_scale, problem.dtype)
    cut, short = (2.0**-54, 2.0**-45) if problem.dtype == "float32" else (2.0**-23, 2.0**-16)
    if exact:  # SMALL_WEIGHTS, LARGE_MASKED_VALUES: both are cut so far below the largest
        largest = truth.weights.max(axis=-1, keepdims=True, initial=0)
        lost = lost + (cut * (problem.columns + 4) * largest + short) * values / (1 - (problem.dropout or (0,))[0])
        bound = bound * 2.0**-12 + mixed_channels(problem, arrays)[..., None]
    scale = truth.output_scale.astype(float)
    with np.errstate(invalid="ignore"):
        found = {"output": (result.output, truth.output, scale * bound[..., None] + rounding + lost)}
        if problem.weights:
            w = truth.weights.astype(float)
            smallest = oracle.TINY[wide] * 4 + (cut * (2 + top) if exact else 0)
            near = w * bound[..., None] + 0.51 * oracle.spacing(w, problem.dtype) + smallest
            found["weights"] = (result.weights, truth.weights, near)
        if problem.logsumexp:
            size = oracle.EPSILON[wide] * (
                2 + 2 * truth.kappa + abs(np.where(np.isfinite(truth.logsumexp), truth.logsumexp, 0))
            )
            found["logsumexp"] = (result.logsumexp, truth.logsumexp, bound + size.astype(float))
    return {name: worst(*parts) for name, parts in found.items()}


def mixed_channels(problem: Problem, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """MIXED_CHANNELS: queries and keys are cut so far below the largest channel."""
    largest = [abs(each).max(axis=(-1, -2), initial=0) for each in oracle.widened(problem, arrays)[:2]]
    cut = 2.0**-42 if problem.dtype == "float32" else 2.0**-21
    return (cut * largest[0] * largest[1] * (1 if problem.scale is None else abs(problem.scale))).astype(float)


def worst(got: np.ndarray, wanted: np.ndarray, allowed: np.ndarray) -> float:
    """The largest error over its bound; infinite where a number is not finite and should be, or of another shape."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    got = got.astype(oracle.LONG)
    with np.errstate(invalid="ignore"):
        share = np.where(got == wanted, 0, abs(got - wanted) / np.maximum(allowed, 1e-320))
    return float(np.where(np.isnan(share), np.inf, share).max(initial=0))


def check(problem: Problem, backend: Any) -> str:
    arrays = arrays_of(problem)
    arrays = planted(problem, arrays, oracle.allowed_pairs(problem, arrays))
    built = Built(problem, backend.from_numpy, arrays)
    options = built.options() | {"return_logsumexp": True}
    with forced_blocks(problem, backend):
        result = ac.scaled_dot_product_attention(*built.qkv, **options)
    result = ac.Attention(*[each if each is None else backend.to_numpy(each) for each in result])
    assert result.output.dtype == arrays["query"].dtype
    assert result.logsumexp.dtype.name == wide_name(problem.dtype)
    assert (result.weights is not None) == problem.weights
    shares = differences(problem, arrays, result)
    assert max(shares.values()) <= 1, shares
    masked = ~oracle.attention(problem, arrays).allowed.any(axis=-1)
    assert not result.output[masked].astype(float).any(), "a fully masked row is not 0"
    return f"{problem.arithmetic} {problem.implementation}"


def pool_of(backend: Any) -> str | None:
    """Few shapes where every one is compiled."""
    return "few" if backend.name in ("jax", "tensorflow") else None


@pytest.mark.cases(CASES)
def test_forward(fuzz, backend):
    dtypes = tuple(name for name in ("float32", "float64", "float16", "bfloat16") if name in backend.dtypes)
    strategy = problems(pool=pool_of(backend), dtypes=dtypes, arithmetics=("fast", "fast", "reproducible"))
    fuzz(lambda problem: check(problem, backend), strategy, [each for each in FORWARD if each.dtype in dtypes])
