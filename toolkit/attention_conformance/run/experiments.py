"""Why an answer is wrong, found by asking again: without a setting of the call, or with values that show the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from attention_conformance.cases.kernels import KERNELS
from attention_conformance.cases.shapes import NARROW as NARROW_TYPES
from attention_conformance.oracle.dense import answer, dense_of
from attention_conformance.oracle.variants import Variant
from attention_conformance.problem import NumpyArray, Problem
from attention_conformance.run.finding import CONVENTION, WRONG, Finding
from attention_conformance.run.former import CALL, STRIDES
from attention_conformance.run.measures import drawn
from attention_conformance.run.question import Question
from attention_conformance.subjects.fit import meant

Ask = Callable[[Problem], dict[str, NumpyArray]]

UNLIKE = {
    "shuffled": Variant("unlike-shuffled", 10, "samples, heads or keys in another order have another answer"),
    "hidden": Variant("unlike-hidden", 5, "finite keys that are hidden change the answer"),
    "parts": Variant("unlike-parts", 10, "a sample, a head or a query has another answer alone"),
    "again": Variant("unlike-again", 10, "a later call changes the answer, or an earlier one does"),
    "overwritten": Variant("unlike-rewritten", 10, "new numbers in the same memory are not read"),
}
"""What is wrong where one call is right, by the measure of several."""

SUMS = Variant("narrow-sums", 8, "sums are rounded to 16 bits, which loses what many keys add up to")
LOST = Variant("lost-keys", 10, "keys {} to {} of {} are not attended to")
SEEN = Variant("hidden-keys", 1, "hidden keys from {} on have weights")
SUM = Variant(
    "other-sum", 8, "all weights are {:.3g} times what they should be: the sum counts more, or less, than the keys"
)
SCALED = Variant("stale-blocks", 8, "weights of the keys before {} are {:.3g} times, and of others {:.3g} times, what they "
                 "should be: a block counts twice, or is not scaled to a new maximum")  # fmt: skip
OTHER = Variant("other-values", 9, "head {} of sample {} reads the values of head {} of sample {}")

EXPERIMENTS = (*UNLIKE.values(), SUMS, LOST, SEEN, SUM, SCALED, OTHER)
"""All that is told here."""

AVERAGE = next(case for case in KERNELS if case.name == "average-32768")
MOST_UNITS = 3.0
"""Units of 16 bits within which an average of one sign is."""

TOLD = ("variant", "says", "line", "equals", "rejected")


def simplest(question: Question, judge: Callable[[Question], Finding]) -> tuple[Finding | None, Variant | None, bool]:
    """The finding of a simpler question that is wrong, too, or what is wrong as a simpler one is right.

    The last says whether the same is right in float32, where it is asked for in 16 bits.
    """
    is_wide_right = False
    for name, other, variant in _simpler(question):
        known, key = question.subject.known, (name, other.case.name, other.case.measure, other.dtype, other.seed)
        if key not in known:
            known[key] = judge(replace(other, power=False))
        told = known[key]
        if told.verdict in (*WRONG, CONVENTION, "accepted"):
            return told, None, False
        if told.verdict == "right" and variant is not None:
            return None, variant, is_wide_right
        is_wide_right = is_wide_right or told.verdict == "right"
    return None, None, is_wide_right


def _simpler(question: Question) -> Iterator[tuple[str, Question, Variant | None]]:
    """The question without one of its settings, and what that setting is called where the rest is right."""
    case, inputs = question.case, question.case.inputs
    if question.dtype in NARROW_TYPES and question.narrow_is_habit:
        yield "wide", replace(question, dtype="float32"), None
    if case.measure in UNLIKE:
        yield "law", replace(question, case=replace(case, measure="ulp")), UNLIKE[case.measure]
    kinds = set(drawn(question).memory.values()) - {"contiguous", "query"}
    if kinds and not case.memory:
        plain = replace(case, inputs=lambda draw: inputs(draw).changed(memory={}))
        yield "memory", replace(question, case=plain), STRIDES
    if case.before is not None:
        yield "before", replace(question, case=replace(case, before=None)), CALL


def has_narrow_sums(question: Question, judge: Callable[[Question], Finding]) -> bool:
    """Whether an average of many values of one sign is off by more than its rounding."""
    known, key = question.subject.known, (AVERAGE.name, question.dtype)
    if key not in known:
        known[key] = judge(replace(question, case=AVERAGE, power=False, causes=False))
    return bool(known[key].verdict == "silently wrong" and known[key].error > MOST_UNITS)


def read(question: Question, problem: Problem, row: tuple[int, ...], ask: Ask) -> Variant | None:
    """What the weights of a row are, and of which head, as values that are indicators show it."""
    if problem.cotangent is not None or problem.score_mod is not None or len(problem.sizes[0]) != 1:
        return None
    sample, head, query = row
    value, shared = problem.arrays["value"], problem.sizes[1] // problem.arrays["value"].shape[1]
    groups, keys, width = value.shape[1:]
    weights = (
        answer(dense_of(meant(problem, question.subject))).arrays["weights"][sample, head, query].astype(np.float64)
    )
    plain = problem.changed(memory={name: each for name, each in problem.memory.items() if name != "value"})

    def shown(codes: NumpyArray) -> NumpyArray:
        """What the row gives for other values."""
        arrays = {
            **plain.arrays,
            "value": np.ascontiguousarray(np.broadcast_to(codes, value.shape)).astype(value.dtype),
        }
        return np.asarray(ask(plain.changed(arrays=arrays))["output"][row].astype(np.float64))

    def sums(start: int, size: int) -> tuple[NumpyArray, NumpyArray]:
        """What blocks of keys have for weights, and should have."""
        at = (np.arange(keys) - start) // size
        codes = (at[:, None] == np.arange(width)).astype(np.float64)
        return shown(codes), weights @ codes

    own = sample * groups + head // shared
    of_heads = np.arange(value.shape[0] * groups).reshape(-1, groups, 1, 1) % width == np.arange(width)
    got = shown(of_heads.astype(np.float64))
    if weights.sum() > 0.5 and got.argmax() != own % width and got.max() > 0.9:
        other = int(got.argmax())
        return _worded(OTHER, head, sample, other % groups, other // groups)
    size = -(-keys // width)
    got, expected = sums(0, size)
    if not np.isfinite(got).all():
        return None
    least = 1e-3 / width
    if ((expected == 0) & (got > least)).any():
        return _worded(SEEN, int(np.argmax((expected == 0) & (got > least))) * size)
    lost = (expected > least) & (got < expected / 2)
    ratios = got[expected > least] / expected[expected > least]
    if not ratios.size or abs(ratios - 1).max() < 1e-2:
        return None
    if ratios.max() - ratios.min() < 1e-2 * ratios.max():
        return _worded(SUM, ratios.mean())
    if lost.any() and (got[lost] < 0.9 * expected[lost]).all() and got[~lost].size:
        edges = []
        for block, last in ((int(np.flatnonzero(lost)[0]), False), (int(np.flatnonzero(lost)[-1]), True)):
            start = block * size
            got_each, each = sums(start, 1) if size <= width else (got, expected)
            gone = np.flatnonzero((got_each < each / 10) & (each > 0)) if size <= width else np.asarray([0, size - 1])
            gone = gone[gone < size]
            edges.append(start + int(gone[-1 if last else 0]) if gone.size else -1)
        if min(edges) >= 0:
            return _worded(LOST, *edges, keys)
    steps = np.flatnonzero(abs(np.diff(ratios)) > 1e-2 * ratios.max())
    if steps.size and ratios.size > 2:
        cut = int(steps[0]) + 1
        return _worded(SCALED, cut * size, ratios[:cut].mean(), ratios[cut:].mean())
    return None


def _worded(variant: Variant, *facts: object) -> Variant:
    return replace(variant, says=variant.says.format(*facts))
