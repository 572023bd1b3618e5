"""The right result in float64, for as many queries as make it quick: a wrong computation is not worth timing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attention_benchmark.problem import NumpyArray, Problem

__all__ = ["TOLERANCE", "Expected", "expected", "worst_error"]

ROWS = 32

# Relative to the largest number of the result. Rounding factors to 10 bits, as accelerators do by default, passes.
TOLERANCE = {"float64": 1e-5, "float32": 2.0**-9, "float16": 2.0**-7, "bfloat16": 2.0**-4}


class Expected(NamedTuple):
    """Results for some queries, and the cotangent, zero for all others, of which the gradients are."""

    rows: NumpyArray
    cotangent: NumpyArray
    output: NumpyArray
    gradients: tuple[NumpyArray, ...]


def expected(problem: Problem) -> Expected:
    """Compute in float64 what some queries attend to, and, of these alone, the gradients."""
    length = problem.shape[2]
    rows = np.unique(np.append(np.random.default_rng(7).choice(length, min(length, ROWS), replace=False), length - 1))
    cotangent = np.zeros_like(problem.cotangent)
    cotangent[..., rows, :] = problem.cotangent[..., rows, :]
    compute = {"attention": _attention, "multi_head": _multi_head, "linear": _linear}[problem.operation]
    output, gradients = compute(problem, rows, cotangent[..., rows, :].astype(np.float64))
    return Expected(rows, cotangent, output, gradients)


def worst_error(found: Sequence[NumpyArray], wanted: Expected) -> float:
    """The largest difference of an output, and of gradients where there are any, relative to the largest number."""
    output, *gradients = found
    pairs = [
        (output[..., wanted.rows, :], wanted.output),
        *zip(gradients, wanted.gradients, strict=False),  # of parameters, which every layer keeps in its own way, none
    ]
    errors = [np.max(np.abs(each.astype(np.float64) - truth)) / np.max(np.abs(truth)) for each, truth in pairs]
    return float(np.max(errors))  # nan if one is


def _attention(problem: Problem, rows: NumpyArray, cotangent: NumpyArray) -> tuple[NumpyArray, tuple[NumpyArray, ...]]:
    query, key, value = (each.astype(np.float64) for each in problem.arrays)
    return _attend(problem, rows, query, key, value, cotangent)


def _attend(
    problem: Problem, rows: NumpyArray, query: NumpyArray, key: NumpyArray, value: NumpyArray, cotangent: NumpyArray
) -> tuple[NumpyArray, tuple[NumpyArray, ...]]:
    scale = query.shape[-1] ** -0.5
    chosen = query[..., rows, :] * scale
    scores = chosen @ key.swapaxes(-1, -2)
    allowed = problem.allowed(rows)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    output = weights @ value
    of_weights = cotangent @ value.swapaxes(-1, -2)
    of_scores = weights * (of_weights - (cotangent * output).sum(axis=-1, keepdims=True))
    of_query = np.zeros_like(query)
    of_query[..., rows, :] = of_scores @ key * scale
    return output, (of_query, of_scores.swapaxes(-1, -2) @ chosen, weights.swapaxes(-1, -2) @ cotangent)


def _multi_head(problem: Problem, rows: NumpyArray, cotangent: NumpyArray) -> tuple[NumpyArray, tuple[NumpyArray, ...]]:
    x, *projections = (each.astype(np.float64) for each in problem.arrays)
    weights, biases = projections[::2], projections[1::2]
    query, key, value = (_split(x @ weights[i] + biases[i], problem) for i in range(3))
    merged, gradients = _attend(problem, rows, query, key, value, _split(cotangent @ weights[3].T, problem))
    of_x = np.add.reduce([_merge(gradients[i]) @ weights[i].T for i in range(3)])
    return _merge(merged) @ weights[3] + biases[3], (of_x,)


def _linear(problem: Problem, rows: NumpyArray, cotangent: NumpyArray) -> tuple[NumpyArray, tuple[NumpyArray, ...]]:
    x, weight = (each.astype(np.float64) for each in problem.arrays)
    of_x = np.zeros_like(x)
    of_x[..., rows, :] = cotangent @ weight.T
    return x[..., rows, :] @ weight, (of_x, np.add.reduce(x[..., rows, :].swapaxes(-1, -2) @ cotangent))


def _split(x: NumpyArray, problem: Problem) -> NumpyArray:
    batch, heads, _, width = problem.shape
    return x.reshape(batch, -1, heads, width).swapaxes(1, 2)


def _merge(x: NumpyArray) -> NumpyArray:
    swapped = x.swapaxes(1, 2)
    return swapped.reshape(*swapped.shape[:2], -1)
