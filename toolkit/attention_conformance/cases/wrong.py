"""Cases of wrong arguments: the error is raised before any computation, with the same words on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention_conformance.cases.case import Case, Draw
from attention_conformance.cases.contract import MASK, lengths
from attention_conformance.problem import NumpyArray, Problem, Rule, Seed

__all__ = ["WRONG"]

LENGTHS = Rule("KeyLengths", {"lengths": "lengths"})


def _case(
    name: str,
    shows: str,
    error: type[Exception],
    *parts: Any,
    dtypes: tuple[str, ...] = ("float32",),
    reads: bool = False,
    **options: Any,
) -> Case:
    def inputs(draw: Draw) -> Problem:
        return draw.problem(*(part(draw) if callable(part) else part for part in parts), **options)

    return Case(
        f"wrong-{name}", 12, shows, inputs, dtypes=dtypes, measure="message", compiled=(), raises=error, reads=reads
    )


def _drawn(name: str, *shape: int) -> Any:
    """One of the arrays, drawn in another shape."""

    def draw_it(draw: Draw) -> dict[str, NumpyArray]:
        return {name: draw.normal(*shape)}

    return draw_it


def _given(name: str, array: NumpyArray) -> dict[str, NumpyArray]:
    return {name: array}


WRONG = (
    _case("rank", "A query has at least the axes (heads, M, D).", ValueError, None, _drawn("query", 5, 8)),
    _case("ranks-differ", "Query and key have the same leading axes.", ValueError, None, _drawn("key", 3, 7, 8)),
    _case("leading-axes", "Leading axes are equal; they do not broadcast.", ValueError, None,
          _drawn("key", 4, 3, 7, 8)),
    _case("key-width", "Query and key have one head dimension.", ValueError, None, _drawn("key", 2, 3, 7, 6)),
    _case("value-length", "There are as many values as keys.", ValueError, None, _drawn("value", 2, 3, 6, 4)),
    _case("value-heads", "Keys and values have the same heads.", ValueError, None, _drawn("value", 2, 1, 7, 4)),
    _case("heads-do-not-divide", "The key heads divide the query heads.", ValueError, heads=4, groups=3),
    _case("integer-query", "Queries are floating-point numbers.", TypeError, None,
          _given("query", np.zeros((2, 3, 5, 8), dtype=np.int32))),
    _case("mixed-dtypes", "Query, key and value have one dtype.", TypeError, None,
          _given("key", np.zeros((2, 3, 7, 8), dtype=np.float32)), dtypes=("float64",)),
    _case("mask-integers", "A mask is boolean; the message names the converters.", TypeError, MASK,
          _given("mask", np.ones((5, 7), dtype=np.int32))),
    _case("mask-additive", "A mask is no bias.", TypeError, MASK, _drawn("mask", 5, 7)),
    _case("mask-shape", "A mask broadcasts to (..., H, M, N).", ValueError, MASK,
          _given("mask", np.ones((7, 5), dtype=bool))),
    _case("mask-grows", "A mask does not add axes.", ValueError, MASK,
          _given("mask", np.ones((4, 1, 1, 5, 7), dtype=bool))),
    _case("bias-boolean", "A boolean array is no bias.", TypeError, None, _given("bias", np.ones((5, 7), dtype=bool))),
    _case("bias-shape", "A bias broadcasts to (..., H, M, N).", ValueError, None, _drawn("bias", 2, 5, 7)),
    _case("lengths-count", "There is one key length for every entry.", ValueError, LENGTHS, lengths(1, 2, 3)),
    _case("lengths-negative", "Key lengths are not negative.", ValueError, LENGTHS, lengths(-1, 2),
          reads=True),
    _case("lengths-floating", "Key lengths are integers.", TypeError, LENGTHS, _drawn("lengths", 2)),
    _case("window-negative", "A window reaches no negative distance.", ValueError, Rule("SlidingWindow", {"left": -1})),
    _case("scale-text", "A scale is a number.", TypeError, scale="large"),
    _case("scale-infinite", "A scale is finite.", ValueError, scale=float("inf")),
    _case("softcap-negative", "A softcap is positive.", ValueError, softcap=-1.0),
    _case("sinks-shape", "There is one sink for every head.", ValueError, None, _drawn("sinks", 2)),
    _case("sinks-integers", "Sinks are floating-point numbers.", TypeError, None,
          _given("sinks", np.zeros(3, dtype=np.int32))),
    _case("dropout-number", "Dropout is given as rate and seed.", TypeError, dropout=0.1),
    _case("dropout-rate", "A dropout rate is below 1.", ValueError, dropout=Seed(1.0, 0)),
    _case("dropout-seed", "A seed has at most 64 bits.", ValueError, dropout=Seed(0.5, 2**64)),
)  # fmt: skip
