"""Plants faults, one at a time, and fails unless the tests catch every one of them.

A suite that cannot fail proves nothing. The `.toml` files next to this one list faults by backend and file. Each is what
it breaks, a text that stands exactly once in the file, and what that becomes. `caught_by.txt` names the test that notices
it on that backend. A process that has imported pytest and a library, and nothing of ours, forks one for each fault, which
reads the file wrongly and runs that test. In the end these tests must pass without a fault. A process that a test starts
sees no fault.
"""

import argparse
import gc
import importlib
import linecache
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
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
INDEX = Path(__file__).with_name("caught_by.txt")
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


class Fault(NamedTuple):
    """Text that stands exactly once in a file becomes another, which a test must notice on a backend."""

    breaks: str
    file: str
    old: str
    new: str
    backend: str
    caught_by: str


class Verdict(NamedTuple):
    """The end of a run of tests: the first that failed, pytest's exit code, or `None` of a dead process, and seconds."""

    failed: str | None = None
    code: int | None = None
    seconds: float = 0.0


def main(words: list[str]) -> int:
    """Plant the faults that are asked for; return 0 if all are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="*", help="plant the faults with one of these words in their file or description")
    parser.add_argument("--all", action="store_true", help="plant all faults")
    parser.add_argument("--changed", metavar="BASE", help="plant the faults of files that changed since this commit")
    parser.add_argument("--record", action="store_true", help="look further for tests, and write the index")
    asked = parser.parse_args(words)
    index = dict(line.split("\t") for line in INDEX.read_text(encoding="utf-8").splitlines())
    every = faults(index)
    chosen = choose(every, asked)
    if wrong := [*mistakes(every, {fault.breaks for fault in every} if asked.record else index)]:
        print(*wrong, sep="\n")
        return 1
    index = {fault.breaks: fault.caught_by for fault in every}
    os.environ.update(JAX_ENABLE_X64="1", TF_CPP_MIN_LOG_LEVEL="3")  # as tests/conftest.py says, which comes too late
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of which tests need none, and one is the kit's
    num_survivors = num_failing = 0
    for backend, modules in IMPORTED.items():
        of_backend = [fault for fault in chosen if fault.backend == backend]
        if of_backend:
            for module in (*SHARED, *modules):
                importlib.import_module(module)
            pytest.main(["--version", "--noconftest"])  # imports what pytest imports of itself
            gc.freeze()  # pytest collects garbage ten times, which walks through all that these modules hold
            caught = {}
            for fault, test in plant(of_backend, every if asked.record else []):
                caught[fault] = index[fault.breaks] = test
                if asked.record:
                    lines = (f"{breaks}\t{found}\n" for breaks, found in sorted(index.items()) if found)
                    INDEX.write_text("".join(lines), encoding="utf-8")
            num_survivors += len(of_backend) - len(caught)
            num_failing += failing_without_fault(caught.values(), backend)
    print(f"{len(chosen)} of {len(every)} faults: {num_survivors} survived; {num_failing} tests fail without one, too")
    return 1 if num_survivors or num_failing or (asked.word and not chosen) else 0


def faults(index: dict[str, str]) -> list[Fault]:
    """The faults of all lists, each with the test of the index."""
    lists = {backend: INDEX.with_name(f"{backend}.toml").read_text(encoding="utf-8") for backend in IMPORTED}
    return [
        Fault(breaks, file, old, new, backend, index.get(breaks, ""))
        for backend, text in lists.items()
        for file, rows in tomllib.loads(text).items()
        for breaks, (old, new) in rows.items()
    ]


def mistakes(every: list[Fault], index: Collection[str]) -> Iterator[str]:
    """Say which faults name a text that does not stand once in their file, or have a name that does not stand once."""
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {fault.file for fault in every}}
    for fault in every:
        if texts[fault.file].count(fault.old) != 1:
            yield f"misplaced  {fault.breaks}: the old text must stand exactly once in {fault.file}: {fault.old!r}"
    names = Counter(fault.breaks for fault in every)
    for name in sorted(names.keys() | index):
        if names[name] != 1 or name not in index:
            yield f"misnamed   {name}: must stand once in the lists, and in {INDEX.name}, which `--record` writes"


def choose(every: list[Fault], asked: argparse.Namespace) -> list[Fault]:
    """The faults that are asked for, or those of files that the last commit or merge changed.

    Without a repository all faults are planted.
    """
    if asked.all or asked.word:
        return [each for each in every if asked.all or any(word in f"{each.file} {each.breaks}" for word in asked.word)]
    try:
        before = asked.changed or git("rev-list", "--first-parent", "--max-count=2", "HEAD")[-1]
        changed = set(git("diff", "--name-only", before, "--"))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"all faults are planted: {error}")
        return every
    return [
        each
        for each in every
        if not changed.isdisjoint((each.file, each.caught_by.split("::")[0]))
        or (asked.record and "::" not in each.caught_by)
    ]


def git(*words: str) -> list[str]:
    """The words that git prints."""
    return subprocess.run(("git", *words), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def plant(chosen: list[Fault], every: list[Fault]) -> Iterator[tuple[Fault, str]]:
    """Plant faults, and give those that tests noticed; where there are neighbours, look for tests near theirs."""
    for depth in range(3 if every else 1):
        missed = []
        for fault, found in runs((fault, fault.backend, places(fault, every)[depth]) for fault in chosen):
            if found.failed is None and every and depth < 2:
                missed.append(fault)
                continue
            if found.failed is not None:
                yield fault, found.failed
            word = "SURVIVED" if found.failed is None else "caught"
            print(f"{word:8}  {found.seconds:5.1f} s  {fault.breaks}: {reason(fault, found)}", flush=True)
        chosen = missed


def places(fault: Fault, every: list[Fault]) -> tuple[set[str], set[str], set[str]]:
    """Where a test may notice a fault: as recorded, in files that catch faults of its file, in others of their folders."""
    near = {each.caught_by.split("::")[0] for each in every if each.file == fault.file} - {""}
    folders = {(ROOT / test).parent for test in near} or (ROOT / "tests").iterdir()
    tests = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.glob("test_*.py")}
    return {fault.caught_by} - {""}, near, tests - near


def reason(fault: Fault, found: Verdict) -> str:
    """The test that noticed a fault, or why none did."""
    ended = "a dead process" if found.code is None else pytest.ExitCode(found.code).name
    return found.failed or f"{fault.caught_by} ended with {ended}"


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
    code = pytest.main([*options, *tests], plugins=[failures]) if tests else pytest.ExitCode.NO_TESTS_COLLECTED
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
