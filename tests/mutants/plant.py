"""Plants faults, one at a time, and fails unless the tests catch every one of them.

A suite that cannot fail proves nothing. The `.toml` files next to this one list faults: lines that somebody could get
wrong, and for each the test that notices. A process that has imported pytest and a library, and nothing of ours, forks
one for each fault, which reads the line wrongly and runs that test. In the end these tests must pass without a fault.

Words choose the faults whose file or description contains one of them. `--record` looks further where the recorded
test notices nothing, or is gone: in its file, then in the other files of its folder. It writes down what it finds.
A process that a test starts sees no fault.
"""

import gc
import importlib
import json
import linecache
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from itertools import islice
from multiprocessing import connection, get_context
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import hypothesis  # noqa: F401
import numpy as np  # noqa: F401
import pytest

ROOT = Path(__file__).parents[2]
LISTS = sorted(Path(__file__).parent.glob("*.toml"))
# What is imported before processes are forked, for all and by backend. No array is made: no runtime survives a fork.
SHARED = (
    *("array_api_compat.numpy", "gguf", "ml_dtypes", "pdb", "safetensors.numpy", "statistics", "threadpoolctl"),
    *("typer.testing", "unittest.mock", "xml.etree.ElementTree"),
)
IMPORTED = {
    "numpy": ("array_api_strict", "dask.array"),
    "torch": ("torch._dynamo", "array_api_compat.torch"),
    "jax": ("jax", "flax.nnx"),
    "tensorflow": ("tensorflow",),
}
REQUIRED = {"numpy": "array_api_strict,numpy"}
WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
LIMIT_S = 240
AT_ONCE = 60  # tests in a process without a fault
FORK = get_context("fork")
NO_SUCH_TEST = {pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED}


class Fault(NamedTuple):
    """Text that stands exactly once in a file becomes another, which a test must notice on a backend."""

    breaks: str
    file: str
    old: str
    new: str
    caught_by: str
    backend: str = "numpy"


class Verdict(NamedTuple):
    """The end of a run of tests: the first that failed, pytest's exit code, or `None` of a dead process, and seconds."""

    failed: str | None = None
    code: int | None = None
    seconds: float = 0.0


def main(words: list[str]) -> int:
    """Plant the faults that are asked for; return 0 if all are caught."""
    asked = [word for word in words if word != "--record"]
    chosen = [each for each in faults() if not asked or any(word in f"{each.file} {each.breaks}" for word in asked)]
    misplaced = [each for each in chosen if (ROOT / each.file).read_text(encoding="utf-8").count(each.old) != 1]
    for fault in misplaced:
        print(f"misplaced  {fault.breaks}: the old text must stand exactly once in {fault.file}: {fault.old!r}")
    if misplaced or not chosen:
        return 1
    os.environ.update(JAX_ENABLE_X64="1", TF_CPP_MIN_LOG_LEVEL="3")  # as tests/conftest.py says, which comes too late
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of which tests need none, and one is the kit's
    if "--record" not in words:
        unrecorded = [each for each in chosen if "::" not in each.caught_by]
        print(f"{len(unrecorded)} faults have no recorded test yet, and are not planted: `--record` looks for one")
        chosen = [each for each in chosen if each not in unrecorded]
    num_survivors = num_failing = 0
    for backend, modules in IMPORTED.items():
        of_backend = [fault for fault in chosen if fault.backend == backend]
        if of_backend:
            for module in (*SHARED, *modules):
                importlib.import_module(module)
            pytest.main(["--version", "--noconftest"])  # imports what pytest imports of itself
            gc.freeze()  # pytest collects garbage ten times, which walks through all that these modules hold
            caught = list(plant(of_backend, "--record" in words))
            num_survivors += len(of_backend) - len(caught)
            num_failing += failing_without_fault(caught, backend)
    print(f"{len(chosen)} faults: {num_survivors} survived, {num_failing} tests fail without a fault, too")
    return 1 if num_survivors or num_failing else 0


def faults() -> list[Fault]:
    """The faults of all lists."""
    return [Fault(**fault) for path in LISTS for fault in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]]


def plant(chosen: list[Fault], record: bool) -> Iterator[str]:
    """Plant faults, and give the tests that noticed them."""
    looks = (recorded, in_its_file, in_its_folder) if record else (recorded,)
    for look in looks:
        missed = []
        for fault, found in runs((fault, fault.backend, look(fault)) for fault in chosen):
            if found.failed is None and look is not looks[-1]:
                missed.append(fault)
                continue
            if found.failed is not None:
                yield found.failed
                if found.failed != fault.caught_by and record:
                    write(fault, found.failed)
            word = "SURVIVED" if found.failed is None else "caught"
            print(f"{word:8}  {found.seconds:5.1f} s  {fault.breaks}: {reason(fault, found)}", flush=True)
        chosen = missed


def recorded(fault: Fault) -> list[str]:
    """The test that noticed a fault when it was recorded, or the file where somebody expects one."""
    return [fault.caught_by]


def in_its_file(fault: Fault) -> list[str]:
    """The file of that test."""
    return [fault.caught_by.split("::")[0]]


def in_its_folder(fault: Fault) -> list[str]:
    """The other files of its folder."""
    path = ROOT / fault.caught_by.split("::")[0]
    return [str(test.relative_to(ROOT)) for test in sorted(path.parent.glob("test_*.py")) if test != path]


def reason(fault: Fault, found: Verdict) -> str:
    """The test that noticed a fault, or why none did."""
    if found.code in NO_SUCH_TEST:
        return f"no test {fault.caught_by}; `--record` looks for another"
    ended = "the process died" if found.code is None else f"pytest ended with {found.code}"
    return found.failed or (f"{fault.caught_by} passes" if found.code == 0 else ended)


def failing_without_fault(tests: Iterable[str], backend: str) -> int:
    """Run tests on unchanged sources, many in a process, and count those processes where one fails: it shows nothing."""
    ordered = sorted(set(tests))
    count = WORKERS * (1 + len(ordered) // (AT_ONCE * WORKERS))  # so that none is idle
    parts = [ordered[start::count] for start in range(min(count, len(ordered)))]
    failing = [found for _, found in runs(("", backend, part) for part in parts) if found.code != 0]
    for found in failing:
        print(f"fails without a fault, too: {found.failed} (pytest ended with {found.code})", flush=True)
    return len(failing)


def runs(jobs: Iterable[tuple[Any, str, Iterable[str]]]) -> Iterator[tuple[Any, Verdict]]:
    """Run tests on a backend for each job, with its fault if it is one, a process each; the verdicts as they end."""
    waiting, running = iter(jobs), {}
    while True:
        for subject, backend, tests in islice(waiting, WORKERS - len(running)):
            ours, theirs = FORK.Pipe(duplex=False)
            process = FORK.Process(target=run, args=(subject, backend, sorted(tests), theirs))
            process.start()
            theirs.close()
            running[ours] = subject, process
        if not running:
            return
        for pipe in connection.wait(list(running)):
            subject, process = running.pop(pipe)
            try:
                yield subject, Verdict(*pipe.recv())
            except EOFError:
                yield subject, Verdict()
            process.join()


def run(subject: Fault | str, backend: str, tests: list[str], pipe: connection.Connection) -> None:
    """Run tests, as the process that does nothing else, and send the verdict."""
    start = time.process_time()
    signal.alarm(LIMIT_S)
    if isinstance(subject, Fault):
        read_wrongly(subject)
    sys.dont_write_bytecode = False  # hundreds of processes import the same files
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / name) for name in (".", "backends", "toolkit")]
    os.environ["ATTENTION_CORE_BACKENDS"] = REQUIRED.get(backend, backend)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    failures = Failures()
    options = "-x", "-q", "--assert=plain", "--tb=no", "-p", "no:cacheprovider"
    code = pytest.main([*options, *tests], plugins=[failures])
    pipe.send(Verdict(failures.first, int(code), time.process_time() - start))


def read_wrongly(fault: Fault) -> None:
    """Import a file with its fault, and show its source to those who compile from it."""
    path = str(ROOT / fault.file)
    source = Path(path).read_text(encoding="utf-8").replace(fault.old, fault.new)
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    right = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        return compile(source, path, "exec") if loader.path == path else right(loader, name)

    SourceFileLoader.get_code = get_code


class Failures:
    """A plugin of pytest that keeps the name of the first test that fails."""

    first: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test that fails."""
        if report.failed and self.first is None:
            self.first = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a file that cannot be imported."""
        if report.failed and self.first is None:
            self.first = report.nodeid


def write(fault: Fault, test: str) -> None:
    """Record the test that noticed a fault."""
    for path in LISTS:
        head, *blocks = path.read_text(encoding="utf-8").split("[[fault]]\n")
        for index, block in enumerate(blocks):
            if tomllib.loads(block)["breaks"] == fault.breaks:
                blocks[index] = re.sub(r"(?m)^caught_by = .*$", lambda _: f"caught_by = {json.dumps(test)}", block)
                path.write_text("[[fault]]\n".join([head, *blocks]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
