"""Runs cases, in this process or in others: kernel × case × device × dtype × mode × implementation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from attention_conformance.call import AttentionFunction
from attention_conformance.cases import CASES
from attention_conformance.cases.case import Case
from attention_conformance.launch.libraries import devices_of, holds, quiet_start
from attention_conformance.launch.subject import Subject
from attention_conformance.measure.finding import Finding, Started
from attention_conformance.measure.implementations import IMPLEMENTATIONS as LISTED, is_quick, left_out
from attention_conformance.measure.messages import Described, Message
from attention_conformance.measure.question import Question
from attention_conformance.processes import Order
from attention_conformance.verdict.judge import judged
from attention_core import scaled_dot_product_attention
from attention_core.backend import Backend, get_backend

IMPLEMENTATIONS = ("auto", *LISTED)


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
    if case.measure == "gradient" and not backend.differentiates:
        return f"{backend.name} does not differentiate"
    if mode != "eager" and dtype not in case.compiled and not asked:
        return f"compiled modes run this case in {', '.join(case.compiled) or 'no dtype'}, unless dtypes are asked for"
    return ""


def run(questions: Iterable[Question], function: AttentionFunction = scaled_dot_product_attention) -> Iterator[Finding]:
    """Ask one question after the other; an exception is a failed case, never the end of the run."""
    for question in questions:
        yield judged(replace(question, kernel=replace(question.kernel, function=function)))


def work(order: Order) -> Iterator[Message]:
    """Carry out an order in this process."""
    with quiet_start():
        backend = get_backend(order.target)
    devices = order.devices or (tuple(devices_of(backend)[:1]) if order.quick else None)
    chosen = {"devices": devices, "dtypes": order.dtypes, "modes": order.modes}
    implementations, is_all = order.implementations or LISTED, order.implementations is not None
    cases = [case for case in CASES if case.name in order.cases]
    trials = plan(cases, [backend], **chosen, implementations=implementations, everything=is_all)
    if order.quick:
        trials = [each for each in trials if is_quick(backend, each.mode, each.dtype, each.implementation)]
    yield Described({}, {}, backend.versions(), len(trials) * (not order.skip), backend.name)
    for trial in trials[order.skip :]:
        yield Started(trial.blank)
        yield from run([trial])
