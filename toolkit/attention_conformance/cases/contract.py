"""Cases that show the contract of attention, line by line, and those of gradients; line 12 is about errors alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from attention_conformance.cases.case import Case, Draw, Drawn, drawn, exact_scores, hard, inputs, merged
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
    Case("mask", 1, "A boolean mask says True where a query may attend to a key.",
         inputs(MASK, drawn(mask=(2, 3, 5, 7)))),
    Case("mask-over-keys", 1, "A mask of the last axis alone is broadcast from the right.",
         inputs(MASK, drawn(mask=(7,)))),
    Case("bias", 1, "A bias is added to the scaled scores.", inputs(None, drawn(bias=(3, 5, 7)))),
    Case("mask-and-bias", 1, "A mask and a bias may be given at once.",
         inputs(MASK, drawn(mask=(2, 1, 5, 7), bias=(3, 1, 7)))),
    Case("key-lengths", 2, "KeyLengths allows the first keys of every entry.", inputs(LENGTHS, ints(lengths=(3, 7)))),
    Case("segments", 2, "Segments allows the keys of the query's own segment.", inputs(SEGMENTS, IDS)),
    Case("masks-combined", 2, "Structured masks and boolean arrays combine with & | and ~.",
         inputs(((CAUSAL | LENGTHS) & ~SEGMENTS) | MASK, IDS, ints(lengths=(2, 4)), masked())),
    Case("mask-function", 2, "MaskFunction allows what a function of positions does.",
         inputs(PERIODIC | CAUSAL, ints(period=3), heads=6, groups=3)),
    Case("causal-more-keys", 3, "Causal attention counts from the top left, also with more keys than queries.",
         inputs(is_causal=True)),
    Case("causal-more-queries", 3, "Causal attention counts from the top left, also with more queries than keys.",
         inputs(CAUSAL, rows=7, columns=5)),
    Case("causal-and-mask", 3, "Causal attention and a mask exclude what either excludes.",
         inputs(MASK, masked(), is_causal=True)),
    Case("causal-after-cache", 3, "With P keys in a cache, the offset is P.", inputs(Rule("Causal", {"offset": 2}))),
    Case("causal-negative-offset", 3, "An offset may be negative; the first queries then see nothing.",
         inputs(Rule("Causal", {"offset": -2}), **BOTH)),
    Case("causal-offset-per-entry", 3, "An offset may differ along the leading axes.",
         inputs(Rule("Causal", {"offset": "offset"}), ints(offset=(-1, 3)))),
    Case("window", 3, "A window counts in absolute positions around the query.", inputs(WINDOW)),
    Case("window-offset-per-entry", 3, "A window counts in the same positions as causal attention.",
         inputs(Rule("SlidingWindow", {"left": 1, "offset": "offset"}), ints(offset=(-3, 2)))),
    Case("causal-offset-hides-blocks", 3, "An offset may hide all from most queries, and nothing in another entry.",
         inputs(Rule("Causal", {"offset": "offset"}), ints(offset=(-6, 9)), rows=9, columns=10, **BOTH)),
    Case("documents-in-a-window", 3, "A window slides within documents.",
         inputs(Rule("SlidingWindow", {"left": 3, "right": 1}) & SEGMENTS, DOCUMENTS, rows=11, columns=13)),
    Case("pieces", 3, "The keys may come in pieces, in any order: positions are those in the whole.",
         inputs(CAUSAL | PERIODIC, ints(period=2), drawn(bias=(3, 5, 7)), pieces=((4, 7), (0, 1), (1, 4)),
                return_logsumexp=True),
         merged),
    Case("pieces-empty", 3, "A piece in which a row is fully masked changes nothing.",
         inputs(LENGTHS, ints(lengths=(0, 4)), pieces=((5, 7), (2, 5), (0, 2)), return_logsumexp=True), bound=merged),
    Case("empty-row-mask", 4, "A query whose mask is False everywhere gives exactly 0, and logsumexp -inf.",
         inputs(MASK, masked(1, 4), **BOTH)),
    Case("empty-row-bias", 4, "A bias of -inf excludes a key just as a mask does.",
         inputs(None, shut, **BOTH, put={"value": ((4, 1), math.nan)})),
    Case("empty-row-lengths", 4, "A key length of 0 gives exactly 0.", inputs(LENGTHS, ints(lengths=(0, 4)), **BOTH)),
    Case("empty-everywhere", 4, "A mask that is False everywhere gives exactly 0 everywhere.",
         inputs(MASK, {"mask": np.zeros((2, 1, 5, 7), dtype=bool)}, **BOTH)),
    Case("empty-row-unknown-query", 4, "A query of NaN whose row is fully masked gives exactly 0.",
         inputs(MASK, masked(2), **BOTH, put={"query": ((2, 0), math.nan)})),
    Case("lowest-finite-bias", 4, "Very low scores do not make a row empty: the average is over all its keys.",
         inputs(None, lowest_bias), bound=exact_scores),
    Case("masked-nan-value", 5, "A masked value of nan never leaks.",
         inputs(MASK, hiding(4), put={"value": ((4, 1), math.nan)})),
    Case("masked-inf-value", 5, "A masked value of infinity never leaks.",
         inputs(MASK, hiding(4), put={"value": ((4, 1), math.inf)})),
    Case("masked-nan-key", 5, "A masked key of nan never leaks.",
         inputs(MASK, hiding(4), put={"key": ((4, 3), math.nan)})),
    Case("masked-inf-key", 5, "A masked key of infinity never leaks.",
         inputs(MASK, hiding(4), put={"key": ((4, 3), -math.inf)})),
    Case("masked-future", 5, "Causal attention does not see NaN in the future, and sees it once it is past.",
         inputs(is_causal=True, put={"value": ((2, 0), math.nan), "key": ((4, 3), math.nan)})),
    Case("masked-padding", 5, "NaN and infinities in the padding never leak.",
         inputs(LENGTHS, ints(lengths=(3, 5)), put={"value": ((6, 0), math.nan)})),
    Case("attended-nan-value", 5, "An attended value of nan gives nan, in its channel only.",
         inputs(MASK, masked(), put={"value": ((3, 2), math.nan)})),
    Case("attended-inf-value", 5, "An attended value of infinity gives infinity, in its channel only.",
         inputs(MASK, masked(), put={"value": ((3, 2), -math.inf)})),
    Case("attended-nan-key", 5, "An attended key of nan gives nan to the queries that see it only.",
         inputs(MASK, masked(), put={"key": ((3, 2), math.nan)})),
    Case("weights", 6, "Weights are the probabilities, logsumexp the logarithm of their normalizer.",
         inputs(MASK, masked(), **BOTH)),
    Case("weights-change-nothing", 6, "Asking for weights and logsumexp leaves the output as it is, bit by bit.",
         inputs(MASK, masked(2), **BOTH), measure="exact", twin=without_flags),
    Case("weights-change-nothing-unmasked", 6, "The same without a mask.", inputs(**BOTH), measure="exact",
         twin=without_flags),
    Case("scale", 7, "A scale replaces the square root of the head dimension.", inputs(scale=0.7)),
    Case("scale-zero", 7, "A scale of 0 averages.", inputs(scale=0.0)),
    Case("softcap", 7, "Softcap is c tanh(s / c) on the scaled score.", inputs(softcap=1.5)),
    Case("softcap-before-bias-and-mask", 7, "Softcap comes before bias and mask.",
         inputs(MASK, masked(), lambda d: {"bias": d.normal(3, 5, 7, deviation=3.0)}, softcap=0.75, **BOTH)),
    Case("score-mod", 7, "A change of the scores comes after softcap, before bias and mask.",
         inputs(MASK, masked(3), steepness, drawn(bias=(3, 5, 7)), score_mod=STEEPENED, softcap=1.5, **BOTH),
         bound=hard),
    Case("alibi", 7, "Scores fall with the distance, in every head at a rate of its own.",
         inputs(CAUSAL, heads=8, groups=2, score_mod=Rule("alibi", {"num_heads": 8}))),
    Case("alibi-offset-per-entry", 7, "The offset of positions may differ along the leading axes, as for masks.",
         inputs(None, ints(offset=(-2, 4)), heads=6, groups=3,
                score_mod=Rule("alibi", {"num_heads": 6, "offset": "offset"}))),
    Case("relative-bias", 7, "Every bucket of distances has a number that is added to the scores.",
         inputs(None, drawn(table=(8, 3)), score_mod=RELATIVE)),
    Case("sinks", 7, "A sink takes a share of the weights, and all of them in a fully masked row.",
         inputs(MASK, masked(1, 4), drawn(sinks=(3,)), **BOTH)),
    Case("dtype-is-kept", 8, "The output has the dtype of the query, rounded once.", inputs(**BOTH),
         compiled=("float16", "bfloat16", "float32", "float64")),
    Case("grouped-heads", 9, "Query head h uses key head h // (H / G).",
         inputs(MASK, drawn(mask=(6, 5, 7)), heads=6, groups=3)),
    Case("one-key-head", 9, "All query heads may share one key head.", inputs(heads=4, groups=1)),
    Case("no-leading-axis", 10, "There need be no leading axis.", inputs(is_causal=True, leading=())),
    Case("five-leading-axes", 10, "There may be many leading axes.",
         inputs(MASK, drawn(mask=(1, 3, 1, 2, 1, 5, 7)), leading=(2, 1, 3, 1, 2))),
    Case("no-queries", 10, "No queries give an empty output.", inputs(rows=0, **BOTH)),
    Case("no-keys", 10, "No keys give exactly 0.", inputs(columns=0, **BOTH)),
    Case("no-keys-causal", 10, "No keys give exactly 0, under a mask as well.", inputs(columns=0, is_causal=True)),
    Case("no-entries", 10, "A leading axis may be empty.", inputs(leading=(0,), **BOTH)),
    Case("no-channels", 10, "Values may have no elements.", inputs(None, drawn(value=(2, 3, 7, 0)), is_causal=True)),
    Case("wide-values", 10, "Values may be wider than keys.", inputs(None, drawn(value=(2, 3, 7, 13)))),
    Case("dropout", 11, "What is dropped depends on seed and position alone, and is the same everywhere.",
         inputs(dropout=Seed(0.4, 7))),
    Case("dropout-wide-seed", 11, "All 64 bits of a seed count.",
         inputs(MASK, masked(), heads=6, groups=2, dropout=Seed(0.25, 2**63 + 2**33 + 5)), compiled=()),
    Case("dropout-weights", 11, "Weights are returned before dropout.", inputs(dropout=Seed(0.5, 3), **BOTH),
         compiled=()),
)  # fmt: skip
"""The contract, line by line."""

gradient = functools.partial(Case, measure="gradient")

DIFFERENTIATED = (
    gradient("gradient", 0, "The gradients of the plain definition.", inputs(gradient=True),
             compiled=("float16", "bfloat16", "float32", "float64")),
    gradient("gradient-mask-and-bias", 1, "The gradient in a bias that is broadcast is summed.",
             inputs(MASK, drawn(mask=(2, 1, 5, 7), bias=(3, 1, 7)), gradient=True)),
    gradient("gradient-structured", 2, "The gradients under structured masks.",
             inputs(Rule("SlidingWindow", {"left": 2, "right": 1}) & LENGTHS, ints(lengths=(4, 7)), gradient=True)),
    gradient("gradient-causal", 3, "The gradients of causal attention.", inputs(CAUSAL, gradient=True)),
    gradient("gradient-empty-row", 4, "A query that sees nothing has the gradient 0, and gives none.",
             inputs(MASK, masked(1, 4), gradient=True)),
    gradient("gradient-empty-row-bias", 4, "The same where a bias of -inf excludes.",
             inputs(None, shut, gradient=True)),
    gradient("gradient-empty-lengths", 4, "The same for a key length of 0.",
             inputs(LENGTHS, ints(lengths=(0, 5)), gradient=True)),
    gradient("gradient-masked-nonfinite", 5, "Masked NaN and infinities reach no gradient.",
             inputs(MASK, hiding(4), gradient=True, put={"value": ((4, 1), math.nan), "key": ((4, 2), math.inf)})),
    gradient("gradient-softcap", 7, "The gradients through the softcap.", inputs(softcap=1.5, gradient=True)),
    gradient("gradient-score-mod", 7, "The gradients through a change of the scores, and in its arrays.",
             inputs(MASK, masked(3), steepness, score_mod=STEEPENED, softcap=1.5, gradient=True), bound=hard),
    gradient("gradient-relative-bias", 7, "The gradient in the number of a bucket is a sum over its distances.",
             inputs(CAUSAL, drawn(table=(8, 3)), gradient=True, score_mod=RELATIVE)),
    gradient("gradient-sinks", 7, "The gradients with a sink, and in it.",
             inputs(MASK, masked(1), drawn(sinks=(3,)), gradient=True)),
    gradient("gradient-grouped", 9, "Shared key heads add up the gradients of their query heads.",
             inputs(heads=6, groups=3, gradient=True)),
    gradient("gradient-no-keys", 10, "The gradients of no keys are empty, and 0 for the queries.",
             inputs(columns=0, gradient=True)),
    gradient("gradient-dropout", 11, "The gradients through dropout.", inputs(dropout=Seed(0.4, 7), gradient=True)),
    gradient("gradient-large-scores", 0, "The gradients where scores are large.", inputs(scale=4.0, gradient=True),
             bound=hard, dtypes=("float32", "float64")),
)  # fmt: skip
"""The gradients in query, key, value, bias, sinks, and the arrays of what changes scores."""
