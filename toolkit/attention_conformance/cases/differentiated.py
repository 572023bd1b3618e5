"""Cases about the gradients in query, key, value, bias, sinks, and the arrays of what changes scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attention_conformance.cases.case import Bound, Case, Draw, hard, ordinary
from attention_conformance.cases.contract import (
    CAUSAL,
    LENGTHS,
    MASK,
    STEEPENED,
    hiding,
    lengths,
    masked,
    steepness,
    with_element,
)
from attention_conformance.problem import Problem, Rule, Seed

__all__ = ["DIFFERENTIATED"]


def masked_nonfinite(draw: Draw) -> Problem:
    """NaN and infinities in a key and a value that no query may attend to."""
    problem = draw.problem(MASK, hiding(draw, 4), gradient=True)
    return with_element(with_element(problem, "value", (4, 1), math.nan), "key", (4, 2), math.inf)


def excluded_row(draw: Draw) -> Problem:
    """A bias of -inf for one key, and for all keys of one query."""
    bias = draw.normal(3, 5, 7)
    bias[..., 4] = bias[..., 2, :] = -math.inf
    return draw.problem(arrays={"bias": bias}, gradient=True)


def _case(
    name: str, line: int, shows: str, inputs: Callable[[Draw], Problem], bound: Bound = ordinary, **more: Any
) -> Case:
    return Case(name, line, shows, inputs, bound=bound, measure="gradient", **more)


DIFFERENTIATED = (
    _case("gradient", 0, "The gradients of the plain definition.", lambda d: d.problem(gradient=True),
         compiled=("float16", "bfloat16", "float32", "float64")),
    _case("gradient-mask-and-bias", 1, "The gradient in a bias that is broadcast is summed.",
         lambda d: d.problem(MASK, {"mask": d.mask(2, 1, 5, 7), "bias": d.normal(3, 1, 7)}, gradient=True)),
    _case("gradient-structured", 2, "The gradients under structured masks.",
         lambda d: d.problem(Rule("SlidingWindow", {"left": 2, "right": 1}) & LENGTHS, lengths(4, 7), gradient=True)),
    _case("gradient-causal", 3, "The gradients of causal attention.", lambda d: d.problem(CAUSAL, gradient=True)),
    _case("gradient-empty-row", 4, "A query that sees nothing has the gradient 0, and gives none.",
         lambda d: d.problem(MASK, masked(d, 1, 4), gradient=True)),
    _case("gradient-empty-row-bias", 4, "The same where a bias of -inf excludes.", excluded_row),
    _case("gradient-empty-lengths", 4, "The same for a key length of 0.",
         lambda d: d.problem(LENGTHS, lengths(0, 5), gradient=True)),
    _case("gradient-masked-nonfinite", 5, "Masked NaN and infinities reach no gradient.", masked_nonfinite),
    _case("gradient-softcap", 7, "The gradients through the softcap.", lambda d: d.problem(softcap=1.5, gradient=True)),
    _case("gradient-score-mod", 7, "The gradients through a change of the scores, and in its arrays.",
         lambda d: d.problem(MASK, {**masked(d, 3), **steepness(d)}, score_mod=STEEPENED, softcap=1.5, gradient=True),
         bound=hard),
    _case("gradient-relative-bias", 7, "The gradient in the number of a bucket is a sum over its distances.",
         lambda d: d.problem(CAUSAL, {"table": d.normal(8, 3)}, gradient=True,
                             score_mod=Rule("relative_bias", {"table": "table", "max_distance": 5}))),
    _case("gradient-sinks", 7, "The gradients with a sink, and in it.",
         lambda d: d.problem(MASK, {**masked(d, 1), "sinks": d.normal(3)}, gradient=True)),
    _case("gradient-grouped", 9, "Shared key heads add up the gradients of their query heads.",
         lambda d: d.problem(heads=6, groups=3, gradient=True)),
    _case("gradient-no-keys", 10, "The gradients of no keys are empty, and 0 for the queries.",
         lambda d: d.problem(columns=0, gradient=True)),
    _case("gradient-dropout", 11, "The gradients through dropout.",
         lambda d: d.problem(dropout=Seed(0.4, 7), gradient=True)),
    _case("gradient-large-scores", 0, "The gradients where scores are large.",
         lambda d: d.problem(scale=4.0, gradient=True), bound=hard, dtypes=("float32", "float64")),
)  # fmt: skip
