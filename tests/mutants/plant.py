"""Plants faults in the core, one at a time, and fails unless the tests catch every one of them.

A suite that cannot fail proves nothing. ``faults.toml`` lists faults: lines that somebody could get wrong. Each is
planted in a copy of the core, where a test must fail that passes on the unchanged copy. ``nox -s mutants`` plants
an eighth of them, another eighth after each change of the core; ``nox -s mutants -- --all`` plants all of them.
Other words after ``--`` choose the faults whose description contains one of them.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CORE = ROOT / "attention_core"
TESTS = ROOT / "tests/core"
# The tests that ought to catch a fault in a file or a room, where they have another name than it.
MIRRORS = {
    "_arithmetic": "reproducible",
    "_checks": "arguments",
    "_checks/functions": "user_functions",
    "_arithmetic/angles": "rotary",
    "_arithmetic/fast": "functions",
    "_arithmetic/logistic": "functions",
    "_attention/blocks": "blockwise",
    "_attention/blocks/scores": "blockwise",
    "_attention/key_range": "few_queries",
    "_attention/plans": "small_calls",
    "_attention/small_masks": "masks",
    "_attention/reproducible/margins": "reproducible_small_weights",
    "_attention/reproducible/pieces": "reproducible_pieces",
    "_attention/reproducible/refinement": "reproducible_small_weights",
    "_attention/reproducible/weights": "reproducible_small_weights",
    "_functions/constants": "namespace",
    "_functions/decoder_layer": "decoder",
    "_functions/sampling": "generation",
    "_functions/multi_head": "encoder",
}
PARTS = 8  # of the list, one of which is planted where nothing is asked for
WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
LIMIT_S = 600


class Fault(NamedTuple):
    """One line changed: ``old`` stands exactly once in the file. Tests of another name than its room may catch it."""

    breaks: str
    file: str
    old: str
    new: str
    tests: str | None = None


FAULTS = [Fault(**fault) for fault in tomllib.loads(Path(__file__).with_name("faults.toml").read_text())["fault"]]


def main(words: list[str]) -> int:
    """Plant the faults that are asked for; return 0 if all are caught."""
    chosen = faults_for(words)
    misplaced = [fault for fault in FAULTS if (CORE / fault.file).read_text().count(fault.old) != 1]
    for fault in misplaced:
        print(f"misplaced  {fault.breaks}: the old text must stand exactly once in {fault.file}: {fault.old!r}")
    if misplaced or not chosen:
        return 1
    with ThreadPoolExecutor(WORKERS) as pool:
        verdicts = list(pool.map(reported, chosen))
    survived = [fault for fault, found in zip(chosen, verdicts, strict=True) if found.failed is None]
    print(f"{len(chosen) - len(survived)} faults caught, {len(survived)} survived", flush=True)
    clean = verdict_without_fault(sorted({found.failed for found in verdicts if found.failed is not None}))
    print(f"without a fault, the tests that caught them: {clean.text}")
    return 1 if survived or clean.failed else 0


def faults_for(words: list[str]) -> list[Fault]:
    """The faults whose description contains one of the words; without words a part, which depends on the sources."""
    if words:
        return [fault for fault in FAULTS if words == ["--all"] or any(word in fault.breaks for word in words)]
    sources = b"".join(path.read_bytes() for path in sorted(CORE.rglob("*.py")))
    return FAULTS[hashlib.sha256(sources).digest()[0] % PARTS :: PARTS]


class Verdict(NamedTuple):
    """The test that failed, if one did, and the line that says so."""

    failed: str | None
    text: str


def reported(fault: Fault) -> Verdict:
    """Test one fault, and print what came of it."""
    found = verdict(fault)
    print(f"{'caught    ' if found.failed else 'SURVIVED  '} {fault.file:16} {fault.breaks}: {found.text}", flush=True)
    return found


def verdict(fault: Fault) -> Verdict:
    """Test a copy of the core with one fault."""
    start = time.perf_counter()
    with copy_of_core() as folder:
        path = folder / "attention_core" / fault.file
        path.write_text(path.read_text().replace(fault.old, fault.new))
        mirror, others = tests_of(fault)
        done = run_tests(folder, mirror or others)
        if mirror and done.returncode == 0:  # to collect the tests of all files takes longer than to run those of one
            done = run_tests(folder, others)
    return verdict_of(done, start)


def verdict_without_fault(tests: list[str]) -> Verdict:
    """Run tests on an unchanged copy of the core: one that fails there has shown nothing."""
    start = time.perf_counter()
    if not tests:
        return Verdict(None, "none")
    with copy_of_core() as folder:
        return verdict_of(run_tests(folder, tests, "-n", str(WORKERS)), start)


@contextmanager
def copy_of_core() -> Iterator[Path]:
    """A folder with a copy of the core, to be changed."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(CORE, Path(folder) / "attention_core", ignore=shutil.ignore_patterns("__pycache__"))
        yield Path(folder)


def verdict_of(done: subprocess.CompletedProcess[str], start: float) -> Verdict:
    """The verdict of tests that have run since a time."""
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    if done.returncode != 0 and not failures:  # the tests could not be run, which shows nothing
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    summary = failures[0] if failures else done.stdout.strip().splitlines()[-1].strip("= ")
    return Verdict(failures[0] if failures else None, f"{summary} ({time.perf_counter() - start:.1f} s)")


def tests_of(fault: Fault) -> tuple[list[Path], list[Path]]:
    """The file of the tests that ought to catch a fault, if there is one, and all others."""
    files = sorted(TESTS.glob("test_*.py"))
    if fault.tests is not None:
        first = TESTS / f"test_{fault.tests}.py"
        return [first], [test for test in files if test != first]
    path = PurePath(fault.file.removesuffix(".py"))
    rooms = [MIRRORS.get(str(room), room.name.removeprefix("_")) for room in path.parents]
    named = (TESTS / f"test_{name}.py" for name in (MIRRORS.get(str(path), path.name), *rooms))
    mirror = next((test for test in named if test in files), None)
    return [test for test in files if test == mirror], [test for test in files if test != mirror]


def run_tests(folder: Path, tests: Sequence[Path | str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests against the copy of the core in a folder."""
    # -P keeps the checkout off the path, where PYTHONPATH puts the copy first.
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *map(str, tests)]
    path = os.pathsep.join([str(folder), str(ROOT / "backends")])
    environment = {**os.environ, "PYTHONPATH": path, "ATTENTION_CORE_BACKENDS": "array_api_strict,numpy"}
    script = "import attention_core, sys; sys.exit(not attention_core.__file__.startswith(sys.argv[1]))"
    subprocess.run([sys.executable, "-P", "-c", script, str(folder)], env=environment, check=True)
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
