"""Runs cases: case × backend × device × dtype × mode × implementation."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from attention_conformance.call import AttentionFunction, unsupported
from attention_conformance.cases import CASES
from attention_conformance.cases.case import Case
from attention_conformance.problem import Problem
from attention_conformance.result import Result, one_line
from attention_conformance.run.exemptions import exemption
from attention_conformance.run.implementations import asked, in_small_blocks, left_out, refusal
from attention_conformance.run.measures import MEASURES, Outcome, Trial
from attention_conformance.subjects.libraries import devices_of, holds, in_precision
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
) -> list[Result]:
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
    list of Result

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
        chosen_cases, [chosen], devices=devices, dtypes=dtypes, modes=modes, implementations=implementations or (None,)
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
    implementations: Sequence[str | None] = (None,),
    everything: bool = False,
) -> list[Trial]:
    """List every trial, backend by backend; ``None`` stands for all there are, and among implementations for no name.

    Unless it is to be everything, some implementations leave cases out where they would take long.
    """
    cases = list(cases)

    def trial(case: Case, backend: Backend, device: str, dtype: str, mode: str, implementation: str | None) -> Trial:
        reason = _reason(case, backend, device, dtype, mode=mode, asked=dtypes is not None)
        if not (reason or everything):
            reason = left_out(case, implementation, backend, dtype, mode=mode)
        return Trial(case, backend, device, dtype, mode=mode, implementation=implementation, reason=reason)

    return [
        trial(case, backend, device, dtype, mode=mode, implementation=implementation)
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


def _looking(trial: Trial, problem: Problem) -> contextlib.AbstractContextManager[None]:
    """A context in which an accelerator, too, keeps to line 5 under every mask, if something is not finite."""
    if not _is_accelerator(trial.backend, trial.device):
        return contextlib.nullcontext()
    is_finite = all(np.isfinite(each.astype(np.float64)).all() for each in problem.arrays.values())
    return contextlib.nullcontext() if is_finite else config_context(assume_finite=False)


def run(trials: Iterable[Trial], function: AttentionFunction = scaled_dot_product_attention) -> Iterator[Result]:
    """Run trials one after the other; an exception is a failed result, never the end of the run."""
    for trial in trials:
        started = time.perf_counter()
        passed, (error, bound, detail), refused = _judged(trial, function)
        way = (trial.backend.name, trial.device, trial.dtype, trial.mode, trial.implementation or "")
        names = (trial.case.name, *way, trial.case.measure)
        yield Result(*names, error, bound, passed, detail, time.perf_counter() - started, refused=refused)


def _judged(trial: Trial, function: AttentionFunction) -> tuple[bool | None, Outcome, bool]:
    """Whether a trial passed (``None`` where it was not run, or is exempt), its outcome, and whether it was refused."""
    try:
        problem = asked(trial.case.problem(trial.dtype), trial.implementation)
        lacking = unsupported(function, problem)
        reason = trial.reason or (f"not supported: {', '.join(lacking)}" if lacking else "")
        if reason:
            return None, (math.nan, math.nan, reason), False
        blocks = (
            in_small_blocks(trial.backend, problem) if trial.implementation == "blockwise" else contextlib.nullcontext()
        )
        with in_precision(trial.backend, trial.dtype), np.errstate(all="ignore"), blocks, _looking(trial, problem):
            error, bound, detail = MEASURES[trial.case.measure](trial, problem, function)
    except NotImplementedError as unimplemented:
        return None, (math.nan, math.nan, f"not supported: {unimplemented}"), False
    except Exception as unexpected:
        refused = refusal(unexpected) if trial.implementation else ""
        if refused:
            return None, (math.nan, math.nan, refused), True
        return False, (math.inf, math.nan, one_line(unexpected)), False
    excuse = exemption(trial.case.name, trial.backend.name, trial.dtype, trial.implementation or "")
    if bound < error < math.inf and excuse:
        return None, (error, bound, f"exempt: {excuse}; {detail}"), False
    return error <= bound, (error, bound, detail), False
