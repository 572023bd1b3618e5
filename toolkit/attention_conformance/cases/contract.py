"""Cases that show the contract of attention, line by line."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from attention_conformance.cases.case import Case, Draw, exact_scores, hard, merged
from attention_conformance.problem import NumpyArray, Problem, Rule, Seed, array

__all__ = ["CONTRACT", "LINES"]

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


def lengths(*numbers: int) -> dict[str, NumpyArray]:
    """Key lengths, one for each entry."""
    return {"lengths": np.array(numbers, dtype=np.int32)}


def offsets(*numbers: int) -> dict[str, NumpyArray]:
    """Offsets, one for each entry."""
    return {"offset": np.array(numbers, dtype=np.int32)}


def period(number: int) -> dict[str, NumpyArray]:
    """The period of a mask."""
    return {"period": np.array(number, dtype=np.int32)}


def steepness(draw: Draw) -> dict[str, NumpyArray]:
    """What a change of the scores needs."""
    return {"factor": draw.normal(mean=1.0), "distance_factor": draw.normal(deviation=0.25)}


def with_element(problem: Problem, name: str, index: tuple[int, ...], number: float) -> Problem:
    """A problem in which one element of an array is another number."""
    changed = problem.arrays[name].copy()
    full_index: Any = (..., *index)
    changed[full_index] = number
    return replace(problem, arrays={**problem.arrays, name: changed})


def masked(draw: Draw, *rows: int) -> dict[str, NumpyArray]:
    """A mask under which these queries see nothing; most have this shape, so that compiled code is shared."""
    mask = draw.mask(2, 1, 5, 7)
    mask[..., rows, :] = False
    return {"mask": mask}


def hiding(draw: Draw, *columns: int) -> dict[str, NumpyArray]:
    """A mask under which no query sees these keys."""
    mask = draw.mask(2, 1, 5, 7)
    mask[..., columns] = False
    return {"mask": mask}


def masked_value(draw: Draw, number: float) -> Problem:
    """A number in a value that no query may attend to."""
    return with_element(draw.problem(MASK, hiding(draw, 4)), "value", (4, 1), number)


def masked_key(draw: Draw, number: float) -> Problem:
    """A number in a key that no query may attend to."""
    return with_element(draw.problem(MASK, hiding(draw, 4)), "key", (4, 3), number)


def future_nonfinite(draw: Draw) -> Problem:
    """NaN after the first two keys, which causal attention shows to the later queries only."""
    problem = with_element(draw.problem(is_causal=True), "value", (2, 0), math.nan)
    return with_element(problem, "key", (4, 3), math.nan)


def excluded_by_bias(draw: Draw) -> Problem:
    """A bias of -inf for a key that holds NaN, and for all keys of one query."""
    bias = draw.normal(3, 5, 7)
    bias[..., 4] = bias[..., 2, :] = -math.inf
    return with_element(draw.problem(arrays={"bias": bias}, **BOTH), "value", (4, 1), math.nan)


def lowest_bias(draw: Draw) -> Problem:
    """A bias that is the least finite number for all keys of one query; all scores are 0."""
    bias = draw.normal(3, 5, 7)
    bias[:, 2] = -65504.0 if draw.dtype == "float16" else -3e38
    return draw.problem(arrays={"query": draw.array(np.zeros((2, 3, 5, draw.width))), "bias": bias})


def unknown_query_sees_nothing(draw: Draw) -> Problem:
    """A query of NaN whose row is fully masked."""
    return with_element(draw.problem(MASK, masked(draw, 2), **BOTH), "query", (2, 0), math.nan)


def without_flags(problem: Problem) -> Problem:
    """The same problem with nothing but the output asked for."""
    return replace(problem, options={name: option for name, option in problem.options.items() if name not in BOTH})


CONTRACT = (
    Case("mask", 1, "A boolean mask says True where a query may attend to a key.",
         lambda d: d.problem(MASK, {"mask": d.mask(2, 3, 5, 7)})),
    Case("mask-over-keys", 1, "A mask of the last axis alone is broadcast from the right.",
         lambda d: d.problem(MASK, {"mask": d.mask(7)})),
    Case("bias", 1, "A bias is added to the scaled scores.",
         lambda d: d.problem(arrays={"bias": d.normal(3, 5, 7)})),
    Case("mask-and-bias", 1, "A mask and a bias may be given at once.",
         lambda d: d.problem(MASK, {"mask": d.mask(2, 1, 5, 7), "bias": d.normal(3, 1, 7)})),
    Case("key-lengths", 2, "KeyLengths allows the first keys of every entry.",
         lambda d: d.problem(LENGTHS, lengths(3, 7))),
    Case("segments", 2, "Segments allows the keys of the query's own segment.",
         lambda d: d.problem(SEGMENTS, IDS)),
    Case("masks-combined", 2, "Structured masks and boolean arrays combine with & | and ~.",
         lambda d: d.problem(((CAUSAL | LENGTHS) & ~SEGMENTS) | MASK, {**IDS, **lengths(2, 4), **masked(d)})),
    Case("mask-function", 2, "MaskFunction allows what a function of positions does.",
         lambda d: d.problem(PERIODIC | CAUSAL, period(3), heads=6, groups=3)),
    Case("causal-more-keys", 3, "Causal attention counts from the top left, also with more keys than queries.",
         lambda d: d.problem(is_causal=True)),
    Case("causal-more-queries", 3, "Causal attention counts from the top left, also with more queries than keys.",
         lambda d: d.problem(CAUSAL, rows=7, columns=5)),
    Case("causal-and-mask", 3, "Causal attention and a mask exclude what either excludes.",
         lambda d: d.problem(MASK, masked(d), is_causal=True)),
    Case("causal-after-cache", 3, "With P keys in a cache, the offset is P.",
         lambda d: d.problem(Rule("Causal", {"offset": 2}))),
    Case("causal-negative-offset", 3, "An offset may be negative; the first queries then see nothing.",
         lambda d: d.problem(Rule("Causal", {"offset": -2}), **BOTH)),
    Case("causal-offset-per-entry", 3, "An offset may differ along the leading axes.",
         lambda d: d.problem(Rule("Causal", {"offset": "offset"}), offsets(-1, 3))),
    Case("window", 3, "A window counts in absolute positions around the query.",
         lambda d: d.problem(WINDOW)),
    Case("window-offset-per-entry", 3, "A window counts in the same positions as causal attention.",
         lambda d: d.problem(Rule("SlidingWindow", {"left": 1, "offset": "offset"}), offsets(-3, 2))),
    Case("causal-offset-hides-blocks", 3, "An offset may hide all from most queries, and nothing in another entry.",
         lambda d: d.problem(Rule("Causal", {"offset": "offset"}), offsets(-6, 9), rows=9, columns=10, **BOTH)),
    Case("documents-in-a-window", 3, "A window slides within documents.",
         lambda d: d.problem(Rule("SlidingWindow", {"left": 3, "right": 1}) & SEGMENTS, DOCUMENTS,
                             rows=11, columns=13)),
    Case("pieces", 3, "The keys may come in pieces, in any order: positions are those in the whole.",
         lambda d: d.problem(CAUSAL | PERIODIC, {**period(2), "bias": d.normal(3, 5, 7)},
                             pieces=((4, 7), (0, 1), (1, 4)), return_logsumexp=True), bound=merged),
    Case("pieces-empty", 3, "A piece in which a row is fully masked changes nothing.",
         lambda d: d.problem(LENGTHS, lengths(0, 4), pieces=((5, 7), (2, 5), (0, 2)), return_logsumexp=True),
         bound=merged),
    Case("empty-row-mask", 4, "A query whose mask is False everywhere gives exactly 0, and logsumexp -inf.",
         lambda d: d.problem(MASK, masked(d, 1, 4), **BOTH)),
    Case("empty-row-bias", 4, "A bias of -inf excludes a key just as a mask does.", excluded_by_bias),
    Case("empty-row-lengths", 4, "A key length of 0 gives exactly 0.",
         lambda d: d.problem(LENGTHS, lengths(0, 4), **BOTH)),
    Case("empty-everywhere", 4, "A mask that is False everywhere gives exactly 0 everywhere.",
         lambda d: d.problem(MASK, {"mask": np.zeros((2, 1, 5, 7), dtype=bool)}, **BOTH)),
    Case("empty-row-unknown-query", 4, "A query of NaN whose row is fully masked gives exactly 0.",
         unknown_query_sees_nothing),
    Case("lowest-finite-bias", 4, "Very low scores do not make a row empty: the average is over all its keys.",
         lowest_bias, bound=exact_scores),
    Case("masked-nan-value", 5, "A masked value of nan never leaks.", lambda d: masked_value(d, math.nan)),
    Case("masked-inf-value", 5, "A masked value of infinity never leaks.", lambda d: masked_value(d, math.inf)),
    Case("masked-nan-key", 5, "A masked key of nan never leaks.", lambda d: masked_key(d, math.nan)),
    Case("masked-inf-key", 5, "A masked key of infinity never leaks.", lambda d: masked_key(d, -math.inf)),
    Case("masked-future", 5, "Causal attention does not see NaN in the future, and sees it once it is past.",
         future_nonfinite),
    Case("masked-padding", 5, "NaN and infinities in the padding never leak.",
         lambda d: with_element(d.problem(LENGTHS, lengths(3, 5)), "value", (6, 0), math.nan)),
    Case("attended-nan-value", 5, "An attended value of nan gives nan, in its channel only.",
         lambda d: with_element(d.problem(MASK, masked(d)), "value", (3, 2), math.nan)),
    Case("attended-inf-value", 5, "An attended value of infinity gives infinity, in its channel only.",
         lambda d: with_element(d.problem(MASK, masked(d)), "value", (3, 2), -math.inf)),
    Case("attended-nan-key", 5, "An attended key of nan gives nan to the queries that see it only.",
         lambda d: with_element(d.problem(MASK, masked(d)), "key", (3, 2), math.nan)),
    Case("weights", 6, "Weights are the probabilities, logsumexp the logarithm of their normalizer.",
         lambda d: d.problem(MASK, masked(d), **BOTH)),
    Case("weights-change-nothing", 6, "Asking for weights and logsumexp leaves the output as it is, bit by bit.",
         lambda d: d.problem(MASK, masked(d, 2), **BOTH), measure="exact", twin=without_flags),
    Case("weights-change-nothing-unmasked", 6, "The same without a mask.",
         lambda d: d.problem(**BOTH), measure="exact", twin=without_flags),
    Case("scale", 7, "A scale replaces the square root of the head dimension.", lambda d: d.problem(scale=0.7)),
    Case("scale-zero", 7, "A scale of 0 averages.", lambda d: d.problem(scale=0.0)),
    Case("softcap", 7, "Softcap is c tanh(s / c) on the scaled score.", lambda d: d.problem(softcap=1.5)),
    Case("softcap-before-bias-and-mask", 7, "Softcap comes before bias and mask.",
         lambda d: d.problem(MASK, {**masked(d), "bias": d.normal(3, 5, 7, deviation=3.0)}, softcap=0.75, **BOTH)),
    Case("score-mod", 7, "A change of the scores comes after softcap, before bias and mask.",
         lambda d: d.problem(MASK, {**masked(d, 3), **steepness(d), "bias": d.normal(3, 5, 7)}, score_mod=STEEPENED,
                             softcap=1.5, **BOTH), bound=hard),
    Case("alibi", 7, "Scores fall with the distance, in every head at a rate of its own.",
         lambda d: d.problem(CAUSAL, heads=8, groups=2, score_mod=Rule("alibi", {"num_heads": 8}))),
    Case("alibi-offset-per-entry", 7, "The offset of positions may differ along the leading axes, as for masks.",
         lambda d: d.problem(None, offsets(-2, 4), heads=6, groups=3,
                             score_mod=Rule("alibi", {"num_heads": 6, "offset": "offset"}))),
    Case("relative-bias", 7, "Every bucket of distances has a number that is added to the scores.",
         lambda d: d.problem(None, {"table": d.normal(8, 3)},
                             score_mod=Rule("relative_bias", {"table": "table", "max_distance": 5}))),
    Case("sinks", 7, "A sink takes a share of the weights, and all of them in a fully masked row.",
         lambda d: d.problem(MASK, {**masked(d, 1, 4), "sinks": d.normal(3)}, **BOTH)),
    Case("dtype-is-kept", 8, "The output has the dtype of the query, rounded once.",
         lambda d: d.problem(**BOTH), compiled=("float16", "bfloat16", "float32", "float64")),
    Case("autocast", 8, "Under a library's autocast, the output has its dtype, rounded once.",
         lambda d: d.problem(is_causal=True), dtypes=("float16", "bfloat16"),
         compiled=("bfloat16",), measure="autocast"),
    Case("grouped-heads", 9, "Query head h uses key head h // (H / G).",
         lambda d: d.problem(MASK, {"mask": d.mask(6, 5, 7)}, heads=6, groups=3)),
    Case("one-key-head", 9, "All query heads may share one key head.", lambda d: d.problem(heads=4, groups=1)),
    Case("no-leading-axis", 10, "There need be no leading axis.", lambda d: d.problem(is_causal=True, leading=())),
    Case("five-leading-axes", 10, "There may be many leading axes.",
         lambda d: d.problem(MASK, {"mask": d.mask(1, 3, 1, 2, 1, 5, 7)}, leading=(2, 1, 3, 1, 2))),
    Case("no-queries", 10, "No queries give an empty output.", lambda d: d.problem(rows=0, **BOTH)),
    Case("no-keys", 10, "No keys give exactly 0.", lambda d: d.problem(columns=0, **BOTH)),
    Case("no-keys-causal", 10, "No keys give exactly 0, under a mask as well.",
         lambda d: d.problem(columns=0, is_causal=True)),
    Case("no-entries", 10, "A leading axis may be empty.", lambda d: d.problem(leading=(0,), **BOTH)),
    Case("no-channels", 10, "Values may have no elements.",
         lambda d: d.problem(arrays={"value": d.normal(2, 3, 7, 0)}, is_causal=True)),
    Case("wide-values", 10, "Values may be wider than keys.",
         lambda d: d.problem(arrays={"value": d.normal(2, 3, 7, 13)})),
    Case("dropout", 11, "What is dropped depends on seed and position alone, and is the same everywhere.",
         lambda d: d.problem(dropout=Seed(0.4, 7))),
    Case("dropout-wide-seed", 11, "All 64 bits of a seed count.",
         lambda d: d.problem(MASK, masked(d), heads=6, groups=2, dropout=Seed(0.25, 2**63 + 2**33 + 5)),
         compiled=()),
    Case("dropout-weights", 11, "Weights are returned before dropout.",
         lambda d: d.problem(dropout=Seed(0.5, 3), **BOTH), compiled=()),
)  # fmt: skip
