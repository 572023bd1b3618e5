"""Cases that show the contract of attention, line by line, and those of gradients; line 12 is about errors alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from attention_conformance.cases.case import Draw, Drawn, case, drawn, exact_scores, hard, inputs, merged
from attention_conformance.problem import NumpyArray, Problem, Rule, Seed, array, put

LINES = {
    1: "A mask is boolean, and True means may attend",
    2: "A mask may follow a rule",
    3: "Causal means key position ≤ query position + offset",
    4: "A fully masked row gives exactly 0",
    5: "Masked values never leak",
    6: "Asking for weights or logsumexp changes nothing else",
    7: "The scale multiplies the query, and softcap comes before bias and mask",
    8: "Computed wide, rounded once",
    9: "Grouped heads repeat in order",
    10: "Any number of leading axes, empty ones included",
    11: "Dropout is explicit",
    12: "Wrong arguments are errors, in the same words everywhere",
    0: "Numerical hazards",
}
"""The lines of the contract by `Case.line`, in the order of the report."""

BOTH: dict[str, Any] = {"return_weights": True, "return_logsumexp": True}
MASK = array("mask")
CAUSAL = Rule("Causal")
RELATIVE = Rule("relative_bias", {"table": "table", "max_distance": 5})
LENGTHS = Rule("KeyLengths", {"lengths": "lengths"})
WINDOW = Rule("SlidingWindow", {"left": 2, "right": 1})
SEGMENTS = Rule("Segments", {"query_ids": "query_ids", "key_ids": "key_ids"})
PERIODIC = Rule("periodic", {"period": "period"})
STEEPENED = Rule("steepened", {"factor": "factor", "distance_factor": "distance_factor"})
DOCUMENTS = {
    "query_ids": np.repeat(np.array([[0, 1, 2], [0, 5, 7]], dtype=np.int32), (4, 1, 6), axis=1),
    "key_ids": np.repeat(np.array([[0, 1, 2], [5, 0, 7]], dtype=np.int32), (4, 5, 4), axis=1),
}
IDS = {
    "query_ids": np.array([[0, 0, 1, 1, 2], [3, 1, 1, 0, 0]], dtype=np.int32),
    "key_ids": np.array([[0, 0, 0, 1, 1, 2, 9], [3, 1, 1, 1, 0, 0, 0]], dtype=np.int32),
}


def ints(**numbers: Any) -> dict[str, NumpyArray]:
    """Arrays of integers, such as a number for each entry."""
    return {name: np.array(each, dtype=np.int32) for name, each in numbers.items()}


def steepness(draw: Draw) -> dict[str, NumpyArray]:
    """What a change of the scores needs."""
    return {"factor": draw.normal(mean=1.0), "distance_factor": draw.normal(deviation=0.25)}


def masked(*rows: int) -> Drawn:
    """A mask under which these queries see nothing; most have this shape, so that compiled code is shared."""
    return lambda draw: {"mask": put(draw.mask(2, 1, 5, 7), (..., rows, slice(None)), False)}


def hiding(*columns: int) -> Drawn:
    """A mask under which no query sees these keys."""
    return lambda draw: {"mask": put(draw.mask(2, 1, 5, 7), (..., columns), False)}


def shut(draw: Draw) -> dict[str, NumpyArray]:
    """A bias of -inf for one key, and for all keys of one query."""
    bias = draw.normal(3, 5, 7)
    bias[..., 4] = bias[..., 2, :] = -math.inf
    return {"bias": bias}


def lowest_bias(draw: Draw) -> dict[str, NumpyArray]:
    """A bias that is the least finite number for all keys of one query; all scores are 0."""
    lowest = -65504.0 if draw.dtype == "float16" else -3e38
    bias = put(draw.normal(3, 5, 7), (slice(None), 2), lowest)
    return {"query": draw.array(np.zeros((2, 3, 5, draw.width))), "bias": bias}


def without_flags(problem: Problem) -> Problem:
    """The same problem with nothing but the output asked for."""
    return problem.changed(options={name: option for name, option in problem.options.items() if name not in BOTH})


CONTRACT = (
    case("mask", inputs(MASK, drawn(mask=(2, 3, 5, 7)))),
    case("mask-over-keys", inputs(MASK, drawn(mask=(7,)))),
    case("bias", inputs(None, drawn(bias=(3, 5, 7)))),
    case("mask-and-bias", inputs(MASK, drawn(mask=(2, 1, 5, 7), bias=(3, 1, 7)))),
    case("key-lengths", inputs(LENGTHS, ints(lengths=(3, 7)))),
    case("segments", inputs(SEGMENTS, IDS)),
    case("masks-combined", inputs(((CAUSAL | LENGTHS) & ~SEGMENTS) | MASK, IDS, ints(lengths=(2, 4)), masked())),
    case("mask-function", inputs(PERIODIC | CAUSAL, ints(period=3), heads=6, groups=3)),
    case("causal-more-keys", inputs(is_causal=True)),
    case("causal-more-queries", inputs(CAUSAL, rows=7, columns=5)),
    case("causal-and-mask", inputs(MASK, masked(), is_causal=True)),
    case("causal-after-cache", inputs(Rule("Causal", {"offset": 2}))),
    case("causal-negative-offset", inputs(Rule("Causal", {"offset": -2}), **BOTH)),
    case("causal-offset-per-entry", inputs(Rule("Causal", {"offset": "offset"}), ints(offset=(-1, 3)))),
    case("window", inputs(WINDOW)),
    case("window-offset-per-entry",
         inputs(Rule("SlidingWindow", {"left": 1, "offset": "offset"}), ints(offset=(-3, 2)))),
    case("causal-offset-hides-blocks",
         inputs(Rule("Causal", {"offset": "offset"}), ints(offset=(-6, 9)), rows=9, columns=10, **BOTH)),
    case("documents-in-a-window",
         inputs(Rule("SlidingWindow", {"left": 3, "right": 1}) & SEGMENTS, DOCUMENTS, rows=11, columns=13)),
    case("pieces", inputs(CAUSAL | PERIODIC, ints(period=2), drawn(bias=(3, 5, 7)), pieces=((4, 7), (0, 1), (1, 4)),
             return_logsumexp=True), merged),
    case("pieces-empty", inputs(LENGTHS, ints(lengths=(0, 4)), pieces=((5, 7), (2, 5), (0, 2)), return_logsumexp=True),
         bound=merged),
    case("empty-row-mask", inputs(MASK, masked(1, 4), **BOTH)),
    case("empty-row-bias", inputs(None, shut, **BOTH, put={"value": ((4, 1), math.nan)})),
    case("empty-row-lengths", inputs(LENGTHS, ints(lengths=(0, 4)), **BOTH)),
    case("empty-everywhere", inputs(MASK, {"mask": np.zeros((2, 1, 5, 7), dtype=bool)}, **BOTH)),
    case("empty-row-unknown-query", inputs(MASK, masked(2), **BOTH, put={"query": ((2, 0), math.nan)})),
    case("lowest-finite-bias", inputs(None, lowest_bias), bound=exact_scores),
    case("masked-nan-value", inputs(MASK, hiding(4), put={"value": ((4, 1), math.nan)})),
    case("masked-inf-value", inputs(MASK, hiding(4), put={"value": ((4, 1), math.inf)})),
    case("masked-nan-key", inputs(MASK, hiding(4), put={"key": ((4, 3), math.nan)})),
    case("masked-inf-key", inputs(MASK, hiding(4), put={"key": ((4, 3), -math.inf)})),
    case("masked-future", inputs(is_causal=True, put={"value": ((2, 0), math.nan), "key": ((4, 3), math.nan)})),
    case("masked-padding", inputs(LENGTHS, ints(lengths=(3, 5)), put={"value": ((6, 0), math.nan)})),
    case("attended-nan-value", inputs(MASK, masked(), put={"value": ((3, 2), math.nan)})),
    case("attended-inf-value", inputs(MASK, masked(), put={"value": ((3, 2), -math.inf)})),
    case("attended-nan-key", inputs(MASK, masked(), put={"key": ((3, 2), math.nan)})),
    case("weights", inputs(MASK, masked(), **BOTH)),
    case("weights-change-nothing", inputs(MASK, masked(2), **BOTH), measure="exact", twin=without_flags),
    case("weights-change-nothing-unmasked", inputs(**BOTH), measure="exact", twin=without_flags),
    case("scale", inputs(scale=0.7)),
    case("scale-zero", inputs(scale=0.0)),
    case("softcap", inputs(softcap=1.5)),
    case("softcap-before-bias-and-mask",
         inputs(MASK, masked(), lambda d: {"bias": d.normal(3, 5, 7, deviation=3.0)}, softcap=0.75, **BOTH)),
    case("score-mod",
         inputs(MASK, masked(3), steepness, drawn(bias=(3, 5, 7)), score_mod=STEEPENED, softcap=1.5, **BOTH),
         bound=hard),
    case("alibi", inputs(CAUSAL, heads=8, groups=2, score_mod=Rule("alibi", {"num_heads": 8}))),
    case("alibi-offset-per-entry", inputs(None, ints(offset=(-2, 4)), heads=6, groups=3, score_mod=Rule("alibi",
             {"num_heads": 6, "offset": "offset"}))),
    case("relative-bias", inputs(None, drawn(table=(8, 3)), score_mod=RELATIVE)),
    case("sinks", inputs(MASK, masked(1, 4), drawn(sinks=(3,)), **BOTH)),
    case("dtype-is-kept", inputs(**BOTH), compiled=("float16", "bfloat16", "float32", "float64")),
    case("grouped-heads", inputs(MASK, drawn(mask=(6, 5, 7)), heads=6, groups=3)),
    case("one-key-head", inputs(heads=4, groups=1)),
    case("no-leading-axis", inputs(is_causal=True, leading=())),
    case("five-leading-axes", inputs(MASK, drawn(mask=(1, 3, 1, 2, 1, 5, 7)), leading=(2, 1, 3, 1, 2))),
    case("no-queries", inputs(rows=0, **BOTH)),
    case("no-keys", inputs(columns=0, **BOTH)),
    case("no-keys-causal", inputs(columns=0, is_causal=True)),
    case("no-entries", inputs(leading=(0,), **BOTH)),
    case("no-channels", inputs(None, drawn(value=(2, 3, 7, 0)), is_causal=True)),
    case("wide-values", inputs(None, drawn(value=(2, 3, 7, 13)))),
    case("dropout", inputs(dropout=Seed(0.4, 7))),
    case("dropout-wide-seed", inputs(MASK, masked(), heads=6, groups=2, dropout=Seed(0.25, 2**63 + 2**33 + 5)),
         compiled=()),
    case("dropout-weights", inputs(dropout=Seed(0.5, 3), **BOTH), compiled=()),
)  # fmt: skip
"""The contract, line by line."""

gradient = functools.partial(case, measure="gradient")

DIFFERENTIATED = (
    gradient("gradient", inputs(gradient=True), compiled=("float16", "bfloat16", "float32", "float64")),
    gradient("gradient-mask-and-bias", inputs(MASK, drawn(mask=(2, 1, 5, 7), bias=(3, 1, 7)), gradient=True)),
    gradient("gradient-structured",
             inputs(Rule("SlidingWindow", {"left": 2, "right": 1}) & LENGTHS, ints(lengths=(4, 7)), gradient=True)),
    gradient("gradient-causal", inputs(CAUSAL, gradient=True)),
    gradient("gradient-empty-row", inputs(MASK, masked(1, 4), gradient=True)),
    gradient("gradient-empty-row-bias", inputs(None, shut, gradient=True)),
    gradient("gradient-empty-lengths", inputs(LENGTHS, ints(lengths=(0, 5)), gradient=True)),
    gradient("gradient-masked-nonfinite",
             inputs(MASK, hiding(4), gradient=True, put={"value": ((4, 1), math.nan), "key": ((4, 2), math.inf)})),
    gradient("gradient-softcap", inputs(softcap=1.5, gradient=True)),
    gradient("gradient-score-mod", inputs(MASK, masked(3), steepness, score_mod=STEEPENED, softcap=1.5, gradient=True),
             bound=hard),
    gradient("gradient-relative-bias", inputs(CAUSAL, drawn(table=(8, 3)), gradient=True, score_mod=RELATIVE)),
    gradient("gradient-sinks", inputs(MASK, masked(1), drawn(sinks=(3,)), gradient=True)),
    gradient("gradient-grouped", inputs(heads=6, groups=3, gradient=True)),
    gradient("gradient-no-keys", inputs(columns=0, gradient=True)),
    gradient("gradient-dropout", inputs(dropout=Seed(0.4, 7), gradient=True)),
    gradient("gradient-large-scores", inputs(scale=4.0, gradient=True), bound=hard, dtypes=("float32", "float64")),
)  # fmt: skip
"""The gradients in query, key, value, bias, sinks, and the arrays of what changes scores."""
