"""Cases in which every two of the settings meet: a kernel has paths for one query, for grouped heads, for masks.

A fault of one path often shows under another setting alone, such as causality with four query heads for a key head.
"""

from __future__ import annotations

from typing import Any

from attention_conformance.cases.case import Case, Draw, hard
from attention_conformance.cases.kernels import ARRAYS, AT, attention
from attention_conformance.problem import Problem

TABLE = (
    # queries, keys, rule, samples, heads, key heads, width, scale, scores, memory
    (1, 129, "plain", 1, 10, 5, 64, 0.3, "high", "part"),
    (1, 129, "causal", 1, 8, 1, 64, None, "high", "part"),
    (1, 129, "keys", 2, 1, 1, 64, None, "high", "contiguous"),
    (1, 129, "heads", 5, 8, 2, 128, 0.3, "high", "permuted"),
    (1, 129, "head-keys", 1, 1, 1, 64, None, "ordinary", "part"),
    (1, 129, "bias", 2, 1, 1, 64, 0.3, "high", "part"),
    (1, 129, "causal-keys", 2, 6, 6, 64, 0.3, "high", "contiguous"),
    (1, 256, "plain", 5, 1, 1, 64, None, "high", "part"),
    (1, 256, "causal", 2, 8, 2, 128, None, "ordinary", "contiguous"),
    (1, 256, "keys", 2, 8, 1, 64, None, "high", "permuted"),
    (1, 256, "heads", 1, 6, 6, 64, 0.3, "high", "permuted"),
    (1, 256, "head-keys", 1, 1, 1, 64, None, "high", "contiguous"),
    (1, 256, "bias", 1, 10, 5, 64, None, "ordinary", "contiguous"),
    (1, 256, "causal-keys", 1, 8, 2, 64, None, "ordinary", "contiguous"),
    (7, 64, "plain", 2, 8, 2, 64, None, "ordinary", "contiguous"),
    (7, 64, "causal", 1, 6, 6, 64, None, "high", "part"),
    (7, 64, "keys", 1, 8, 1, 64, 0.3, "high", "contiguous"),
    (7, 64, "heads", 5, 10, 5, 64, 0.3, "ordinary", "contiguous"),
    (7, 64, "head-keys", 1, 1, 1, 64, None, "high", "part"),
    (7, 64, "bias", 2, 1, 1, 128, 0.3, "high", "permuted"),
    (7, 64, "causal-keys", 1, 1, 1, 64, None, "ordinary", "contiguous"),
    (33, 33, "plain", 1, 1, 1, 128, 0.3, "ordinary", "contiguous"),
    (33, 33, "causal", 1, 10, 5, 128, None, "high", "permuted"),
    (33, 33, "keys", 5, 6, 6, 64, 0.3, "high", "contiguous"),
    (33, 33, "heads", 1, 1, 1, 64, None, "ordinary", "contiguous"),
    (33, 33, "head-keys", 2, 8, 1, 128, 0.3, "ordinary", "permuted"),
    (33, 33, "bias", 1, 8, 2, 64, None, "ordinary", "part"),
    (33, 33, "causal-keys", 2, 1, 1, 64, 0.3, "high", "permuted"),
    (65, 200, "plain", 1, 1, 1, 64, 0.3, "high", "permuted"),
    (65, 200, "causal", 5, 1, 1, 64, 0.3, "ordinary", "contiguous"),
    (65, 200, "keys", 2, 10, 5, 64, None, "ordinary", "permuted"),
    (65, 200, "heads", 1, 1, 1, 64, None, "ordinary", "contiguous"),
    (65, 200, "head-keys", 1, 8, 2, 64, 0.3, "ordinary", "permuted"),
    (65, 200, "bias", 1, 6, 6, 64, 0.3, "ordinary", "part"),
    (65, 200, "causal-keys", 1, 8, 1, 128, 0.3, "high", "part"),
    (128, 128, "plain", 1, 6, 6, 128, 0.3, "ordinary", "permuted"),
    (128, 128, "causal", 1, 1, 1, 64, None, "high", "part"),
    (128, 128, "keys", 1, 1, 1, 64, 0.3, "ordinary", "part"),
    (128, 128, "heads", 1, 10, 5, 64, 0.3, "ordinary", "permuted"),
    (128, 128, "head-keys", 5, 8, 2, 64, 0.3, "ordinary", "part"),
    (128, 128, "bias", 5, 8, 1, 64, None, "high", "contiguous"),
    (128, 128, "causal-keys", 2, 1, 1, 128, 0.3, "ordinary", "part"),
    (200, 65, "plain", 1, 1, 1, 64, 0.3, "high", "contiguous"),
    (200, 65, "causal", 5, 1, 1, 64, 0.3, "high", "permuted"),
    (200, 65, "keys", 1, 8, 2, 128, 0.3, "high", "permuted"),
    (200, 65, "heads", 2, 8, 1, 64, None, "ordinary", "part"),
    (200, 65, "head-keys", 1, 10, 5, 128, 0.3, "high", "contiguous"),
    (200, 65, "bias", 1, 6, 6, 64, None, "ordinary", "part"),
    (200, 65, "causal-keys", 1, 1, 1, 64, 0.3, "ordinary", "permuted"),
    (256, 256, "plain", 1, 8, 1, 128, None, "high", "part"),
    (256, 256, "causal", 1, 8, 2, 64, None, "high", "contiguous"),
    (256, 256, "keys", 1, 1, 1, 128, 0.3, "high", "part"),
    (256, 256, "heads", 1, 1, 1, 64, 0.3, "ordinary", "contiguous"),
    (256, 256, "head-keys", 2, 6, 6, 64, 0.3, "ordinary", "contiguous"),
    (256, 256, "bias", 1, 1, 1, 64, 0.3, "ordinary", "part"),
    (256, 256, "causal-keys", 5, 10, 5, 64, None, "ordinary", "permuted"),
)
"""Settings, of which any two values are together in a row."""

LINES = {"plain": 10, "causal": 3, "causal-keys": 3}
SCORE = 100.0
"""The score that is added to all where they are high: its exponential overflows."""


def _wide(dtype: str, kappa: float) -> float:
    """Bound the error where a product of 1,000 becomes a score of 100: the faults of a path are far larger."""
    return 16 * hard(dtype, kappa) if dtype == "float32" else hard(dtype, kappa)


def _problem(
    draw: Draw, queries: int, keys: int, rule: str, batch: int, heads: int, groups: int, width: int,
    scale: float | None, scores: str, memory: str, *, gradient: bool = False,
) -> Problem:  # fmt: skip
    problem = attention(
        draw, queries, keys, width, "causal" if "causal" in rule else "plain", heads=heads, groups=groups, batch=batch,
        gradient=gradient,
    )  # fmt: skip
    options = problem.options if scale is None else {**problem.options, "scale": scale}
    if scores == "high":
        factor = draw.array(SCORE / 8.0 / (width**-0.5 if scale is None else scale))
        problem = problem.put("query", AT[..., 0], 8.0).put("key", AT[..., 0], factor)
    shapes = {"keys": (batch, 1, 1, keys), "head-keys": (batch, heads, 1, keys), "heads": (1, heads, queries, keys)}
    if shape := shapes.get(rule.removeprefix("causal-")):
        problem = problem.holding(mask=draw.mask(*shape))
    if rule == "bias":
        problem = problem.holding(bias=draw.normal(1, heads, queries, keys))
    names = ("key", "value") if memory == "part" else ARRAYS
    return problem.changed(options=options, memory=dict.fromkeys(names, memory))


def _case(row: tuple[Any, ...], *, gradient: bool = False) -> Case:
    queries, keys, rule, batch, heads, groups, width, scale, scores, memory = row
    factor = "" if scale is None else f", the scale {scale}"
    shows = (
        f"{batch} × {heads} heads on {groups}, {queries} queries, {keys} keys, D = {width}; {rule}{factor}, "
        f"{scores} scores, {memory} memory."
    )
    name, measure = f"pair-{queries}x{keys}-{rule}", "ulp"
    if gradient:
        name, shows, measure = f"gradient-{name}", f"Gradients: {shows}", "gradient"

    def inputs(draw: Draw) -> Problem:
        return _problem(draw, *row, gradient=gradient)

    bound = _wide if scores == "high" else hard
    return Case(name, LINES.get(rule, 1), shows, inputs, bound, measure=measure, compiled=())


PAIRS: tuple[Case, ...] = (
    *(_case(row) for row in TABLE),
    *(_case(row, gradient=True) for row in TABLE[::2]),
)
"""Cases of pairs of settings, for subjects; gradients of every second one."""
