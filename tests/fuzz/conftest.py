"""The fixture ``fuzz`` draws cases for a short while in the tests, and for minutes in ``nox -s fuzz``.

``ATTENTION_CORE_FUZZ_MINUTES`` is shared out among the tests of this folder. Without it, every test draws a few cases,
always the same. ``--hypothesis-seed`` chooses the cases of a long run; examples that failed are kept in
``.hypothesis/fuzz``, one folder for each test, and replayed first.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from fuzz_problems import differentiating
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import SearchStrategy

MINUTES = float(os.environ.get("ATTENTION_CORE_FUZZ_MINUTES", "0"))
SHORT = 8  # cases of a test where no minutes are given
EXAMPLES = Path(__file__).parents[2] / ".hypothesis" / "fuzz"
ALL_CHECKS = list(HealthCheck)


class Fuzzer:
    """Draws cases of one test until its time is over, counts them, and fails with the smallest that fails."""

    def __init__(self, name: str, seed: int, seconds: float, cases: int) -> None:
        self.name, self.seed, self.seconds, self.cases = name, seed, seconds, cases
        self.count = 0

    def __call__(self, check: Callable[[Any], None], strategy: SearchStrategy[Any], corpus: Sequence[Any] = ()) -> None:
        """Check a corpus, and what a strategy draws."""
        end, failed = time.monotonic() + self.seconds, False

        def one(case: Any) -> None:
            nonlocal failed
            if self.seconds and not failed and time.monotonic() > end:
                return  # what is left of a round; a failure is shrunk whatever the time
            try:
                check(case)
            except BaseException:
                failed = True
                raise
            self.count += 1

        for case in corpus:
            one(case)
        if not self.seconds:
            test = hypothesis.given(strategy)(one)
            settings(_SETTINGS, max_examples=self.cases, derandomize=True, database=None)(test)()
            return
        examples, phases = 5, [Phase.reuse, Phase.generate, Phase.shrink]
        while time.monotonic() < end:
            started, before = time.monotonic(), self.count
            self._round(hypothesis.given(strategy)(one), examples, phases)
            elapsed, done = time.monotonic() - started, self.count - before
            left = min(10.0, end - time.monotonic())
            examples, phases = max(5, min(2000, int(done / max(elapsed, 1e-3) * left))), [Phase.generate, Phase.shrink]

    def _round(self, test: Callable[[], None], examples: int, phases: list[Phase]) -> None:
        self.seed += 1
        database = DirectoryBasedExampleDatabase(EXAMPLES / re.sub(r"\W+", "_", self.name))
        options = settings(_SETTINGS, max_examples=examples, database=database, phases=phases)
        options(hypothesis.seed(self.seed)(test))()


_SETTINGS = settings(deadline=None, suppress_health_check=ALL_CHECKS, verbosity=Verbosity.normal, print_blob=False)


@pytest.hookimpl(trylast=True)  # after others have left out what was not asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Share out the minutes."""
    config.stash[_SHARE] = 60 * MINUTES / max(1, sum("fuzz" in getattr(item, "fixturenames", ()) for item in items))


_SHARE = pytest.StashKey[float]()


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Any:
    """A function ``fuzz(check, *strategies)``."""
    seed = int(request.config.getoption("--hypothesis-seed") or 0) * 1_000_003
    marker = request.node.get_closest_marker("cases")
    cases = marker.args[0] if marker else SHORT
    if any(word in request.node.name for word in ("[jax", "[tensorflow")):  # which compile for every shape
        cases = -(-cases // 6)
    fuzzer = Fuzzer(request.node.name, seed, request.config.stash[_SHARE], cases)
    yield fuzzer
    request.node.user_properties.append(("cases", fuzzer.count))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many cases each test had."""
    if MINUTES:
        terminalreporter.section("cases")
        for report in terminalreporter.stats.get("", []):
            for count in [value for name, value in report.user_properties if name == "cases"]:
                terminalreporter.write_line(f"{report.nodeid:<90}{count:>9}")


@pytest.fixture(scope="session")
def several() -> list[Any]:
    """The libraries at hand that differentiate."""
    return differentiating()
