"""What a wrong answer equals: conventions, faults, and arrays of another call, each compared with what was returned."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attention_conformance.launch.fit import meant
from attention_conformance.measure.finding import CONVENTION, WRONG, Finding
from attention_conformance.measure.kinds import CAUSAL
from attention_conformance.measure.question import size_of
from attention_conformance.mistakes.diagnoses import DIAGNOSES, FINITE
from attention_conformance.mistakes.former import MEMORY_OF, mistaken
from attention_conformance.mistakes.variants import (
    ATTENDED,
    CONVENTIONS,
    FAULTS,
    HIDDEN,
    LEAK,
    SPREAD,
    TABLES,
    Ask,
    Variant,
    cause,
    empty_rows,
    of_rows,
    reached,
)
from attention_conformance.oracle.attention import Exact
from attention_conformance.oracle.dense import Answer, answer, as_exact, dense_of, gradient_of
from attention_conformance.oracle.ulps import errors_of
from attention_conformance.problem import NARROW, NumpyArray, Problem, rounded

if TYPE_CHECKING:
    from attention_conformance.measure.bounds import Bounds
    from attention_conformance.measure.question import Question

SMALL = 4.0
"""Scores below which their errors explain little, so that those of sums are distinguished."""

LEADING = 4
"""Answers that a variant explains, and after which no other is asked for; one that contradicts it costs as many."""

OF_SCALE = 7
"""The line of the contract about the scale, whose faults some cases that tell little equal by chance."""

BLOCK = 16
"""Keys or queries in a block whose share of a gradient is looked for."""

SUMS = {"query": (-1,), "key": (-2, -3), "value": (-2, -3), "bias": (-2, -3, -4), "sinks": (-2, -4)}
"""The axes of the scores over which each gradient is a sum."""

MOST_ROWS = 16
"""Wrong rows that are looked for among the right ones."""

MOST_PLANTED = 10_000_000
"""Products in a problem above which no faults are planted, and one that a result equals is enough."""


class Variants:
    """Other answers to one problem, each computed when it is asked for."""

    def __init__(self, problem: Problem | None) -> None:
        self._dense = None
        if problem is not None and problem.score_mod is None and "dropout" not in problem.options:
            self._dense = None if problem.pieces else dense_of(problem)

    def of(self, variant: Variant) -> Answer | None:
        """The answer of a variant; None where it does not apply, or cannot be computed."""
        try:
            return None if self._dense is None else variant.answer(self._dense)
        except (ValueError, IndexError, MemoryError):  # a fault that these shapes do not take
            return None

    def _others(self, bounds: Bounds, evidence: Mapping[str, float]) -> Iterator[tuple[Variant, Answer | None]]:
        """All variants with their answers: those that have explained answers of the kernel, then the likeliest."""
        others = [*CONVENTIONS]
        if bounds.question.causes:
            others += [MEMORY_OF, *FAULTS, *DIAGNOSES]
        is_large = size_of(bounds.problem) > 2 * MOST_PLANTED
        for variant in sorted(others, key=lambda each: evidence[each.name] < LEADING):
            if not (is_large and variant in DIAGNOSES and evidence[variant.name] <= 0):
                yield variant, self.of(variant)

    def of_nonfinite(self, got: Mapping[str, NumpyArray], bounds: Bounds) -> Variant | None:
        """What explains a result of arrays that are not finite, where those that are attended to may give anything."""
        dense, truth = self._dense, bounds.truth.arrays
        if dense is None or any(each.shape != truth[name].high.shape for name, each in got.items()):
            return None
        if all(bool(np.isfinite(each).all()) for each in (dense.query, dense.key, dense.value)):
            through = dense.through
            late = through.any(axis=-1, keepdims=True) & ~through[..., :1].any(axis=-1, keepdims=True)
            rows = {name: np.asarray(np.squeeze(late, -1) if name == "logsumexp" else late) for name in got}
            return HIDDEN if dense.cotangent is None and _spreads(got, bounds, rows) else None
        if variant := self._of_nan(got, bounds):
            return variant
        mended = {name: _mended(each, ~np.isfinite(truth[name].high), truth[name]) for name, each in got.items()}
        return ATTENDED if bounds.measure(mended, truth).passes else self._of_nan(mended, bounds)

    def _of_nan(self, got: Mapping[str, NumpyArray], bounds: Bounds) -> Variant | None:
        """What explains NaN where a number is expected: the habits of formulas with masks, or that NaN spreads."""
        dense, truth = self._dense, bounds.truth.arrays
        if dense is None or bool(np.isfinite(dense.key).all() and np.isfinite(dense.value).all()):
            return None
        nan = {name: np.isnan(each.astype(np.float64)) for name, each in got.items()}
        reach = reached(dense)
        others = [each for variant in CONVENTIONS if (each := self.of(variant)) and set(got) <= set(each.arrays)]
        for expected in (truth, *(each.exact(got) for each in others)):  # which a leak may come on top of
            mended = {name: _mended(each, nan[name] & reach[name], expected[name]) for name, each in got.items()}
            leaks = any((nan[name] & reach[name] & ~np.isnan(expected[name].high)).any() for name in got)
            measured = bounds.measure(mended, expected)
            if leaks and measured.error <= measured.bound * (2 if bounds.question.dtype in NARROW else 1):
                return LEAK
        return SPREAD if _spreads(got, bounds) else None

    def equal(
        self, got: Mapping[str, NumpyArray], bounds: Bounds, wrong: str, again: Callable[[], Mapping[str, NumpyArray]]
    ) -> tuple[list[Variant], list[str], bool]:
        """The variants that a wrong result equals, the names of others of the call, and whether it does so throughout.

        Where it equals none, a fault of some heads or queries alone gives all rows that are wrong.
        """
        if bounds.question.case.closed is not None:
            return [], [], True
        if of_nan := self.of_nonfinite(got, bounds):  # first, as what is all NaN equals many faults
            return [of_nan], [], True
        equal, partial, unlike = dict[str, Variant](), dict[str, Variant](), set[str]()
        evidence = bounds.question.kernel.known.setdefault("evidence", Counter())
        rows, size = _wrong_rows(got, bounds), size_of(bounds.problem)

        def weigh(variant: Variant, other: Answer | None) -> None:
            """Note whether an answer is the one that was got: everywhere, or in all rows that are wrong."""
            if other is None or wrong not in other.arrays:
                return
            expected, truth = other.exact(got), bounds.truth.arrays
            here = {name: _joined(rows[name], each, truth[name]) for name, each in expected.items() if name in rows}
            near = replace(bounds, truth=replace(bounds.truth, kappa=other.kappa)) if variant is FINITE else bounds
            if (variant is FINITE and near.measure(got, truth).passes) or not near.measure(got, here).passes:
                unlike.add(variant.name)
            elif near.measure(got, expected).passes:
                equal.setdefault(variant.name, variant)
            elif variant not in CONVENTIONS:
                partial.setdefault(variant.name, variant)

        for variant, other in self._others(bounds, evidence):
            if variant is MEMORY_OF and not equal and self._is_other(got, again, bounds):
                return [variant], [], True
            weigh(variant, other)
            first = next(iter(equal.values()), None)
            for fault in (each for each in FAULTS if first in CONVENTIONS and each.line == first.line):
                weigh(fault, self.of(fault))  # which may give the numbers of a convention
            if first and (first in CONVENTIONS or evidence[first.name] >= LEADING or size > MOST_PLANTED):
                break
        unlike -= {*equal, *partial}
        evidence.update(dict.fromkeys(equal or partial, 1) | dict.fromkeys(unlike, -LEADING))
        if not (equal or partial) and self._dense is not None and not np.isfinite(self._dense.query).all():
            return [SPREAD] * _spreads(got, bounds), [*unlike], True  # after the conventions of masked rows
        return [*(equal or partial).values()], [*unlike], bool(equal) or not partial

    def of_factor(self, got: Mapping[str, NumpyArray], bounds: Bounds) -> list[Variant]:
        """What explains results that are the right ones times one number: the names of that number, if it has any."""
        truth, factors, expected = bounds.truth.arrays, dict[str, float](), dict[str, Exact]()
        for name, array in got.items():
            (high, low, size), wide = truth[name], array.astype(np.float64)
            if wide.shape == high.shape and not bounds.measure({name: array}, truth).passes:
                known = np.isfinite(wide) & np.isfinite(high)
                factor = float((wide * high)[known].sum() / ((high**2)[known].sum() or 1.0))
                factors[name], expected[name] = factor, Exact(factor * high, factor * low, abs(factor) * size)
        if not factors or self._dense is None or not bounds.measure(got, truth | expected).passes:
            return []
        (first, factor), scale = next(iter(factors.items())), self._dense.scale
        what = first if bounds.problem.cotangent is None else f"gradient of {first}"
        usual = {"unscaled": 1 / scale if scale else 0, "scaled-twice": scale, "averaged": 1 / self._dense.group_size}
        words = [word for word, number in usual.items() if math.isclose(factor, number, rel_tol=2**-6)]
        names = {f"gradient-of-{'-and-'.join(factors)}-{word}" for word in words} & {*TABLES["answers"]}
        return [cause(name) for name in sorted(names)] or [cause("factor", what, factor)]

    def of_parts(self, got: Mapping[str, NumpyArray], bounds: Bounds) -> list[Variant]:
        """What explains gradients, which are sums over keys, queries, heads and samples, where parts of these lack."""
        truth, dense = bounds.truth.arrays, self._dense
        wrong = [name for name in truth if name in got and not bounds.measure({name: got[name]}, truth).passes]
        if dense is None or dense.cotangent is None or not {*wrong} <= {*SUMS}:
            return []
        is_broadcast, rows = bool({"bias", "sinks"} & {*wrong}), (1, *dense.through.shape)
        for axis, word in ((-1, "keys"), (-2, "queries"), (-3, "heads"), (-4, "samples")):
            is_group = axis == -3 and not is_broadcast
            count, size = dense.group_size if is_group else rows[axis], 1 if is_broadcast or axis < -2 else BLOCK
            at = np.arange(rows[axis]) % count // size
            lost = [self._lost(name, got[name], bounds, axis, at) for name in wrong if axis in SUMS[name]]
            if len(lost) == len(wrong) and lost[0].size and all(np.array_equal(each, lost[0]) for each in lost):
                first, last = int(lost[0][0]) * size, min(int(lost[0][-1] + 1) * size, count) - 1
                word = "query heads of a group," if is_group else word
                return [cause("gradient-of-part", " and ".join(wrong), f"{word} {first} to {last} of {count}")]
        return []

    def _lost(self, name: str, got: NumpyArray, bounds: Bounds, axis: int, at: NumpyArray) -> NumpyArray:
        """Which parts of an axis, by their numbers, a gradient lacks, where it is the sum of the others."""
        exact, numbers, none = bounds.truth.arrays[name], np.unique(at), np.zeros(0, int)
        cost = max(exact.high.size, size_of(bounds.problem) // 200)  # of which each part computes all
        if numbers.size < 2 or numbers.size * cost > MOST_PLANTED or self._dense is None:
            return none
        shape = (-1, *[1] * (-1 - axis))
        parts = np.stack([gradient_of(self._dense, (at == each).reshape(shape))[name] for each in numbers])
        matrix = parts.reshape(numbers.size, -1).astype(np.float64)
        shares = np.round(np.linalg.lstsq(matrix @ matrix.T, matrix @ got.astype(np.float64).ravel(), rcond=None)[0])
        rest = as_exact(np.tensordot(shares, parts, axes=1), exact.scale)
        is_sum = bounds.measure({name: got}, {name: rest}).passes
        return numbers[(shares == 0) & matrix.any(axis=-1)] if is_sum else none

    def predicts(self, got: Mapping[str, NumpyArray], bounds: Bounds, variant: Variant) -> bool:
        """Whether a variant gives all the numbers of a result."""
        other = self.of(variant)
        return other is not None and bounds.measure(got, other.exact(got)).passes

    def fills_empty(self, problem: Problem, ask: Ask | None) -> bool:
        """Whether the output of fully masked rows is a convention, by a call without gradients."""
        empty = None if self._dense is None else empty_rows(self._dense)
        if ask is None or empty is None or problem.cotangent is None:
            return False
        with contextlib.suppress(Exception):  # whatever a kernel raises
            return bool(ask(replace(problem, cotangent=None))["output"][empty[..., 0]].any())
        return False

    def is_of_empty(self, got: Mapping[str, NumpyArray], bounds: Bounds, ask: Ask) -> bool:
        """Whether gradients are wrong by those of fully masked rows alone, whose output is a convention."""
        problem = bounds.problem
        if not self.fills_empty(problem, ask):
            return False
        assert self._dense is not None
        assert problem.cotangent is not None
        empty = np.asarray(~self._dense.through.any(axis=-1, keepdims=True))
        cotangent = np.where(empty, 0, problem.cotangent).astype(problem.cotangent.dtype)
        try:
            silent = ask(replace(problem, cotangent=cotangent))
        except Exception:  # whatever a kernel raises
            return False
        truth, reach = bounds.truth.arrays, of_rows(self._dense, empty)
        mended = {name: _mended(each, np.isnan(each) & reach[name], truth[name]) for name, each in silent.items()}
        beyond = {name: _mended(each, reach[name], truth[name]) for name, each in got.items()}
        return bounds.measure(mended, truth).passes and bounds.measure(beyond, truth).passes

    def _is_other(
        self, got: Mapping[str, NumpyArray], again: Callable[[], Mapping[str, NumpyArray]], bounds: Bounds
    ) -> bool:
        """Whether an equal call gives another answer."""
        try:
            repeated = again()
            if all(each.tobytes() == repeated[name].tobytes() for name, each in got.items()):
                return False
            other = {name: as_exact(each, bounds.truth.arrays[name].scale) for name, each in repeated.items()}
        except Exception:  # whatever a kernel raises the second time
            return False
        return not bounds.measure(got, other).passes

    def former(self, got: Mapping[str, NumpyArray], bounds: Bounds) -> list[Variant]:
        """The arrays of a call before that explain a result in place of its own."""
        question, variants = bounds.question, []
        for variant, problem in mistaken(question.case, bounds.problem, question.seed):
            other = answer(dense_of(meant(problem, question.kernel)))
            variants += [variant] * bounds.measure(got, other.exact(got)).passes
        return variants

    def explain_narrow(self, got: Mapping[str, NumpyArray], bounds: Bounds, wrong: str) -> bool:
        """Whether scores of 16 bits explain the error of a result."""
        truth, kappa = bounds.truth.arrays, bounds.truth.kappa
        allowed, expected = 4 * (1 + kappa), dict(truth)
        if wrong == "output" and self._dense is not None and kappa < SMALL:
            # An error of the scores moves an average by at most that times the deviation of the values.
            arrays, value = answer(self._dense).arrays, np.nan_to_num(self._dense.value)
            if "weights" in arrays:
                deviation = np.sqrt(np.maximum(arrays["weights"] @ value**2 - arrays["output"] ** 2, 0))
                allowed, exact = 2 * (1 + kappa), expected["output"]
                scale = np.nan_to_num(deviation).astype(np.float64) + exact.scale / (1 + kappa)
                expected["output"] = exact._replace(scale=scale)
        is_narrow = wrong in expected and bounds.question.dtype in NARROW
        return is_narrow and bounds.measure(got, expected).error <= allowed


def _wrong_rows(got: Mapping[str, NumpyArray], bounds: Bounds) -> dict[str, NumpyArray]:
    """The rows of each result that are wrong; all of one that has another shape."""
    rows = {}
    for name, array in got.items():
        exact, dtype = bounds.truth.arrays[name], bounds.dtype(name)
        if array.shape != exact.high.shape:
            return {name: np.asarray(True) for name in got}
        wrong = ~(errors_of(array, exact, dtype) <= bounds.bound(name, dtype))
        rows[name] = np.asarray(wrong.any(axis=-1, keepdims=True) if wrong.ndim > 3 else wrong)
    return rows


def _joined(where: NumpyArray, first: Exact, second: Exact) -> Exact:
    return Exact(*(np.where(where, *both) for both in zip(first, second, strict=True)))


def of_another(got: Mapping[str, NumpyArray], bounds: Bounds) -> list[Variant]:
    """The row of the right output that a wrong one is, where all that are wrong are some other one."""
    if set(got) != {"output"} or got["output"].shape != bounds.truth.arrays["output"].high.shape:
        return []
    truth, dtype = bounds.truth.arrays["output"], bounds.dtype("output")
    bound, leading = bounds.bound("output", dtype), truth.high.shape[:-1]
    output, high, low, scale = (each.reshape(-1, truth.high.shape[-1]) for each in (got["output"], *truth))
    (wrong,) = np.nonzero((errors_of(output, Exact(high, low, scale), dtype) > bound).any(axis=-1))
    wrong, others = wrong[:: max(1, wrong.size // MOST_ROWS)], list[int]()
    if len(leading) != 3 or not wrong.size or wrong.size * high.size > MOST_PLANTED:
        return []
    for at in wrong:
        near = (errors_of(np.broadcast_to(output[at], high.shape), Exact(high, low, scale), dtype) <= bound).all(
            axis=-1
        )
        if not output[at].any() or not near.any():
            return []
        others.append(int(near.argmax()))
    places = (np.unravel_index(at, leading)[::-1] for at in (wrong[0], others[0]))
    return [cause("answer-of-another", *itertools.chain(*places))]


def _spreads(got: Mapping[str, NumpyArray], bounds: Bounds, where: Mapping[str, NumpyArray] | None = None) -> bool:
    """Whether all that is wrong is NaN, some of it in the place of a number: anywhere, or in some places alone."""
    truth = bounds.truth.arrays
    if any(each.shape != truth[name].high.shape for name, each in got.items()):
        return False
    nan = {
        name: np.isnan(each.astype(np.float64)) & (True if where is None else where[name]) for name, each in got.items()
    }
    mended = {name: _mended(each, nan[name], truth[name]) for name, each in got.items()}
    is_elsewhere = any((nan[name] & np.isfinite(truth[name].high)).any() for name in got)
    return is_elsewhere and bounds.measure(mended, truth).passes


def _mended(each: NumpyArray, where: NumpyArray, expected: Exact) -> NumpyArray:
    return np.where(where, expected.high, each).astype(each.dtype)


def power(question: Question, problem: Problem, bounds: Bounds, variants: Variants) -> dict[str, Any]:
    """The faults that the bounds of this problem reject, and how many apply to it."""
    if not question.power or size_of(problem) > MOST_PLANTED:
        return {}
    rejected, planted = [], []
    for fault in FAULTS:
        if (other := variants.of(fault)) is None:
            continue
        names, dtype = {*other.arrays} & {*bounds.truth.arrays} - {"weights", "logsumexp"}, bounds.question.dtype
        got = {name: rounded(other.arrays[name], dtype) for name in names}
        planted.append(fault.name)
        if not bounds.measure(got, bounds.truth.arrays).passes:
            rejected.append(fault.name)
    return {"rejected": tuple(rejected), "planted": tuple(planted)}


def agreed(results: Sequence[Finding]) -> list[Finding]:
    """The results with the cause that explains the most of them, where several equal what is wrong.

    A cause that more of the wrong answers contradict than it explains, twice over, has no name. That the scale is
    another, right answers contradict, too: there are few conditions for it. A convention holds throughout: causality
    that counts from one corner in some cases, and from the other in others, is a fault in these.
    """
    named = TABLES["answers"] | TABLES["former"]
    is_mixed = len({_corner(each) for each in results} - {""}) > 1
    results = [_as_fault(each) if is_mixed and _corner(each) in CORNERS else each for each in results]
    wrong = [each for each in results if each.verdict in WRONG]
    explained = Counter(name for each in wrong for name in each.equals if name != "mixed-causal")
    contradicted = Counter(name for each in wrong for name in each.rejected)
    right = Counter(name for each in results if each.verdict == "right" for name in each.rejected)
    contradicted += Counter({each.name: right[each.name] // 8 for each in FAULTS if each.line == OF_SCALE})

    def with_best(result: Finding) -> Finding:
        names = [name for name in result.equals if name in named]
        if not names or result.verdict not in WRONG:
            return result
        best = max(names, key=lambda name: explained[name] - contradicted[name])
        if contradicted[best] > 2 * explained[best]:
            return replace(result, variant="", says="", line=0)
        (line, says), (_, _, where) = named[best], result.says.partition("; ")
        return replace(result, variant=best, says="; ".join(filter(None, (says, where))), line=line)

    return [with_best(each) for each in results]


CORNERS = {"top-left-causal", "bottom-right-causal"}


def _as_fault(result: Finding) -> Finding:
    """A result of a corner as one of a fault that gives the same numbers, or of both corners.

    One query without causality is one that counts from the last key.
    """
    verdict = "silently wrong" if result.verdict == CONVENTION else result.verdict
    others = CORNERS | {"no-causality"} if result.shapes["query"][-2] == 1 else CORNERS
    names = [name for name in result.equals if name not in others]
    return replace(result, verdict=verdict, equals=(*names, "mixed-causal"))


def _corner(result: Finding) -> str:
    """From where causality is seen to count, in a case in which it matters: by name, or as calls have found it."""
    if result.variant in CORNERS or not result.shapes:
        return result.variant * bool(result.shapes)  # small calls have reported it
    queries, keys = (result.shapes[name][-2] for name in ("query", "key"))
    return "right" * (result.verdict == "right" and CAUSAL in result.kinds and 1 < queries != keys > 1)
