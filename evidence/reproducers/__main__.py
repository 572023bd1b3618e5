"""Runs the scripts of named cases: ``python -m reproducers [NAME...]``; status 1 if one shows something new.

Without names, all. ``python -m reproducers --page PAGE`` writes the tables of the page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from attention_conformance.named import PROPERTIES, RESULTS, NamedCase, named_cases

ROOT = Path(__file__).parents[2]
SECONDS = 300.0
WORDS = {0: "right", 1: "wrong", 77: "not here"}
_MADE = re.compile(r"(?<=<!-- made by a command -->\n).*", re.DOTALL)


def main(words: list[str]) -> int:
    """Run scripts, a line each, or write the tables into a page."""
    if words[:1] == ["--page"]:
        page = Path(words[1])
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    new = 0
    for case in (each for each in named_cases() if each.script and any(word in each.name for word in words or [""])):
        status, printed = run(ROOT / case.script, case.packages)
        same = status in (RESULTS[case.shown.result], 77)
        new += not same
        expected = "" if same else f"; expected {case.shown.result}:\n{printed}"
        print(f"{case.name}: {WORDS.get(status, 'crashed')}{expected}", flush=True)
    return int(new > 0)


def run(script: Path, packages: tuple[str, ...] = (), seconds: float = SECONDS) -> tuple[int, str]:
    """Run a script with this Python: its status, 77 without a package and 3 after a crash, and what it printed."""
    if absent := [name for name in (re.split(r"[\[<>=!~ ]", each)[0] for each in packages) if not _is_installed(name)]:
        return 77, f"not here: {', '.join(absent)}\n"
    words = [sys.executable, "-P", str(script)]  # safe path: the folder of the scripts is no place to import from
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 3, f"no result in {seconds:.0f} s\n"
    last = done.stderr.strip().rpartition("\n")[2]
    if last.startswith(("ImportError: ", "ModuleNotFoundError: ")):  # of a version without it
        return 77, f"not here: {last.partition(': ')[2]}\n"
    # An exception also ends with 1, and is no result.
    is_result = done.returncode in (0, 77) or (done.returncode == 1 and "Traceback" not in done.stderr)
    return (done.returncode, done.stdout) if is_result else (3, done.stdout + done.stderr)


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def tables() -> str:
    """How many cases there are, and all of them by property: what the reproducer showed, and with which versions."""
    cases = named_cases()
    ran = [case for case in cases if case.shown.result != "not run"]
    wrong = sum(case.shown.result == "wrong" for case in ran)
    lines = [f"{len(cases)} cases, of which {len(ran)} ran on a CPU; {wrong} of these were wrong."]
    for word, sentence in PROPERTIES.items():
        chosen = [case for case in cases if case.property == word]
        if chosen:
            lines += ["", f"### {word.capitalize()}", "", f"*{sentence[0].upper()}{sentence[1:]}.*", ""]
            lines += ["| case | thread | line | result | with |", "|---|---|---|---|---|", *map(_row, chosen)]
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """The page with the tables behind its mark."""
    return _MADE.sub(lambda _: "\n" + tables(), page)


def _row(case: NamedCase) -> str:
    result = f"**{case.shown.result}**" if case.shown.result == "wrong" else case.shown.result
    versions = case.shown.versions or case.shown.detail
    name = f"`{case.name}`: {case.summary.rstrip('.')}"
    return f"| {name} | [{case.thread}]({case.url}) | {case.line or '–'} | {result} | {versions} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
