"""Run the script of a named case, in a process that knows nothing of this one."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from attention_conformance.named.case import NamedCase

SECONDS = 300.0


class Ran:
    """What a run came to: right, wrong, not here, or crashed; the exit status, and what was printed."""

    def __init__(self, status: int, printed: str) -> None:
        self.status, self.printed = status, printed
        self.word = {0: "right", 1: "wrong", 77: "not here"}.get(status, "crashed")


def run(case: NamedCase, seconds: float = SECONDS) -> Ran:
    """Run the script of a case with this Python; what is not installed is not here."""
    if absent := [name for name in map(_distribution, case.packages) if not _is_installed(name)]:
        return Ran(77, f"not here: {', '.join(absent)}\n")
    # Safe path: the folder of the scripts is no place to import from.
    words = [sys.executable, "-P", str(case.path)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Ran(3, f"no result in {seconds:.0f} s\n")
    last = done.stderr.strip().rpartition("\n")[2]
    if last.startswith(("ImportError: ", "ModuleNotFoundError: ")):  # of a version without it
        return Ran(77, f"not here: {last.partition(': ')[2]}\n")
    # An exception also ends with 1, and is no result.
    is_result = done.returncode in (0, 77) or (done.returncode == 1 and "Traceback" not in done.stderr)
    return Ran(done.returncode, done.stdout) if is_result else Ran(3, done.stdout + done.stderr)


def _distribution(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0]


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
