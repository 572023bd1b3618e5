"""Reference results in float64 for a few queries: only correct results are timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attention_benchmark.problem import NumpyArray, Problem

ROWS = 32

# Relative to the largest magnitude. The default TF32 products of accelerators, with 10-bit factors, pass.
TOLERANCE = {"float64": 1e-5, "float32": 2.0**-9, "float16": 2.0**-7, "bfloat16": 2.0**-4}


class Expected(NamedTuple):
    """Results for some queries, and gradients for a cotangent that is zero for all others."""

    rows: NumpyArray
    cotangent: NumpyArray
    output: NumpyArray
    gradients: tuple[NumpyArray, ...]


def expected(problem: Problem) -> Expected:
    """Compute output and gradients of some queries in float64."""
    length = problem.num_queries
    rows = np.unique(np.append(np.random.default_rng(7).choice(length, min(length, ROWS), replace=False), length - 1))
    cotangent = np.zeros_like(problem.cotangent)
    cotangent[..., rows, :] = problem.cotangent[..., rows, :]
    output, gradients = _attention(problem, rows, cotangent[..., rows, :].astype(np.float64))
    return Expected(rows, cotangent, output, gradients)


def worst_error(results: Sequence[NumpyArray], wanted: Expected) -> float:
    """The largest difference of output and gradients from the reference, relative to the largest magnitude."""
    output, *gradients = results
    pairs = [
        (output[..., wanted.rows, :], wanted.output),
        *zip(gradients, wanted.gradients, strict=False),  # none of parameters, whose layouts differ
    ]
    errors = [np.max(np.abs(each.astype(np.float64) - truth)) / np.max(np.abs(truth)) for each, truth in pairs]
    return float(np.max(errors))  # nan if one is


def _attention(problem: Problem, rows: NumpyArray, cotangent: NumpyArray) -> tuple[NumpyArray, tuple[NumpyArray, ...]]:
    query, *shared = (each.astype(np.float64) for each in problem.arrays)
    key, value = (each.repeat(problem.group, axis=1) for each in shared)
    scale = query.shape[-1] ** -0.5
    chosen = query[..., rows, :] * scale
    scores = chosen @ key.swapaxes(-1, -2)
    scores, derivative = problem.changed(scores, rows)
    allowed = problem.allowed(rows)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    sinks = -np.inf if problem.sinks is None else problem.sinks.astype(np.float64)[:, None, None]
    greatest = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    weights = np.exp(scores - greatest)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - greatest)
    output = weights @ value
    d_weights = cotangent @ value.swapaxes(-1, -2)
    d_scores = weights * (d_weights - (cotangent * output).sum(axis=-1, keepdims=True)) * derivative
    d_query = np.zeros_like(query)
    d_query[..., rows, :] = d_scores @ key * scale
    per_head = d_scores.swapaxes(-1, -2) @ chosen, weights.swapaxes(-1, -2) @ cotangent
    batch, _, length, width = problem.shape
    d_key, d_value = (each.reshape(batch, -1, problem.group, length, width).sum(axis=2) for each in per_head)
    return output, (d_query, d_key, d_value)
