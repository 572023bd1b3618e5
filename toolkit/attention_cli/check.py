"""The command ``check``: anybody's attention, in processes of its own, and what was found about it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from attention_cli.progress import followed
from attention_cli.terminal import check_file, console, refusal, refusing
from attention_conformance.kernel.presets import PRESETS
from attention_conformance.measure.catalogue import large_cases
from attention_conformance.measure.finding import Finding, accept, exit_status, most_telling
from attention_conformance.measure.kinds import never_computed
from attention_conformance.measure.messages import Described, Refused
from attention_conformance.mistakes.causes import agreed
from attention_conformance.run.again import command_of, script_of
from attention_conformance.run.alone import confirmed
from attention_conformance.run.job import Job, job_of
from attention_conformance.run.kernels import Message, supervised, work
from attention_conformance.run.names import no_case
from attention_conformance.verdict.expected import (
    Expected,
    ExpectedError,
    Origin,
    expected_of,
    expected_text,
    met,
    unmatched,
)
from attention_conformance.written import summary as report
from attention_files.writing import write_file
from attention_workers.machine import environment

if TYPE_CHECKING:
    from attention_cli.app import Check

AS_IT_IS: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False}
"""How a program is printed, which has brackets."""


def check(options: Check, /) -> None:
    """Check a target, show what was found, and exit with its status."""
    untrusted = options.untrusted
    if untrusted and (options.same_bits_as or not options.jobs):
        raise refusal("expected --untrusted without --same-bits-as and --jobs 0; got one of them")
    for path in (options.json, options.write_expected):
        check_file(path)
    if untrusted and options.seed is None:
        options = replace(options, seed=secrets.randbits(32))
    with refusing(ValueError):
        job = job_of(options.target, options, is_trusted=not untrusted)
    if job.complaint:
        raise refusal(job.complaint)
    run = _Run(job, _expected(options.expected, options.target))
    try:
        messages = supervised(job, options.timeout) if options.jobs else work(job)
        with contextlib.closing(messages):
            run.follow(messages)
    except BaseException as error:  # of an interrupt: what was found is told, and kept
        run.finish(options, interrupted=True)
        if isinstance(error, SystemExit):  # of a target, which may exit with status 0
            raise typer.Exit(3) from error
        raise
    if run.reason:
        raise refusal(run.reason)
    run.finish(options)
    raise typer.Exit(exit_status(run.results, options.strict))


def _expected(expected: str | None, target: str) -> tuple[Expected, ...]:
    with refusing(ExpectedError):
        found = expected_of(target, expected)
    for each in found:
        if wrong := no_case(each.case, of_results=True):
            raise refusal(f"{wrong}, in {expected}")
    return found


class _Run:
    """Follows the messages of a run, and tells of them."""

    def __init__(self, job: Job, expected: tuple[Expected, ...]) -> None:
        self.job, self.results, self.reason = job, list[Finding](), ""
        self._expected, self._has_verdict = expected, False
        self._about: dict[str, Any] = {"target": job.target, "profile": self.job.how, "seed": job.seed}
        self._about |= {"declared": dict(job.declared), "machine": environment()}
        self._screen = console()
        if not self._screen.is_terminal:
            self._screen.width = min(self._screen.width, 100)

    @property
    def _origin(self) -> Origin:
        facts = self._about.get("assumed", self.job.declared)
        return Origin(str(facts.get("device") or "cpu"), str(facts.get("backend") or ""))

    def follow(self, messages: Iterator[Message]) -> None:
        """Tell of each message as it comes."""
        for message in followed(messages, f"loading {self.job.target}"):
            if isinstance(message, Refused):
                self.reason = message.reason
            elif isinstance(message, Described):
                self._describe(message)
            elif isinstance(message, Finding):
                self._note(message)

    def _describe(self, message: Described) -> None:
        if ("other" if message.target else "assumed") in self._about:  # by a process before it crashed
            return
        if message.target:
            self._about["other"] = dict(message.facts)
            self._about["versions"] |= message.versions
        else:
            self._about |= {"assumed": dict(message.facts), "sources": dict(message.sources)}
            self._about["versions"] = dict(message.versions)
        versions = ", ".join(f"{name} {each}" for name, each in message.versions.items())
        self._screen.print(Text(f"{message.target or self.job.target} ({versions}), assumed:"), style="bold")
        for line in report.assumptions(message.facts, message.sources):
            self._screen.print(Text(f"  {line}"))

    def _note(self, result: Finding) -> None:
        result = accept(result, self.job.accepted)
        if result.dtype != "-" and result.verdict != "not offered" and not self._has_verdict:
            self._has_verdict = True
            self._screen.print(f"first verdict: {result.case} {result.dtype} is {result.label}", style="dim")
        self.results.append(result)  # judged by what is expected at the end, when all causes are known
        if self.job.same_bits_as:
            self._screen.print(report.line_of(result), highlight=False, soft_wrap=True)

    def finish(self, options: Check, *, interrupted: bool = False) -> None:
        """Show what was found, and write it."""
        self._about["interrupted"] = interrupted
        if not (interrupted or self.job.cases or self.job.same_bits_as):
            self.results += [accept(each, self.job.accepted) for each in never_computed(self.results)]
        found = agreed(self.results)
        if self.job.is_trusted and not (interrupted or self.job.same_bits_as or large_cases(self.job.cases)):
            found = confirmed(found, self.job)
        self.results = [met(each, self._expected, self._origin) for each in found]
        if not (interrupted or self.job.cases or self.job.dtypes or self.reason):
            self.results += unmatched(self.results, self._expected, self._origin)
        for each in report.tables(self.results):
            self._screen.print(each, highlight=False)
        for line in report.power(self.results, self.job.how):
            self._screen.print(line, highlight=False)
        telling = most_telling(self.results)
        if telling is not None:
            again = (telling, self.job.target, self.job.declared, self.job.how)
            self._screen.print(f"\nThis program runs the clearest case again:\n\n{script_of(*again)}", **AS_IT_IS)
            self._screen.print(f"This command runs it again: {command_of(*again)}", **AS_IT_IS)
        if interrupted:
            self._screen.print("Interrupted: the cases after these were not run.", highlight=False)
        typer.echo(report.summary(self.results))
        if options.json is not None:
            report.write_findings(options.json, self.results, self._about)
        if options.write_expected is not None:
            self._write_expected(options.write_expected)

    def _write_expected(self, path: Path) -> None:
        preset = PRESETS.get(self.job.target)
        package = preset.package if preset else ""
        text = expected_text(self.results, self._expected, origin=self._origin, package=package)
        write_file(path, text.encode())
