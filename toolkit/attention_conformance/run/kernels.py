"""Runs the cases on a kernel: in this process, or in others that may crash, hang, or be ended."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from attention_conformance.bits.cases import BITS
from attention_conformance.bits.pair import conventions, same_bits
from attention_conformance.call import one_line
from attention_conformance.kernel.adapters import adapted
from attention_conformance.kernel.options import OPTION_OF
from attention_conformance.kernel.probe import AFTER_A_CRASH, ProbeLog, probed, settled
from attention_conformance.kernel.signature import read_signature
from attention_conformance.kernel.target import TargetError, load_target
from attention_conformance.launch.libraries import devices_of, holds, quiet_start
from attention_conformance.launch.subject import Subject
from attention_conformance.measure.catalogue import large_cases
from attention_conformance.measure.finding import Finding, Started, accept
from attention_conformance.measure.kinds import never_computed
from attention_conformance.measure.messages import Asked, Described, Message as AnyMessage, Refused, Returned
from attention_conformance.measure.question import Question
from attention_conformance.mistakes.causes import agreed
from attention_conformance.mistakes.surprises import surprises
from attention_conformance.processes import DEVICE_LOST
from attention_conformance.run.apart import distrusted
from attention_conformance.run.job import Job, unanswered
from attention_conformance.run.questions import pair_questions, questions
from attention_conformance.verdict.judge import judged, returned
from attention_conformance.verdict.memory import too_large
from attention_core.backend import Backend, announced_backends, get_backend
from attention_numpy.trees import devices_of_kind
from attention_workers import carried_out

BIASED = "mask", "additive"
"""What a keyword for a bias takes."""

SLOW = 600.0
"""Seconds for a large case."""

BY_SIGNATURE, CRASHED = "by its signature", "the call ended the process"

Message: TypeAlias = AnyMessage | Returned


def check_subject(
    subject: Subject,
    *,
    cases: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    profile: str = "kernel",
    accepted: Sequence[str] = (),
    seed: int = 0,
    power: bool = True,
    same_bits_as: Subject | None = None,
) -> list[Finding]:
    """Check anybody's attention in this process.

    Parameters
    ----------
    subject : Subject
        What it does not declare is found by its signature and by small calls.
    cases : sequence of str, optional
        Names of cases; ``*`` and ``?`` are allowed. By default all.
    dtypes : sequence of str, optional
        By default float32 and a type of 16 bits, as far as the kernel takes them, and a few cases in the other one.
    profile : str
        ``exact``, ``kernel`` or ``tf32``.
    accepted : sequence of str
        Names of conventions, faults and cases that pass.
    seed : int
        Seed of all inputs.
    power : bool
        Whether faults are planted in the definition, to count which of them the bounds reject.
    same_bits_as : Subject, optional
        Another kernel, or the same: then the results compare the bits of different calls.

    Returns
    -------
    list of Finding

    Raises
    ------
    ValueError
        For a name of a case, a dtype, a profile, a device, or something to accept that is not known.

    Examples
    --------
    >>> from attention_conformance import Subject, check_subject
    >>> from attention_core import scaled_dot_product_attention
    >>> results = check_subject(Subject(scaled_dot_product_attention), cases=["empty-row-*"], dtypes=["float32"])
    >>> {result.verdict for result in results}
    {'right'}
    """
    job = Job(
        "", cases=tuple(cases), dtypes=tuple(dtypes), profile=profile, accepted=tuple(accepted), seed=seed, power=power
    )
    if job.complaint:
        raise ValueError(job.complaint)
    _, known, asked = questions_of(subject, job, same_bits_as)
    findings = [accept(judge_question(question), accepted) for question in asked]
    if same_bits_as is None:
        findings = agreed(findings)
        findings += [] if cases else never_computed(findings)
    return [accept(each, accepted) for each in (*(known if same_bits_as is not None or not cases else ()), *findings)]


def questions_of(
    kernel: Subject, job: Job, same_bits_as: Subject | None
) -> tuple[Subject, list[Finding], list[Question]]:
    """A kernel as small calls tell it, what these find, and what a job asks of it, or of it and another."""
    kernel = adapted(kernel)
    declared, target = stated_facts(kernel), kernel
    kernel = settled(on_device(kernel))
    if same_bits_as is not None:
        other = kernel if same_bits_as is target else settled(on_device(adapted(same_bits_as)))
        return kernel, conventions(kernel, other), pair_questions(kernel, other, job)
    return kernel, _known(kernel.declared, declared, job), questions(kernel, job)


def _known(facts: Mapping[str, Any], declared: frozenset[str], job: Job) -> list[Finding]:
    """What small calls find; of chosen cases alone, that a parameter is not understood, which is always reported."""
    return [each for each in surprises(facts, declared) if not job.cases or each.verdict == "not understood"]


def judge_question(question: Question) -> Finding:
    """The result of a question, about one kernel or about two."""
    return judged(question) if question.other is None else same_bits(question)


def _sources(kernel: Subject) -> dict[str, str]:
    """How the facts are known for which no call is needed."""
    sources = dict.fromkeys(read_signature(kernel), BY_SIGNATURE)
    return sources | dict.fromkeys(kernel.declared, "declared")


def on_device(kernel: Subject) -> Subject:
    """The kernel on the device that it declares by name, or on the first of a kind such as ``cuda``.

    Raise TargetError where the declared library or device cannot be used.
    """
    try:
        backend = _library(kernel)
    except Exception as error:  # not installed, or broken
        if kernel.backend or not announced_backends():
            raise TargetError(one_line(error)) from error
        return kernel
    if kernel.device is None:
        return kernel
    device = next(iter(devices_of_kind(kernel.device, devices_of(backend))), kernel.device)
    if not holds(backend, device, "float32"):
        devices = ", ".join(devices_of(backend))
        raise TargetError(f"expected a device of {backend.name} out of {devices}; got {kernel.device!r}")
    return replace(kernel, device=device)


def _library(kernel: Subject) -> Backend:
    """The library that a kernel declares, or that its signature tells."""
    return get_backend(kernel.backend or read_signature(kernel)["backend"])


def _lacks_keyword(kernel: Subject, declared: Mapping[str, Any]) -> str:
    """Why what is declared cannot be asked for; empty where it can."""
    for fact in ("mask", "causal"):
        kind = declared.get(fact)
        if kind not in (None, "none", "always") and not (getattr(kernel, f"{fact}_name") or (fact, kind) == BIASED):
            how = f"--{OPTION_OF[fact]} {kind}; got none in its signature: --keyword {fact}=NAME tells it"
            return f"expected a keyword for {how}"
    return ""


def stated_facts(kernel: Subject) -> frozenset[str]:
    """The facts that its author, or its signature, tells of a kernel."""
    return frozenset({**read_signature(kernel), **kernel.declared})


def _load(target: str, **declared: Any) -> Subject:
    """The kernel of a target on its device. Raise TargetError, whatever the module of the target raises."""
    try:
        with quiet_start():
            kernel = adapted(load_target(target, **declared))
        return on_device(kernel)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"expected {target} to load; got {one_line(error)}") from error


def _facts(kernel: Subject) -> dict[str, Any]:
    """What is known of a kernel, as it is reported."""
    return {name: each for name, each in kernel.declared.items() if name != "options"}


def work(job: Job) -> Generator[Message, None, None]:
    """Do a job in this process."""
    try:
        kernel = _load(job.target, **job.declared)
    except TargetError as error:
        yield Refused(str(error))
        return
    answers, declared, sources = [], stated_facts(kernel), _sources(kernel)
    log = ProbeLog(kernel)
    with warnings.catch_warnings(action="ignore"):
        for probe, facts in probed(log.kernel, job.known):
            if facts is not None and _has_broken_device(kernel):
                yield unanswered(probe, f"no call of {kernel.device} answers any more")
            yield Asked(probe, facts)
            if facts is not None:
                answers.append(facts)
                source = CRASHED if facts == job.known.get(probe) == AFTER_A_CRASH[probe] else log.source()
                sources = dict.fromkeys(facts, source) | sources
    kernel = settled(kernel, answers)
    if reason := _lacks_keyword(kernel, job.declared):
        yield Refused(reason)
        return
    if sources.get("backend") == BY_SIGNATURE != kernel.backend != read_signature(kernel)["backend"]:
        sources["backend"] = "found by a call"
    asked = [] if job.same_bits_as else questions(kernel, job)[job.skip :]
    versions = _library(kernel).versions() if asked or job.same_bits_as else {}
    facts = _facts(kernel)
    yield Described(facts, sources, versions, (len(BITS) if job.same_bits_as else len(asked)) * (not job.skip))
    if not job.known and (reason := _never_answered(job.target, log)):
        yield Refused(reason)
        return
    if job.same_bits_as:
        yield from _pair(kernel, job)
        return
    if not (asked or job.skip):
        hint = "those of bits need --same-bits-as"
        yield Refused(f"expected a case that is asked of {job.target}; got {', '.join(job.cases)}: {hint}")
        return
    yield from [] if job.skip else _known(facts, declared, job)
    for question in asked:
        yield Started(question.blank)
        if reason := too_large(question):
            yield replace(question.blank, verdict="not offered", detail=reason)
            continue
        yield judged(question) if job.is_trusted else returned(question)


def _never_answered(target: str, log: ProbeLog) -> str:
    """Why a target cannot be checked that raised in all small calls; empty where one returned."""
    if not log.calls or log.answered:
        return ""
    return (
        f"expected a call of {target} to return; got an exception of each of {log.calls}, the first "
        f"{log.raised}; --backend, --device, --layout, --mask-kind and --default-scale correct what is assumed"
    )


def _pair(kernel: Subject, job: Job) -> Iterator[Message]:
    """Compare the bits of a settled kernel with those of the other target of a job."""
    other = kernel
    if job.same_bits_as != job.target:
        try:
            other = _load(job.same_bits_as)
        except TargetError as error:
            yield Refused(str(error))
            return
        log = ProbeLog(other)
        other = replace(settled(log.kernel), function=other.function)
        if reason := _never_answered(job.same_bits_as, log):
            yield Refused(reason)
            return
        yield Described(_facts(other), {}, _library(other).versions(), 0, target=job.same_bits_as)
    yield from conventions(kernel, other) if not job.skip else []
    asked = pair_questions(kernel, other, job)[job.skip :]
    if not (asked or job.skip):
        got = f"{', '.join(job.cases)}, of a single call" if other is kernel else "no common type"
        yield Refused(f"expected rows for {job.target} and {job.same_bits_as}; got {got}")
    for question in asked:
        yield Started(question.blank)
        yield same_bits(question)


def supervised(job: Job, limit: float = 60.0) -> Generator[Message, None, None]:
    """Do a job in a process; after a crash, or what takes more seconds than the limit, go on in another."""
    limit = max(limit, SLOW) if large_cases(job.cases) else limit
    start = max(5 * limit, 60.0)  # libraries start slowly on a busy machine
    with contextlib.closing(carried_out([job], 1, _alone, limit=limit, start=start)) as messages:
        yield from messages if job.is_trusted else distrusted(job, messages)


def _alone(job: Job) -> Iterator[Message]:
    """Do a job in a process of its own, up to a case that breaks the device for all calls that would follow."""
    for message in work(job):
        yield message
        if isinstance(message, Finding) and message.verdict == "crashed":
            os._exit(DEVICE_LOST)  # it may hang otherwise


def _has_broken_device(kernel: Subject) -> bool:
    return kernel.device is not None and not holds(_library(kernel), kernel.device, "float32")
