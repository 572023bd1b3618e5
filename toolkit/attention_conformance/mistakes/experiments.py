"""Why an answer is wrong, found by asking again: without a setting, or with values that show the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from attention_conformance.cases.case import Draw
from attention_conformance.cases.kernels import KERNELS
from attention_conformance.cases.shapes import NARROW as NARROW_TYPES
from attention_conformance.launch.fit import fit, meant
from attention_conformance.measure.finding import CONVENTION, WRONG, Finding
from attention_conformance.measure.measures import drawn
from attention_conformance.measure.properties import positioned, taken
from attention_conformance.measure.question import Question
from attention_conformance.mistakes.former import CALL, STRIDES
from attention_conformance.mistakes.variants import Variant
from attention_conformance.oracle.dense import Dense, answer, dense_of
from attention_conformance.oracle.positions import passes
from attention_conformance.problem import NumpyArray, Problem

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
SUM = Variant("other-sum", 8, "all weights are {:.3g} times what they should be: the sum {}")
MORE, LESS = "counts more than the keys, as where padding or a sink adds to it", "lacks keys, or does not divide"
STALE = Variant("unscaled-maximum", 8, "right where scores fall from key to key: not all is scaled to a new maximum")
SCALED = Variant("other-weights", 8, "weights of the keys before {} are {:.3g} times, and others {:.3g} times, what "
                 "they should be: some block has another scale, or counts twice")  # fmt: skip
ROW = Variant("mask-of-another", 1, "query {}, head {}, sample {} has the mask or bias of query {}, head {}, sample {}")
OTHER = Variant("other-values", 9, "head {} of sample {} reads the values of head {} of sample {}")

SINKS = Variant("sinks-of-others", 7, "right where all heads have one sink: a head gets the sink of another")
STATE = Variant("state", 10, "right in a process of its own: what is kept of calls before, or their order, matters")
THREADS = Variant("threads", 10, "right with one thread, and wrong with several: threads race")

EXPERIMENTS = (*UNLIKE.values(), SUMS, SINKS, STATE, THREADS, LOST, SEEN, SUM, STALE, SCALED, ROW, OTHER)
"""All that is told here."""

AVERAGE = next(case for case in KERNELS if case.name == "average-32768")
MOST_UNITS = 3.0
"""Units of 16 bits within which an average of one sign is."""

ALIKE = 0.02
"""How far ratios of weights that are right lie apart."""

CAUSE = ("variant", "says", "line", "equals", "rejected")


def is_exact(cause: str) -> bool:
    """Whether a cause gives the numbers that were wrong, and not their kind alone."""
    return bool(cause) and cause not in {each.name for each in EXPERIMENTS}


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
        yield "relation", replace(question, case=replace(case, measure="ulp")), UNLIKE[case.measure]
    kinds = set(drawn(question).memory.values()) - {"contiguous", "query"}
    if kinds and not case.memory:
        plain = replace(case, inputs=lambda draw: inputs(draw).changed(memory={}))
        yield "memory", replace(question, case=plain), STRIDES
    if case.before is not None:
        yield "before", replace(question, case=replace(case, before=None)), CALL


def has_narrow_sums(question: Question, judge: Callable[[Question], Finding]) -> bool:
    """Whether an average of many values of one sign, with as many channels, is off by more than its rounding."""
    width = drawn(question).arrays["query"].shape[-1]

    def of_width(draw: Draw) -> Problem:
        problem = AVERAGE.inputs(draw)
        arrays = {name: each[..., np.arange(width) % each.shape[-1]] for name, each in problem.arrays.items()}
        return problem.changed(arrays=arrays)

    known, key = question.subject.known, (AVERAGE.name, question.dtype, width)
    if key not in known:
        average = replace(AVERAGE, inputs=of_width)
        known[key] = judge(replace(question, case=average, power=False, causes=False))
    return bool(known[key].verdict == "silently wrong" and known[key].error > MOST_UNITS)


def mixes_sinks(question: Question, judge: Callable[[Question], Finding]) -> bool:
    """Whether it is right where all heads have one sink."""
    problem, case = drawn(question), question.case
    if "sinks" not in problem.arrays:
        return False
    one = problem.holding(sinks=np.full_like(problem.arrays["sinks"], problem.arrays["sinks"].max()))
    return judge(replace(question, case=replace(case, inputs=lambda _: one), power=False, causes=False)).passed is True


def read(question: Question, problem: Problem, row: tuple[int, ...], ask: Ask) -> Variant | None:
    """What the weights of a row are, and of which head, as values that are indicators show it."""
    if problem.cotangent is not None or problem.score_mod is not None or len(problem.sizes[0]) != 1:
        return None
    sample, head, _ = row
    value, shared = problem.arrays["value"], problem.sizes[1] // problem.arrays["value"].shape[1]
    groups, keys, width = value.shape[1:]
    dense = dense_of(meant(problem, question.subject))
    weights = answer(dense).arrays["weights"][row].astype(np.float64)
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

    entry = sample * groups + head // shared
    of_heads = np.arange(value.shape[0] * groups).reshape(-1, groups, 1, 1) % width == np.arange(width)
    got = shown(of_heads.astype(np.float64))
    if weights.sum() > 0.5 and got.argmax() != entry % width and got.max() > 0.9:
        other = int(got.argmax())
        return _worded(OTHER, head, sample, other % groups, other // groups)
    if another := _of_another(dense, row, ask(problem)["output"][row]):
        return another
    size = -(-keys // width)
    got, expected = sums(0, size)
    least = 1e-3 / width
    hidden, attended = (expected == 0) & (got > least), expected > least
    if not (np.isfinite(got).all() and attended.any()):
        return None
    if hidden.any():
        return _worded(SEEN, int(hidden.argmax()) * size)
    ratios, (blocks,) = got[attended] / expected[attended], np.nonzero(attended)
    if abs(ratios - 1).max() < ALIKE:
        return None
    lost = blocks[ratios < 0.1]
    if lost.size and size <= width:
        first, last = int(lost[0]) * size, int(lost[-1]) * size
        before = max(0, first - size + 1)
        gone = [start + np.flatnonzero(_gone(*sums(start, 1))) for start in (before, last)]
        return _worded(LOST, gone[0][0], gone[1][-1] if size == 1 else _end(gone[1]), keys)
    if _falling(question, problem, row, weights, ask) < abs(ratios - 1).max() / 10:
        return STALE
    if np.ptp(ratios) < ALIKE * ratios.max():
        return _worded(SUM, ratios.mean(), MORE if ratios.mean() < 1 else LESS)
    (steps,) = np.nonzero(abs(np.diff(ratios)) > ALIKE * ratios.max())
    cut = int(steps[0]) + 1
    return _worded(SCALED, int(blocks[cut]) * size, ratios[:cut].mean(), ratios[cut:].mean())


def _of_another(dense: Dense, row: tuple[int, ...], got: NumpyArray) -> Variant | None:
    """Whether a row is what the mask and the bias of another row make of it."""
    if (dense.mask is None and dense.bias is None) or dense.softcap is not None or dense.sinks is not None:
        return None
    if not dense.through[row].any():  # of which conventions are
        return None
    sample, head, query = row
    with np.errstate(all="ignore"):
        bias = np.where(dense.through, 0 if dense.bias is None else dense.bias, -np.inf)
        scores = dense.scale * (dense.key[sample, head] @ dense.query[row]) + bias
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs = powers @ dense.value[sample, head] / powers.sum(axis=-1, keepdims=True)
        errors = np.nan_to_num(abs(outputs - got.astype(np.float64)).max(axis=-1), nan=np.inf)
    other = tuple(map(int, np.unravel_index(errors.argmin(), errors.shape)))
    return _worded(ROW, query, head, sample, *other[::-1]) if errors[other] < errors[row] / 100 else None


def _gone(got: NumpyArray, expected: NumpyArray) -> NumpyArray:
    return np.asarray((expected > 0) & (got < expected / 10))


def _end(gone: NumpyArray) -> int:
    """The last of the first run of numbers."""
    return int(gone[np.flatnonzero(np.diff(gone, append=gone[-1] + 2) > 1)[0]])


def _falling(question: Question, problem: Problem, row: tuple[int, ...], weights: NumpyArray, ask: Ask) -> float:
    """The error of a row where no block has a new maximum: with keys in the order of its weights, and equal scores."""
    whole = positioned(problem, question.subject).changed(memory={})
    if whole.mask is not None:
        whole = whole.holding(mask=passes(whole.mask, whole))
    zeros = {name: np.zeros_like(whole.arrays[name]) for name in ("query", "bias") if name in whole.arrays}
    errors = []
    for other in (taken(whole, -1, np.argsort(-weights, kind="stable")), whole.holding(**zeros)):
        changed = fit(other, question.subject)
        truth = answer(dense_of(meant(changed, question.subject))).arrays["output"][row]
        errors.append(float(abs(ask(changed)["output"][row] - truth).max() / abs(truth).max()))
    return max(errors)


def _worded(variant: Variant, *facts: object) -> Variant:
    return replace(variant, says=variant.says.format(*facts))
