"""Runs cases: case × backend × device × dtype × mode × implementation."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attention_conformance.call import AttentionFunction, one_line, output_function, unsupported
from attention_conformance.cases import CASES
from attention_conformance.cases.case import Case
from attention_conformance.problem import Problem
from attention_conformance.run.exemptions import exemption
from attention_conformance.run.finding import WRONG, Finding
from attention_conformance.run.implementations import asked, in_small_blocks, left_out, refusal
from attention_conformance.run.judge import Question, compared, result_of
from attention_conformance.run.properties import PROPERTY_MEASURES
from attention_conformance.subjects.libraries import devices_of, holds, in_precision
from attention_conformance.subjects.subject import NotOffered, Subject
from attention_conformance.subjects.watch import Touched
from attention_core import config_context, scaled_dot_product_attention
from attention_core.backend import Backend, get_backend, is_on_host

__all__ = ["check", "plan", "run"]


IMPLEMENTATIONS = ("auto", "dense", "blockwise", "fused")


def check(
    function: AttentionFunction,
    *,
    backend: str | Backend,
    cases: Iterable[Case] | None = None,
    dtypes: Sequence[str] | None = None,
    devices: Sequence[str] | None = None,
    modes: Sequence[str] | None = ("eager",),
    implementations: Sequence[str] | None = None,
) -> list[Finding]:
    """Run the catalogue against any callable with the signature of `attention_core.scaled_dot_product_attention`.

    Options that the callable has no parameter for, or answers with ``NotImplementedError``, are reported as not
    supported.

    Parameters
    ----------
    function : callable
    backend : str or Backend
        The library whose arrays the callable takes.
    cases : iterable of Case, optional
        By default the whole catalogue.
    dtypes, devices, modes : sequence of str, optional
        ``None`` stands for all that the backend has.
    implementations : sequence of str, optional
        What the callable is given as ``implementation``: ``"dense"``, ``"blockwise"``, ``"fused"``; by default it is
        not given any.

    Returns
    -------
    list of Finding

    Raises
    ------
    TypeError
        When something among the cases is none.
    ValueError
        When nothing is to be run: a device, dtype or mode that the backend has not.

    Examples
    --------
    >>> from attention_conformance import CASES, check
    >>> results = check(scaled_dot_product_attention, backend="numpy", cases=CASES[:3], dtypes=["float32"])
    >>> [result.passed for result in results]
    [True, True, True]
    """
    if not isinstance(backend, str | Backend):
        raise TypeError(f"expected the name of a backend, or one; got {backend!r}")
    if wrong := [each for each in implementations or () if each not in IMPLEMENTATIONS]:
        raise ValueError(f"expected implementations out of {', '.join(IMPLEMENTATIONS)}; got {wrong[0]!r}")
    chosen = get_backend(backend) if isinstance(backend, str) else backend
    chosen_cases: list[Case] = list(CASES if cases is None else [cases] if isinstance(cases, str | Case) else cases)
    if strange := [each for each in chosen_cases if not isinstance(each, Case)]:
        got = f"{strange[0]!r}: [case for case in CASES if case.name == ...] chooses by name"
        raise TypeError(f"expected cases as those of attention_conformance.CASES; got {got}")
    trials = plan(
        chosen_cases, [chosen], devices=devices, dtypes=dtypes, modes=modes, implementations=implementations or ("",)
    )
    if not trials:
        asked = {"devices": devices, "dtypes": dtypes, "modes": modes, "implementations": implementations}
        chosen_by = ", ".join(f"{name}={value}" for name, value in asked.items() if value is not None)
        raise ValueError(f"expected cases, devices, dtypes and modes that {chosen.name} has; got {chosen_by or 'none'}")
    return list(run(trials, function))


def plan(
    cases: Iterable[Case],
    backends: Iterable[Backend],
    *,
    devices: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
    implementations: Sequence[str] = ("",),
    everything: bool = False,
) -> list[Question]:
    """List every question, backend by backend; ``None`` stands for all there are, and "" for no named implementation.

    Unless it is to be everything, some implementations leave cases out where they would take long.
    """
    cases = list(cases)

    def question(case: Case, backend: Backend, device: str, dtype: str, mode: str, implementation: str) -> Question:
        reason = _reason(case, backend, device, dtype, mode=mode, asked=dtypes is not None)
        if not (reason or everything):
            reason = left_out(case, implementation, backend, dtype, mode=mode)
        core = Subject(scaled_dot_product_attention, backend=backend.name, device=device, native=True)
        core = replace(core, differentiates=backend.differentiates)
        asked = Question(core, case, dtype, "exact", power=False, library=backend)
        return replace(asked, mode=mode, implementation=implementation, reason=reason)

    return [
        question(case, backend, device, dtype, mode=mode, implementation=implementation)
        for backend in backends
        for device in devices_of(backend)
        if devices is None or device in devices
        for mode in backend.modes
        if modes is None or mode in modes
        for implementation in implementations
        if implementation != "fused" or backend.kernels
        for case in cases
        for dtype in case.dtypes
        if dtypes is None or dtype in dtypes
    ]


def _reason(case: Case, backend: Backend, device: str, dtype: str, mode: str, *, asked: bool) -> str:
    """Why a case is not to be run in this way; empty where it is."""
    if not holds(backend, device, dtype):
        return f"{backend.name} on {device} has no {dtype}"
    if case.measure == "batch bits" and not holds(backend, device, "float64"):
        return f"{backend.name} on {device} has no float64, which reproducible arithmetic needs"
    if case.measure == "message" and mode != "eager":
        return "compilers wrap the errors of what they trace"
    if case.reads and not _can_be_read(backend, device):
        return "nobody waits for an accelerator, or computes, to refuse what an array holds"
    if case.measure == "autocast" and backend.autocast is None:
        return f"{backend.name} has no autocast"
    if case.measure == "gradient" and not backend.differentiates:
        return f"{backend.name} does not differentiate"
    if mode != "eager" and dtype not in case.compiled and not asked:
        return f"compiled modes run this case in {', '.join(case.compiled) or 'no dtype'}, unless dtypes are asked for"
    return ""


def _can_be_read(backend: Backend, device: str) -> bool:
    array = backend.from_numpy(np.zeros(1, np.float32), device=device)
    return is_on_host(array) and backend.is_concrete(array)


def _is_accelerator(backend: Backend, device: str) -> bool:
    return not is_on_host(backend.from_numpy(np.zeros(1, np.float32), device=device))


def _looking(question: Question, problem: Problem) -> contextlib.AbstractContextManager[None]:
    """A context in which an accelerator, too, keeps to line 5 under every mask, if something is not finite."""
    if not _is_accelerator(question.backend, question.device):
        return contextlib.nullcontext()
    is_finite = all(np.isfinite(each.astype(np.float64)).all() for each in problem.arrays.values())
    return contextlib.nullcontext() if is_finite else config_context(assume_finite=False)


def run(questions: Iterable[Question], function: AttentionFunction = scaled_dot_product_attention) -> Iterator[Finding]:
    """Ask one question after the other; an exception is a failed case, never the end of the run."""
    for question in questions:
        started = time.perf_counter()
        found = _judged(replace(question, subject=replace(question.subject, function=function)))
        yield replace(found, seconds=time.perf_counter() - started)


def _judged(question: Question) -> Finding:
    blank, backend = question.blank, question.backend
    try:
        problem = asked(question.case.problem(question.dtype), question.implementation)
        lacking = unsupported(question.subject.function, problem)
        if reason := question.reason or (f"not supported: {', '.join(lacking)}" if lacking else ""):
            return replace(blank, verdict="not offered", detail=reason)
        is_cut = question.implementation == "blockwise"
        blocks = in_small_blocks(backend, problem) if is_cut else contextlib.nullcontext()
        with in_precision(backend, question.dtype), np.errstate(all="ignore"), blocks, _looking(question, problem):
            found = _MEASURES.get(question.case.measure, _answered)(question, problem)
    except (NotImplementedError, NotOffered) as unimplemented:
        return replace(blank, verdict="not offered", detail=f"not supported: {unimplemented}")
    except Touched as touched:
        return replace(blank, verdict=touched.verdict, error=math.inf, bound=0.0, detail=str(touched))
    except Exception as unexpected:
        if question.implementation and (refused := refusal(unexpected)):
            return replace(blank, verdict="refused", detail=refused)
        return replace(blank, verdict="visibly wrong", error=math.inf, detail=one_line(unexpected))
    excuse = exemption(found.case, backend.name, found.dtype, question.implementation)
    if excuse and found.verdict in WRONG and math.isfinite(found.error):
        return replace(found, verdict="accepted", reason=excuse, detail=f"exempt: {excuse}; {found.detail}")
    return found


def _answered(question: Question, problem: Problem) -> Finding:
    several = PROPERTY_MEASURES.get(question.case.measure)
    got = several(question, problem, result_of) if several else result_of(question, problem)
    return compared(question, problem, got, lambda: got)


def _autocast(question: Question, problem: Problem) -> Finding:
    """A call under autocast to the dtype of the problem, whose numbers are given in float32."""
    backend: Any = question.backend  # none without autocast is asked
    narrow = question.dtype
    arrays = {n: each.astype(np.float32) if each.dtype.name == narrow else each for n, each in problem.arrays.items()}
    with backend.autocast.on(backend.from_numpy(arrays["query"], device=question.device), narrow):
        got = result_of(question, replace(problem, arrays=arrays))
    return compared(question, problem, got, lambda: got)


def _exactness(question: Question, problem: Problem) -> Finding:
    if question.case.twin is None:
        raise ValueError(f"expected case {question.case.name} to have a twin; got none")
    ours, twins = (result_of(question, each)["output"] for each in (problem, question.case.twin(problem)))
    differing = int(np.sum(ours.view(np.uint8) != twins.view(np.uint8)))
    return _counted(question, differing, f"{differing} of {ours.nbytes} bytes differ")


def _message(question: Question, problem: Problem) -> Finding:
    kind = question.case.raises
    expected = _raised(get_backend("numpy"), "cpu", problem, scaled_dot_product_attention)
    got = _raised(question.backend, question.device, problem, question.subject.function)
    told = type(expected) is kind and re.match(r"expected .*; got ", str(expected))
    same = type(got) is type(expected) and str(got) == str(expected)
    wanted = kind.__name__ if kind else ""
    detail = one_line(got) if same else f"expected {wanted}, as {one_line(expected)!r}; got {one_line(got)!r}"
    return _counted(question, not (told and same), detail)


def _counted(question: Question, wrong: int, detail: str) -> Finding:
    """The finding for a number of things that are wrong, of which none may be."""
    verdict = "silently wrong" if wrong else "right"
    return replace(question.blank, verdict=verdict, error=float(wrong), bound=0.0, detail=detail)


def _raised(backend: Backend, device: str, problem: Problem, function: AttentionFunction) -> Exception:
    arrays = backend.from_numpy(dict(problem.arrays), device=device)
    try:
        output_function(function, problem)(arrays)
    except Exception as error:
        return error
    return AssertionError("no error")


_MEASURES: dict[str, Callable[[Question, Problem], Finding]] = {
    "autocast": _autocast,
    "exact": _exactness,
    "message": _message,
}
"""Measures of the core alone."""
