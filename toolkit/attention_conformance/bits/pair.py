"""Two attentions to the last bit: calls that are the same by mathematics, what differs, and where."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attention_conformance.bits.cases import SAME_CALL, VARIATIONS, Variation
from attention_conformance.call import one_line
from attention_conformance.launch.call import outputs, place, to_numpy, torch_pass
from attention_conformance.launch.fit import fit, meant
from attention_conformance.launch.subject import NotOffered, Subject
from attention_conformance.launch.watch import Touched
from attention_conformance.measure.bounds import Bounds
from attention_conformance.measure.catalogue import KERNEL_CASES
from attention_conformance.measure.finding import CONVENTION, WRONG, Finding
from attention_conformance.measure.measures import drawn, result_of
from attention_conformance.measure.properties import merged
from attention_conformance.measure.question import Question, truth_of
from attention_conformance.oracle.dense import answer, dense_of
from attention_conformance.oracle.ulps import Difference, difference
from attention_conformance.problem import NumpyArray, Problem
from attention_conformance.verdict.judge import attempted, judged
from attention_core.backend import Backend

OTHER_BITS = "other bits"

AS_WHOLE = "as-the-whole-call", "the whole calls of the two differ already, and this is the whole call of the second"

MATHEMATICS = {
    "bits-whole": "scale",
    "bits-causal": "shape-13x13-causal",
    "bits-mask": "mask",
    "bits-grouped": "grouped-heads",
    "bits-scale": "scale",
}
"""The small case in which other mathematics show."""

Arrays = dict[str, NumpyArray]


FACTS = {
    "mask": ("other-mask", {"keep": "a mask is True where a query sees", "drop": "True where it is hidden"}),
    "causal": ("other-causality", {}),
    "default_scale": ("other-scale", {"sqrt": "1/√D by default", "one": "1 by default"}),
}
"""What two kernels may expect in other ways, which the calls translate."""


def conventions(kernel: Subject, other: Subject) -> list[Finding]:
    """A result for each convention in which two kernels differ, although each is called by its own."""
    findings = []
    for fact, (name, words) in FACTS.items():
        both = [getattr(each, fact) for each in (kernel, other)]
        if both[0] == both[1] or kernel.native or other.native or not {*both}.isdisjoint({None, "none"}):
            continue
        says = f"{fact.replace('_', ' ')}: {' and '.join(words.get(each, each) for each in both)}"
        blank = Finding(f"convention: {fact}", "-", 0, "Both mean the same.", CONVENTION, variant=name, says=says)
        findings.append(replace(blank, detail="each is called by its own convention below"))
    return findings


def same_bits(question: Question) -> Finding:
    """The result of one question about bits."""
    case, started = question.case, time.perf_counter()
    assert question.other is not None
    blank = Finding(case.name, question.dtype, case.line, case.shows, "right", bound=0.0, seed=question.seed)
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"), contextlib.ExitStack() as stack:
        for each in (question, _of(question, question.other)):
            stack.enter_context(each.in_precision())
        row = _Row(question, blank)
        finding = attempted(question, blank, row.compared) or row.answer()
    return replace(finding, seconds=time.perf_counter() - started)


def _of(question: Question, kernel: Subject) -> Question:
    return replace(question, kernel=kernel, other=None)


@dataclass(frozen=True)
class _Unlike:
    """A result of a variation that has not the bits of the whole."""

    variation: Variation
    name: str
    difference: Difference
    whole: Arrays
    got: Arrays


class _Row:
    """One question: the whole by the first kernel, and the variations of it by the other."""

    def __init__(self, question: Question, blank: Finding) -> None:
        assert question.other is not None
        self.question, self.blank = question, blank
        self.other = _of(question, question.other)
        self.is_one = question.kernel is question.other
        self.count, self.lacking = 0, ""
        self.refused: dict[str, str] = {}
        self.unlike: list[_Unlike] = []
        self.scales: Arrays = {}

    def compared(self) -> None:
        """Compare every variation with the whole, in outputs and gradients."""
        for variation in self._kinds(drawn(self.question)):
            self._compare(variation)
        if not self.count and not self.refused:
            raise NotOffered(self.lacking)

    def answer(self) -> Finding:
        """The result: same bits, or the first difference."""
        problem = drawn(self.question)
        blank = replace(self.blank, shapes={name: each.shape for name, each in problem.arrays.items()})
        if not self.count:
            says, reason = next(iter(self.refused.items()))
            return replace(blank, verdict="refused", detail=f"{says}: {reason}")
        refused = "".join(f"; {says} raises: {reason}" for says, reason in list(self.refused.items())[:2])
        if not self.unlike:
            return replace(blank, error=0.0, detail=f"{self.count} comparisons{refused}")
        first = self.unlike[0]
        detail = f"{first.variation.says}: {first.difference.text(first.name, self._place(first))}"
        detail += f"; {len(self.unlike)} of {self.count} comparisons differ{refused}"
        worst = max(each.difference.ulps for each in self.unlike)
        blank = replace(blank, verdict=OTHER_BITS, error=worst, detail=detail)
        return self._explained(blank, first)

    def _kinds(self, problem: Problem) -> Iterator[Problem]:
        """The problem for outputs, and the one for gradients where both have them."""
        yield replace(problem, cotangent=None)
        both = (self.question.kernel, self.other.kernel)
        if problem.cotangent is not None and all(each.differentiates or each.backward for each in both):
            yield problem

    def _compare(self, problem: Problem) -> None:
        fitted = fit(problem, self.question.kernel)
        whole = result_of(self.question, fitted)
        self.scales = answer(dense_of(meant(fitted, self.question.kernel))).scales
        for variation in VARIATIONS[self.question.case.name](problem):
            try:
                got = _varied(self.other, variation)
            except NotOffered as lacking:  # of one call, such as a mode of another library
                self.lacking = str(lacking)
                continue
            except Touched as touched:  # such as an argument that the call changed
                raise Touched(f"{touched}, in {variation.says}", touched.name, touched.verdict) from touched
            except Exception as error:  # of one call: the others are compared
                self.refused[variation.says] = one_line(error)
                continue
            for name in (each for each in whole if each in got and each != "weights"):
                self._note(variation, name, whole, got)

    def _note(self, variation: Variation, name: str, whole: Arrays, got: Arrays) -> None:
        part, got_part = variation.part(name, whole[name]), variation.own(name, got[name])
        if part is None:
            return
        self.count += 1
        if (part.shape, part.dtype) != (got_part.shape, got_part.dtype):
            kinds = [f"{each.dtype} {each.shape}" for each in (part, got_part)]
            raise Touched(f"expected {name} of {kinds[0]} in {variation.says}; got {kinds[1]}", verdict="visibly wrong")
        scale = variation.part(name, np.broadcast_to(self.scales[name], whole[name].shape))
        unlike = difference(part, got_part, scale)
        if unlike is not None:
            self.unlike.append(_Unlike(variation, name, unlike, whole, got))

    def _place(self, unlike: _Unlike) -> tuple[int, ...]:
        """The index of the first difference in the whole."""
        whole = unlike.whole[unlike.name]
        places = unlike.variation.part(unlike.name, np.arange(whole.size).reshape(whole.shape))
        assert places is not None
        return tuple(int(each) for each in np.unravel_index(places[unlike.difference.index], whole.shape))

    def _explained(self, result: Finding, unlike: _Unlike) -> Finding:
        """The result with its cause, where it is the whole call, or other mathematics."""
        if not self.is_one and result.case not in SAME_CALL and self._is_whole(unlike):
            return replace(result, variant=AS_WHOLE[0], says=AS_WHOLE[1])
        wrong = self._mathematics(unlike)
        if wrong is None:
            return result
        who, finding = wrong
        says = f"not the same mathematics: {who} is {finding.label}: {finding.says or finding.detail}"
        return replace(result, verdict=finding.verdict, variant=finding.variant, says=says, line=finding.line)

    def _mathematics(self, unlike: _Unlike) -> tuple[str, Finding] | None:
        """Who of the two is wrong in a small case, or within the bounds of a kernel, where they are not wrong alike."""
        both, names = (self.question, self.other), [each.kernel.name for each in (self.question, self.other)]
        if self.is_one:
            names = ["the whole", "the other call"]
        elif case := next((each for each in KERNEL_CASES if each.name == MATHEMATICS.get(self.blank.case)), None):
            findings = [judged(replace(each, case=case, other=None, profile="kernel")) for each in both]
            if (wrong := self._wrong(findings, names)) is not None:
                return wrong
        problem = self._problem(unlike)
        other = replace(unlike.variation.problem, pieces=(), memory={})
        findings = []
        for question, asked, arrays in zip(both, (problem, other), (unlike.whole, unlike.got), strict=True):
            fitted = fit(asked, question.kernel)
            truth = truth_of(question, fitted)
            measured = Bounds(question, fitted, truth).measure(arrays, truth.arrays)
            verdict = "right" if measured.passes else "silently wrong"
            findings.append(replace(self.blank, verdict=verdict, detail=measured.detail))
        return self._wrong(findings, names)

    def _wrong(self, findings: Sequence[Finding], names: Sequence[str]) -> tuple[str, Finding] | None:
        if (findings[0].verdict, findings[0].variant) == (findings[1].verdict, findings[1].variant):
            return None
        wrong = next((at for at in (1, 0) if findings[at].verdict in (*WRONG, CONVENTION)), None)
        return None if wrong is None else (names[wrong] or ("the first", "the second")[wrong], findings[wrong])

    def _problem(self, unlike: _Unlike) -> Problem:
        """The problem of the whole call of which a result is."""
        problem = drawn(self.question)
        return problem if unlike.name in ("query", "key", "value") else replace(problem, cotangent=None)

    def _is_whole(self, unlike: _Unlike) -> bool:
        """Whether the second kernel has the bits of this variation in its whole call, too."""
        whole = result_of(self.other, fit(self._problem(unlike), self.other.kernel))
        part = unlike.variation.part(unlike.name, whole[unlike.name])
        got_part = unlike.variation.own(unlike.name, unlike.got[unlike.name])
        return part is not None and part.tobytes() == got_part.tobytes()


def _varied(question: Question, variation: Variation) -> Arrays:
    """The results of a variation."""
    kernel, backend = question.kernel, question.backend
    if kernel.causal == "always" and "rows" in variation.taken:
        raise NotOffered("calls without causality")
    if variation.how == "merged" and not kernel.native:
        return merged(question, replace(variation.problem, pieces=()))
    if variation.problem.memory and backend.name not in ("numpy", "torch"):
        raise NotOffered("strides")
    if variation.problem.options.get("return_logsumexp") and not kernel.gives("logsumexp"):
        raise NotOffered("logsumexp")
    for earlier in variation.before:
        result_of(question, fit(earlier, kernel))
    fitted = fit(variation.problem, kernel)
    if variation.how == "merged":  # by the core's functions of pieces, with the settings of a partial
        fitted = replace(fitted, options={**fitted.options, **getattr(kernel.function, "keywords", {})})
    if variation.how == "recorded":
        return _recorded(question, fitted)
    if variation.how not in ("", "merged") and (variation.how not in backend.modes or len(backend.modes) == 1):
        raise NotOffered("compilation")
    if variation.how == "compiled":  # of PyTorch, which does not trace what is around the call
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # others would outlive this process
        compile_ = importlib.import_module("torch").compile
        return result_of(replace(question, kernel=replace(kernel, function=compile_(kernel.function))), fitted)
    with _threads(backend, variation.threads):
        return result_of(replace(question, mode="" if variation.how == "merged" else variation.how), fitted)


def _recorded(question: Question, problem: Problem) -> Arrays:
    """The forward pass while a library records what gradients need."""
    kernel, backend = question.kernel, question.backend
    if kernel.backward is not None or not kernel.differentiates:
        raise NotOffered("a forward pass of training")
    arrays, xp = place(problem, kernel, backend, question.device), backend.namespace
    if backend.name == "torch":
        arrays["cotangent"] = arrays["query"]  # of which only the shape counts
        return to_numpy({"output": torch_pass(problem, kernel, arrays, ("query",))[0].detach()}, backend)

    def passed(placed: Arrays) -> Any:
        def output(*x: Any) -> Any:
            return outputs(problem, kernel, dict(zip(placed, x, strict=True)), xp)["output"]

        return {"output": backend.vjp(output, *placed.values())[0]}

    return to_numpy(backend.compile(passed, mode="jit" if backend.name == "jax" else "eager")(arrays), backend)


def _threads(backend: Backend, count: int) -> contextlib.AbstractContextManager[Any]:
    """Let a library compute with so many threads, where it can be set while it runs."""
    stack = contextlib.ExitStack()
    if not count:
        return stack
    if backend.name == "torch":
        torch = importlib.import_module("torch")
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(count)
        return stack
    if backend.name != "numpy":
        raise NotOffered("threads that can be set")
    try:
        limits = importlib.import_module("threadpoolctl").threadpool_limits(count)
    except ImportError:
        raise NotOffered("threads without threadpoolctl") from None
    stack.enter_context(limits)
    return stack
