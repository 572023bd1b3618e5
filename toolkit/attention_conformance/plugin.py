"""A plugin of pytest: ``--attention-kernel kernel.py:attention`` collects a test for each case.

It is loaded by every pytest where the kit is installed, and so imports nothing before it is asked for something.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Generator, Iterable
from dataclasses import fields
from typing import Any

import pytest

from attention_conformance.kernel.options import VALUES, Options, helps_of, word_of

KINDS: dict[str, dict[str, Any]] = {
    "list[str] | None": {"action": "append"},
    "bool | None": {"action": argparse.BooleanOptionalAction},
    "int | None": {"type": int},
}
"""How an option of a type is read."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command, by the same names."""
    group = parser.getgroup("attention", "the cases of attention-core, for an attention of your own")
    group.addoption(
        "--attention-kernel",
        action="append",
        default=[],
        metavar="TARGET",
        help="module:callable, file.py:callable, or a preset: a test for each case; repeatable.",
    )
    helps = helps_of(Options)
    for option in fields(Options):
        kind = KINDS.get(str(option.type), {"choices": VALUES.get(option.name)})
        group.addoption(f"--attention-{word_of(option.name)}", default=option.default, help=helps[option.name], **kind)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, by which ``-m`` chooses these tests."""
    config.addinivalue_line("markers", "attention: a case of --attention-kernel")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Collect kernels after the files of a session."""
    report = yield
    if isinstance(collector, pytest.Session) and report.passed:
        for target in collector.config.getoption("attention_kernel"):
            report.result.append(TargetCollector.from_parent(collector, name=target, nodeid=target))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Name the target as the place of what was skipped, and no line of ours."""
    report = yield
    if isinstance(item, CaseItem) and report.skipped and isinstance(report.longrepr, tuple):
        report.longrepr = (item.location[0], None, report.longrepr[2])  # type: ignore[assignment]
    return report


class TargetCollector(pytest.Collector):
    """The tests of one target."""

    def collect(self) -> Iterable[CaseItem]:
        """Load the target, ask small calls about it, and list the cases that it can be asked."""
        made = importlib.import_module("attention_conformance.pytest_cases").case_tests
        chosen = {each.name: self.config.getoption(f"--attention-{word_of(each.name)}") for each in fields(Options)}
        try:
            return [
                CaseItem.from_parent(self, name=each.name, test=each) for each in made(self.name, Options(**chosen))
            ]
        except ValueError as error:
            raise self.CollectError(str(error)) from error


class CaseItem(pytest.Item):
    """One case of a target."""

    def __init__(self, *, test: Any, **node: Any) -> None:
        super().__init__(**node)
        self._test = test
        self.add_marker("attention")

    def runtest(self) -> None:
        """Run the case."""
        self._test.check()

    def reportinfo(self) -> tuple[Any, None, str]:
        """The target, and the name of the case."""
        assert self.parent is not None
        return self.config.rootpath / self.parent.name, None, self.name
