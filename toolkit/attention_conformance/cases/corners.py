"""Corners of values, masks and widths at the sizes of kernels: what is masked is large, weights are small and many."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attention_conformance.cases.case import Bound, Case, Draw, hard, long, ordinary
from attention_conformance.cases.contract import MASK, with_element
from attention_conformance.cases.kernels import attention
from attention_conformance.problem import Problem

__all__ = ["CORNERS"]


def _masked_large(draw: Draw) -> Problem:
    """Values that no query may attend to are near the largest number of the type."""
    problem = attention(draw, 20, 130, 32, "mask")
    arrays = {name: each.copy() for name, each in problem.arrays.items()}
    arrays["mask"][...] = np.arange(130) < 70
    arrays["value"][..., 70:, :] = 6e4 if draw.dtype == "float16" else 1e30
    return replace(problem, arrays=arrays)


def _small_weights(draw: Draw) -> Problem:
    """One key has most of the weight; the others have a 40,000th each, and a twentieth together."""
    problem = attention(draw, 4, 2100, 32, deviation=0.25)
    arrays = {name: each.copy() for name, each in problem.arrays.items()}
    arrays["query"][..., 0], arrays["key"][..., 0] = 8.0, 0.0
    arrays["key"][..., 700, 0] = 7.5
    arrays["value"] = draw.array(1 + draw.normal(*arrays["value"].shape, deviation=0.25).astype(np.float64))
    arrays["value"][..., 700, :] = -1.0
    return replace(problem, arrays=arrays)


def _steep(draw: Draw) -> Problem:
    """Scores of the first block are 180 above those of the others."""
    problem = attention(draw, 5, 200, 64)
    arrays = {name: each.copy() for name, each in problem.arrays.items()}
    arrays["query"][..., 0], arrays["key"][..., 0] = 16.0, -90.0
    arrays["key"][..., :64, 0] = 0.0
    return replace(problem, arrays=arrays)


def _value_width(draw: Draw, width: int, value_width: int) -> Problem:
    problem = attention(draw, 33, 65, width, "causal")
    value = draw.normal(*problem.arrays["value"].shape[:-1], value_width)
    return replace(problem, arrays={**problem.arrays, "value": value})


def _of_heads(draw: Draw, **memory: str) -> Problem:
    problem = attention(draw, 70, 130, 32, heads=3)
    mask = draw.mask(2, 3, 70, 130)
    return replace(problem, arrays={**problem.arrays, "mask": mask}, mask=MASK, memory=memory)


def _rolled(problem: Problem, draw: Draw) -> Sequence[Problem]:
    """As many keys as before, but others."""
    name = "mask" if "mask" in problem.arrays else "bias"  # of kernels that add their masks
    return [replace(problem, arrays={**problem.arrays, name: np.roll(problem.arrays[name], 1, axis=-1)})]


def _case(
    name: str, line: int, shows: str, inputs: Callable[[Draw], Problem], bound: Bound = ordinary, **more: Any
) -> Case:
    return Case(name, line, shows, inputs, bound=bound, compiled=(), **more)


CORNERS: tuple[Case, ...] = (
    _case("masked-large-value", 5, "Masked values near the largest number reach nothing.", _masked_large),
    _case("attended-plus-inf-value", 5, "An attended value of +inf gives +inf, in its channel only.",
          lambda d: with_element(attention(d, 20, 130, 32), "value", (66, 2), math.inf)),
    _case("small-weights", 8, "2,099 small weights are a twentieth of the sum.", _small_weights, long),
    _case("steeply-falling-scores", 0, "The maximum of the first block is 180 above that of the next.", _steep, hard),
    _case("narrow-values-128", 10, "D = 192 and E = 128.", lambda d: _value_width(d, 192, 128)),
    _case("wide-values-128", 10, "D = 64 and E = 128.", lambda d: _value_width(d, 64, 128)),
    _case("mask-of-heads-and-causal", 3, "A mask of every head, and causality.",
          lambda d: replace(_of_heads(d), options={"is_causal": True})),
    _case("memory-mask-misaligned", 10, "The mask starts one element after its buffer.",
          lambda d: _of_heads(d, mask="offset")),
    _case("same-memory-mask", 10, "New numbers in the same memory, and a new mask.",
          lambda d: attention(d, 20, 34, 32, "mask"), measure="overwritten"),
    _case("after-rolled-mask", 10, "A call after another whose mask hides as many keys.",
          lambda d: attention(d, 20, 34, 32, "mask"), before=_rolled),
)  # fmt: skip
"""Corners, for subjects."""
