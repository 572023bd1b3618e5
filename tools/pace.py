"""Compares the speed of this working tree with that of another commit, and with the libraries' own attention.

``python tools/pace.py [BASE]`` times the cells of `tools/pace_cells.py` in fresh processes of both trees, which take
turns: base, new, the library's own; then new, base, its own; and so on. It prints medians over turns, and ends with
the cells that take more than 1.1 of the time of BASE or of the library. It is a benchmark: nothing fails by it.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pace_cells
import rich.console
import rich.table
from pace_cells import CELLS, LIBRARIES, QUICK, Cell

ROOT = Path(__file__).parents[1]
SIDES = ("base", "new", "peer")
LIMIT = 1.1  # of a ratio that is listed


def environment(tree: Path, threads: int) -> dict[str, str]:
    """Variables of a process that measures a tree with so many threads."""
    tree, count = tree.resolve(), str(threads)
    paths = os.pathsep.join(str(tree / folder) for folder in ("", "backends", "toolkit"))
    threaded = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")
    threaded += ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    settled = dict.fromkeys(threaded, count) | {"PYTHONPATH": paths, "PACE_TREE": str(tree)}
    settled |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    left_out = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # which change what is compiled, and when
    if threads == 1:
        settled["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return {name: value for name, value in os.environ.items() if name not in left_out} | settled


class Process:
    """A process of `pace_cells.py` that measures one tree, started when it is asked, and again if it died."""

    def __init__(self, library: str, tree: Path, threads: int) -> None:
        self.command = (sys.executable, str(Path(pace_cells.__file__).resolve()), library)
        self.environment, self.process = environment(tree, threads), None

    def ask(self, **order: Any) -> dict[str, Any]:
        """The answer to an order."""
        if self.process is None or self.process.poll() is not None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            options = {"env": self.environment, "cwd": tempfile.gettempdir(), "text": True}
            self.process = subprocess.Popen(self.command, **pipes, **options)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(order), file=self.process.stdin, flush=True)
            if line := self.process.stdout.readline():
                return json.loads(line)
        self.process.wait()
        return {"error": f"died with status {self.process.returncode}"}

    def end(self) -> None:
        """Close the process, which ends when no more orders come."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


@contextlib.contextmanager
def tree_of(base: str) -> Iterator[Path]:
    """The folder of a commit, which is there for a while; or a folder itself."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="pace-") as folder:
        tree = Path(folder).resolve() / "base"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), base], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(cells: list[Cell], base: Path, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each cell after each pair of fresh processes: for each side, a list of answers, one of each turn."""
    for number in range(options.processes):
        turns = len(range(number, options.turns, options.processes))
        for library in LIBRARIES:
            here = [cell for cell in cells if cell.library == library]
            pair = {
                side: Process(library, tree, options.threads) for side, tree in (("base", base), ("new", options.new))
            }
            pair["peer"] = pair["new"]
            for cell in here:
                answers: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
                for turn in range(turns):
                    for side in SIDES if turn % 2 == 0 else ("new", "base", "peer"):
                        if not answers[side] or "wall" in answers[side][0]:
                            answers[side].append(pair[side].ask(cell=cell, peer=side == "peer"))
                yield str(cell), answers
            for side in ("base", "new"):
                pair[side].end()


def ratio(answers: dict[str, Any], other: str, clock: str) -> float | None:
    """The median over turns of our time, divided by that of the other side; None where one of them has none."""
    pairs = [
        (ours[clock], theirs[clock])
        for ours, theirs in zip(answers["new"], answers[other], strict=False)
        if clock in ours and clock in theirs
    ]
    return statistics.median(ours / max(theirs, 1e-9) for ours, theirs in pairs) if pairs else None


def milliseconds(answers: list[dict[str, Any]], clock: str = "processor") -> str:
    """The median over turns, or nothing."""
    found = [answer[clock] * 1e3 for answer in answers if clock in answer]
    return f"{statistics.median(found):.3g}" if found else ""


def shown(number: float | None) -> str:
    """A ratio, or nothing."""
    return "" if number is None else f"{number:.2f}"


def print_table(found: dict[str, dict[str, Any]]) -> None:
    """Print a row for each cell, why some have no number, and the cells above the limit."""
    console = rich.console.Console(width=None if sys.stdout.isatty() else 132)
    table = rich.table.Table(
        "cell", "base ms", "ours ms", "own ms", "/ BASE", "/ own", "wall / BASE", "wall / own", box=None
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, answers in found.items():
        times = [milliseconds(answers[side]) for side in SIDES]
        ratios = [shown(ratio(answers, side, clock)) for clock in ("processor", "wall") for side in ("base", "peer")]
        table.add_row(name, *times, *ratios)
    console.print(table)
    for name, answers in found.items():
        for side, title in zip(SIDES, ("not in BASE", "not here", "not by its own"), strict=True):
            if errors := [answer["error"] for answer in answers[side] if "error" in answer]:
                console.print(f"{name}: {title} ({errors[0]})", markup=False)
    for side, title in (("base", "BASE"), ("peer", "the library's own")):
        ratios = {name: ratio(answers, side, "processor") for name, answers in found.items()}
        above = sorted(((number, name) for name, number in ratios.items() if number and number > LIMIT), reverse=True)
        console.print(
            f"\nabove {LIMIT} of {title}: {len(above)} of {sum(each is not None for each in ratios.values())}"
        )
        for number, name in above:
            console.print(f"  {number:6.2f}  {name}", markup=False)


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on: versions, machine, load."""
    processor = None
    commit = subprocess.run(
        ["git", "-C", str(options.new), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    with contextlib.suppress(OSError):
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        processor = next((line.partition(": ")[2] for line in told.splitlines() if line.startswith("model name")), None)
    return {
        "date": datetime.date.today().isoformat(),
        "base": options.base,
        "commit": commit.stdout.strip(),
        "processor": processor or platform.processor(),
        "load": round(os.getloadavg()[0], 1),
        "threads": options.threads,
        "turns": options.turns,
    }


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pace"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "base", nargs="?", default=settings["reference"], help="a commit or a folder; by default %(default)s"
    )
    parser.add_argument("--new", type=Path, default=ROOT, metavar="FOLDER", help="by default this working tree")
    parser.add_argument("--quick", action="store_true", help="twelve cells, in three minutes")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name contains a text")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--turns", type=int, default=6, help="how often each side is timed; by default %(default)s")
    parser.add_argument(
        "--processes", type=int, default=2, help="fresh processes of each tree, among which turns are divided"
    )
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every turn")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parsed()
    names = {cell: str(cell) for cell in CELLS if cell.library in options.libraries}
    cells = [cell for cell, name in names.items() if options.only in name and (name in QUICK or not options.quick)]
    found: dict[str, dict[str, Any]] = {}
    with tree_of(options.base) as base:
        for name, answers in measure(cells, base, options):
            kept = found.setdefault(name, {side: [] for side in SIDES})
            for side in SIDES:
                kept[side] += answers[side]
            ratios = (f"{side} {shown(ratio(answers, side, 'processor'))}" for side in ("base", "peer"))
            print(f"{name}: {', '.join(ratios)}", file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions(options), "cells": found}), encoding="utf-8")
    print_table(found)


if __name__ == "__main__":
    main()
