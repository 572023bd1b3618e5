"""Cases of properties that need no oracle: what two or more calls of one kernel owe each other.

An oracle answers them nevertheless, so that a kernel that breaks a property in the same way each time is seen, too.
Corners of values, masks and widths come after them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from attention_conformance.cases.case import Case, Draw, hard, long, ordinary
from attention_conformance.cases.kernels import (
    AT,
    attention,
    cached,
    gradient,
    row,
    sized,
    window,
)
from attention_conformance.problem import Problem

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 96, 127, 128, 129, 130)
"""Lengths of a cache, at the edges of blocks and next to them."""


def parts(dtype: str, kappa: float) -> float:
    """Bound the error of parts that were each rounded once."""
    return ordinary(dtype, kappa) if dtype == "float64" else 1.51 if dtype != "float32" else 8.0


def _steps(draw: Draw) -> Problem:
    """One query for each length of a cache."""
    mask = np.arange(max(LENGTHS)) < np.asarray(LENGTHS)[:, None]
    return attention(draw, len(LENGTHS), max(LENGTHS), 64).holding(mask=mask[None, None])


def _reordered(draw: Draw) -> Problem:
    """The same sample six times, its keys in other orders; blocks of low scores lie between blocks of high ones."""
    problem = attention(draw, 9, 260, 32, batch=1).put("query", AT[..., 0], 8.0).put("key", AT[..., 0], 0.0)
    arrays = dict(problem.put("key", AT[..., 64:128, 0], -40.0).arrays)
    random = np.random.default_rng(5)
    orders = [np.arange(260), np.arange(260)[::-1], *(np.roll(np.arange(260), shift) for shift in (64, 130))]
    orders += [random.permutation(260) for _ in range(2)]
    for name in ("key", "value"):
        arrays[name] = np.concatenate([arrays[name][:, :, order] for order in orders])
    return problem.holding(**{**arrays, "query": np.repeat(arrays["query"], len(orders), axis=0)})


def _among_others(draw: Draw, number: float, *, head: bool = False) -> Problem:
    """Ordinary samples, or heads, and one whose numbers are large or NaN."""
    problem = attention(draw, 20, 34, 32, heads=3, batch=3)
    for array in problem.arrays.values():
        array[(slice(None), 1) if head else 1] *= array.dtype.type(number)
    return problem


def _alibi(draw: Draw, keys: int) -> Problem:
    """Rates that are powers of 2, so that the bias is exact in all types."""
    return attention(draw, 70, keys, 32, heads=6).holding(alibi=2.0 ** -np.arange(1, 7, dtype=np.float32))


def _other_dtype(problem: Problem, draw: Draw) -> Sequence[Problem]:
    """The same call in the other dtypes."""
    kinds = [kind for kind in ("float16", "float32") if kind != problem.arrays["query"].dtype]
    return [problem.holding(**{name: each.astype(kind) for name, each in problem.arrays.items()}) for kind in kinds]


def _one_array(draw: Draw, *, gradient: bool = False) -> Problem:
    problem = attention(draw, 33, 33, 32, "causal", gradient=gradient)
    query = problem.arrays["query"]
    return problem.holding(key=query, value=query).changed(memory={"key": "query", "value": "query"})


def _masked_large(draw: Draw) -> Problem:
    """Values that no query may attend to are near the largest number of the type."""
    problem = attention(draw, 20, 130, 32, "mask").put("mask", ..., np.arange(130) < 70)
    return problem.put("value", AT[..., 70:, :], 6e4 if draw.dtype == "float16" else 1e30)


def _small_weights(draw: Draw) -> Problem:
    """One key has most of the weight; the others have a 40,000th each, and a twentieth together."""
    problem = attention(draw, 4, 2100, 32, deviation=0.25).put("query", AT[..., 0], 8.0)
    problem = problem.put("key", AT[..., 0], 0.0).put("key", AT[..., 700, 0], 7.5)
    spread = draw.normal(*problem.arrays["value"].shape, deviation=0.25).astype(np.float64)
    return problem.holding(value=draw.array(1 + spread)).put("value", AT[..., 700, :], -1.0)


def _steep(draw: Draw) -> Problem:
    """Scores of the first block are 180 above those of the others."""
    problem = attention(draw, 5, 200, 64).put("query", AT[..., 0], 16.0)
    return problem.put("key", AT[..., 0], -90.0).put("key", AT[..., :64, 0], 0.0)


def _rolled(problem: Problem, draw: Draw) -> Sequence[Problem]:
    """As many keys as before, but others."""
    name = "mask" if "mask" in problem.arrays else "bias"  # of kernels that add their masks
    return [problem.changed(arrays={**problem.arrays, name: np.roll(problem.arrays[name], 1, axis=-1)})]


PROPERTIES: tuple[Case, ...] = (
    row("decoding-equals-prefill", _steps, measure="decoded"),
    row("large-sample-among-others", lambda d: _among_others(d, 24.0), hard),
    row("large-head-among-others", lambda d: _among_others(d, 24.0, head=True), hard),
    row("nan-sample-among-others", lambda d: _among_others(d, math.nan)),
    row("nan-head-among-others", lambda d: _among_others(d, math.nan, head=True)),
    row("reordered-keys", _reordered, hard),
    row("merged-pieces", sized(20, 130, 64, return_logsumexp=True), parts, measure="merged"),
    row("window-of-its-own", lambda d: window(d, 70, 9, 5), measure="windowed"),
    row("window-of-its-own-past", lambda d: window(d, 70, 16), measure="windowed"),
    row("window-of-its-own-200", lambda d: window(d, 200, 70), measure="windowed"),
    row("window-of-its-own-more-keys", lambda d: window(d, 70, 9, 30, more=20), measure="windowed"),
    row("alibi-of-its-own", lambda d: _alibi(d, 70)),
    row("alibi-of-its-own-more-keys", lambda d: _alibi(d, 90)),
    row("dropout-of-its-own", sized(64, 64, 64), measure="dropped"),
    row("after-other-dtype", sized(21, 35, 32), before=_other_dtype),
    row("as-the-first-call", sized(64, 64, 64, heads=4)),
    row("long-decode", lambda d: cached(d, 1, 65536, 40000, width=16, heads=1, batch=1), hard),
    row("gradient-of-one-array", sized(20, 34, 32, gradient=True), measure="apart"),
    row("gradient-after-other-forward", sized(20, 34, 32, gradient=True), measure="between"),
    row("gradient-of-one-graph-twice", sized(20, 34, 32, gradient=True), measure="repeated"),
    row("memory-one-array", _one_array),
    gradient("gradient-memory-one-array", partial(_one_array, gradient=True)),
)  # fmt: skip
"""Properties, for kernels."""

CORNERS: tuple[Case, ...] = (
    row("masked-large-value", _masked_large),
    row("attended-plus-inf-value", lambda d: attention(d, 20, 130, 32).put("value", (..., 66, 2), math.inf)),
    row("small-weights", _small_weights, long),
    row("steeply-falling-scores", _steep, hard),
    row("mask-of-heads-and-causal", sized(70, 130, 32, "maskbhm", heads=3, is_causal=True)),
    row("after-rolled-mask", sized(20, 34, 32, "mask"), before=_rolled),
)  # fmt: skip
"""Corners, for kernels."""
