"""Judges one case on a kernel: calls it, compares with the oracle, and says what a wrong answer equals."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import traceback as traces
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from attention_conformance.call import one_line, unsupported
from attention_conformance.cases.case import BITWISE
from attention_conformance.launch.fit import fit, meant
from attention_conformance.launch.libraries import holds
from attention_conformance.launch.subject import NotOffered
from attention_conformance.launch.watch import TOUCHED, Touched
from attention_conformance.measure.bounds import Bounds
from attention_conformance.measure.finding import CONVENTION, NAMED, Finding
from attention_conformance.measure.implementations import in_way, refusal
from attention_conformance.measure.kinds import kinds_of
from attention_conformance.measure.measures import MEASURES, drawn, plain, result_of, variables
from attention_conformance.measure.messages import Returned
from attention_conformance.measure.properties import PROPERTY_MEASURES, refuse_gradients
from attention_conformance.measure.question import Question, truth_of
from attention_conformance.mistakes.causes import Variants, of_another, power
from attention_conformance.mistakes.experiments import (
    CAUSE,
    has_narrow_sums,
    is_exact,
    read,
    simplest,
)
from attention_conformance.mistakes.variants import (
    CONVENTIONS,
    EMPTY,
    INEXACT,
    NARROW_SCORES,
    SINGLE,
    TF32,
    Ask,
    Variant,
    cause,
)
from attention_conformance.oracle.attention import Truth
from attention_conformance.problem import NARROW, NumpyArray, Problem
from attention_conformance.verdict.expected import Expected, Origin, met, read_expected

Answer = TypeVar("Answer")

PIECES = ("decoded", "merged", "dropped", "windowed")
"""Measures whose calls have other positions than the whole, or take weights for equal."""


def judged(question: Question) -> Finding:
    """The result of one case: an exception of the kernel is a refusal, and never ends the run."""
    started = time.perf_counter()
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"), question.in_precision():
        result = _judged(question)
    return replace(result, seconds=time.perf_counter() - started)


def _judged(question: Question) -> Finding:
    answered, problem = _answered(question)
    if isinstance(answered, Finding):
        return answered
    problem = problem if question.library else asked(question)  # others may have written into their arguments
    is_one_call = question.case.measure not in {**PROPERTY_MEASURES, **MEASURES}
    is_called_again = is_one_call and question.library is None
    ask = functools.partial(result_of, question) if is_called_again else None
    finding = compared(question, problem, answered, ask)
    if question.library is None or finding.verdict not in NAMED or not math.isfinite(finding.error):
        return finding
    excused = met(finding, known(), Origin(question.device, question.library.name))
    return replace(excused, detail=f"exempt: {excused.reason}; {finding.detail}") if excused.reason else finding


@functools.cache
def known() -> tuple[Expected, ...]:
    """Where the core misses a bound on some library, each with its reason."""
    return read_expected(Path(__file__).with_name("expected.toml"))


def returned(question: Question) -> Finding | Returned:
    """What a kernel returns, or the result where it returns nothing: for a process that compares."""
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"), question.in_precision():
        answered, _ = _answered(question)
    return answered if isinstance(answered, Finding) else Returned(question.case.name, question.dtype, answered)


def graded(question: Question, got: dict[str, NumpyArray]) -> Finding:
    """The result for what a kernel has returned in another process."""
    started = time.perf_counter()
    with np.errstate(all="ignore"):
        finding = compared(question, asked(question), got)
    return replace(finding, seconds=time.perf_counter() - started)


def asked(question: Question) -> Problem:
    """The problem whose answer is compared: fitted to the kernel, unless several calls are put together."""
    problem = drawn(question)
    if question.case.measure == BITWISE and not (question.kernel.differentiates or question.kernel.backward):
        problem = replace(problem, cotangent=None)
    has_parts = question.case.measure in PROPERTY_MEASURES and problem.cotangent is None
    return problem if has_parts else fit(problem, question.kernel)


def offered(question: Question) -> Problem:
    """The problem that is asked; NotOffered where the kernel declares too little for it."""
    if question.reason:
        raise NotOffered(question.reason)
    problem = asked(question)
    if question.library is not None:
        if lacking := unsupported(question.kernel.function, problem):
            raise NotOffered(f"not supported: {', '.join(lacking)}")
        return problem
    if question.kernel.causal == "always" and (question.case.measure in PIECES or question.case.closed):
        raise NotOffered("calls without causality")
    if question.case.measure in PROPERTY_MEASURES:
        refuse_gradients(problem, question.kernel)
    if question.case.measure == "exact" and not question.kernel.asks:
        raise NotOffered("weights and logsumexp")
    return problem


def _answered(question: Question) -> tuple[Finding | dict[str, NumpyArray], Any]:
    """The answer, or a result without one, and the problem that was asked."""
    try:
        problem = offered(question)
    except NotOffered as lacking:
        return replace(question.blank, verdict="not offered", detail=str(lacking)), None
    measure: Callable[[Question, Problem], Any] = {**MEASURES, **PROPERTY_MEASURES}.get(question.case.measure, plain)

    def answer() -> Any:
        with in_way(question, problem):
            return measure(question, problem)

    is_core = question.library is not None  # which is also asked what has no sizes
    return attempted(question, question.blank if is_core else _of_shapes(question, problem), answer), problem


def attempted(question: Question, blank: Finding, answer: Callable[[], Answer]) -> Finding | Answer:
    """What a kernel answers, or the result where it raises, or does what it must not."""
    try:
        return answer()
    except NotOffered as lacking:  # in one of several calls
        detail = str(lacking) if question.library is None else f"not supported: {lacking}"
        return replace(blank, verdict="not offered", detail=detail)
    except Touched as touched:
        finding = replace(blank, verdict=touched.verdict, error=math.inf, bound=0.0, detail=str(touched))
        return replace(finding, variant=touched.name, says=TOUCHED.get(touched.name, ""))
    except Exception as error:  # whatever a kernel raises is a refusal, unless it has broken its device
        if question.library is not None:
            return _failed(question, blank, error)
        verdict = "refused" if holds(question.backend, question.device, "float32") else "crashed"
        return replace(blank, verdict=verdict, detail=one_line(error), traceback=traces.format_exc(limit=-6))


def _failed(question: Question, blank: Finding, error: Exception) -> Finding:
    """The result for an exception of the core, which may refuse an implementation alone."""
    if isinstance(error, NotImplementedError):
        return replace(blank, verdict="not offered", detail=f"not supported: {error}")
    if question.implementation and (refused := refusal(error)):
        return replace(blank, verdict="refused", detail=refused)
    return replace(blank, verdict="visibly wrong", error=math.inf, detail=one_line(error))


def _of_shapes(question: Question, problem: Problem) -> Finding:
    shapes = {name: each.shape for name, each in problem.arrays.items()}
    several = question.case.measure in PROPERTY_MEASURES
    return replace(question.blank, shapes=shapes, kinds=kinds_of(problem, question.dtype, several))


def compared(question: Question, problem: Problem, got: dict[str, NumpyArray], ask: Ask | None = None) -> Finding:
    """The result for what one call, or several put together, gave; ``ask`` is one call of a problem."""
    again = (lambda: got) if ask is None else (lambda: ask(problem))
    truth, blank = truth_of(question, problem), _of_shapes(question, problem)
    got = {name: each for name, each in got.items() if name in truth.arrays}
    missing = [name for name in _wanted(question, problem) if name not in got]
    if missing:
        return replace(blank, verdict="visibly wrong", error=math.inf, detail=f"{', '.join(missing)} did not come")
    is_any = question.kernel.keeps_dtype is False
    is_wide = question.dtype == "float64" and question.library is None  # many kernels have it in float32 always
    bounds = Bounds(question, problem, truth)
    kinds = {name: bounds.dtype(name) for name in got}
    got = {n: each.astype(kinds[n]) if is_any or (is_wide and n == "logsumexp") else each for n, each in got.items()}
    measured = bounds.measure(got, truth.arrays)
    finding = replace(blank, error=measured.error, bound=measured.bound, detail=measured.detail)
    if measured.passes and not question.power:
        return finding
    variants = Variants(None if question.case.closed else meant(problem, question.kernel))
    if measured.passes:
        return replace(finding, **power(question, problem, bounds, variants))
    verdict = "visibly wrong" if _is_visible(got, truth, kinds) else "silently wrong"
    extent = bounds.located(measured, got)
    where = extent.says or f"the gradient of {measured.result} is wrong" * (question.case.measure == "gradient")
    finding = replace(finding, verdict=verdict, worst=extent.worst, says=where)
    unlike, is_whole = list[str](), True
    may_ask = question.causes and question.library is None and question.is_trusted
    is_wide_right = question.narrow_is_habit and not may_ask
    equal = variants.former(got, bounds)
    if may_ask and not equal:
        simpler, setting, is_wide_right = simplest(question, judged)
        if simpler is not None:
            names = {name: getattr(simpler, name) for name in CAUSE if getattr(simpler, name)}
            is_convention = simpler.verdict == CONVENTION and bool(simpler.variant)
            return replace(finding, **names, verdict=CONVENTION if is_convention else finding.verdict)
        equal = [] if setting is None else [setting]
    if is_wide_right and question.dtype in NARROW:
        if may_ask and has_narrow_sums(question, judged):
            equal = [cause("narrow-sums")]
        elif variants.explain_narrow(got, bounds, measured.result):
            equal = [NARROW_SCORES]
    for inaccurate, allowed in () if equal else _precisions(bounds):
        if inaccurate is not None and allowed.measure(got, truth.arrays).passes:
            equal, unlike = [inaccurate], []
        else:
            equal, unlike, is_whole = variants.equal(got, allowed, measured.result, again)
        if equal:
            break
    if not equal and not question.narrow_is_habit and variants.explain_narrow(got, bounds, measured.result):
        equal = [NARROW_SCORES]
    if not equal and ask is not None and variants.is_of_empty(got, bounds, ask):
        equal = [EMPTY]
    exact = [each.name for each in equal if is_exact(each.name)]
    if question.causes and not (equal and is_whole) and (lacking := variants.of_parts(got, bounds)):
        equal, exact, is_whole = lacking, [each.name for each in lacking], True
    if not equal and question.causes:
        equal = variants.of_factor(got, bounds) or of_another(got, bounds)
        exact, unlike = [each.name for each in equal], [*unlike, *["factor", "answer-of-another"] * (not equal)]
    is_sure, is_of_channels = bool(equal), "channel" in extent.axes
    if not equal and ask is not None and may_ask and not is_of_channels:
        predicts = functools.partial(variants.predicts, got, bounds)
        with contextlib.suppress(Exception):  # whatever a kernel raises for other values
            equal = read(question, problem, finding.worst, ask, predicts)
        exact = [each.name for each in equal if predicts(each)]
    is_precise = is_sure or exact or question.dtype != "float32" or is_of_channels
    if not is_precise and _wider(bounds).measure(got, truth.arrays).passes:
        equal = [INEXACT]
    finding = replace(finding, equals=tuple(exact), rejected=tuple(unlike))
    is_poison = bool(equal) and equal[0].name == "nan-of-masked-row" and question.case.measure == "gradient"
    is_poison = is_poison and not variants.fills_empty(problem, ask)
    return _with_cause(finding, question, equal, is_poison, is_whole)


def _wanted(question: Question, problem: Problem) -> list[str]:
    """The results that a call owes."""
    if problem.cotangent is not None:
        return variables(question, problem)
    optional = () if question.case.measure in PROPERTY_MEASURES else ("weights", "logsumexp")
    return ["output", *(name for name in optional if problem.options.get(f"return_{name}"))]


def _precisions(bounds: Bounds) -> Iterator[tuple[Variant | None, Bounds]]:
    """Bounds of the precisions that a wrong answer may have, each with its name; other causes come on top of them."""
    question = bounds.question
    if question.dtype == "float64":
        yield SINGLE, replace(bounds, is_single=True)
        return
    yield None, bounds
    is_kernel = (question.profile, question.dtype) == ("kernel", "float32")
    if is_kernel and not question.device.lower().startswith("cpu"):  # which use TF32 unless that is switched off
        yield TF32, _wider(bounds)


def _wider(bounds: Bounds) -> Bounds:
    return replace(bounds, question=replace(bounds.question, profile="tf32"))


def _with_cause(
    finding: Finding, question: Question, equal: Sequence[Variant], is_poison: bool, is_whole: bool
) -> Finding:
    """A wrong result with the name of what it equals, perhaps as a difference of convention."""
    for variant in equal[:1]:
        is_convention = not is_poison and any(variant.name == each.name for each in CONVENTIONS)
        is_convention = is_convention or (variant is NARROW_SCORES and question.narrow_is_habit)
        verdict = "differs by convention" if is_convention else finding.verdict
        says = "; ".join(filter(None, (variant.says, "" if finding.equals and is_whole else finding.says)))
        finding = replace(finding, variant=variant.name, line=variant.line, says=says, verdict=verdict)
    return finding


def _is_visible(got: Mapping[str, NumpyArray], truth: Truth, kinds: Mapping[str, Any]) -> bool:
    """Whether a wrong result shows: by its shape or dtype, or as NaN or infinity for a number."""
    for name, array in got.items():
        exact = truth.arrays[name].high
        if array.shape != exact.shape or array.dtype != kinds[name]:
            return True
        numbers = array.astype(np.float64)
        if bool(np.any(~np.isfinite(numbers) & np.isfinite(exact) | np.isnan(numbers) & ~np.isnan(exact))):
            return True
    return False
