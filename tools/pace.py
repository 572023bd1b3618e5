"""Compares the speed of this working tree with that of another commit, and with the libraries' own attention.

``python tools/pace.py [BASE]`` times the cells of `tools/pace_cells.py` in fresh processes of both trees, which take
turns: base, new, the library's own; then new, base, its own; and so on. It prints medians over turns, and ends with
the cells that take more than 1.1 of the time of BASE or of the library. It is a benchmark: nothing fails by it.

``--programs`` compares compiled programs with eager calls instead: time, peak memory, graphs and operations.
``--json docs/measurements/pace.json --page`` measures all cells, and writes the tables of `docs/evidence/benchmark.md`.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pace_cells
import rich.console
import rich.table
from pace_cells import CELLS, COMPILED, EVERY, FRAMEWORKS, OPEN, OPTIONS, PROBLEMS, QUICK, Cell
from pace_libraries import LIBRARIES

ROOT = Path(__file__).parents[1]
PAGE, KEPT = ROOT / "docs" / "evidence" / "benchmark.md", ROOT / "docs" / "measurements" / "pace.json"
SIDES = ("base", "new", "peer")
Answers = dict[str, list[dict[str, Any]]]  # of each side, one of each turn
LIMIT = 1.1  # of a ratio that is listed
LENGTHS = (1024, 4096)  # of programs
MIB = 2**20
FREED = {  # what is freed goes back to the system at once; oneDNN has an allocator of its own, which keeps it
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
SECTIONS = (  # of the page: title, columns, direction
    ("Forward", EVERY, "forward"),
    ("With gradients", FRAMEWORKS, "both"),
    ("Compiled for fixed and for open sizes, forward", (*COMPILED, *OPEN), "forward"),
)


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

    def __init__(self, library: str, threads: int, tree: Path, further: Mapping[str, str] | None = None) -> None:
        self.command = (sys.executable, str(Path(pace_cells.__file__).resolve()), library)
        self.environment, self.process = environment(tree, threads) | {**(further or {})}, None

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

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.stdin.close()  # it ends when no more orders come
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


def measure(cells: list[Cell], base: Path, options: argparse.Namespace) -> dict[str, Answers]:
    """Time all cells in some pairs of fresh processes, and tell each as it comes."""
    found: dict[str, Answers] = {str(cell): {side: [] for side in SIDES} for cell in cells}
    for number in range(options.processes):
        turns = len(range(number, options.turns, options.processes))
        for library in LIBRARIES:
            settled = (library, options.threads)
            with Process(*settled, base) as old, Process(*settled, options.new) as new:
                for cell in (cell for cell in cells if cell.library == library):
                    answers = take_turns(cell, {"base": old, "new": new, "peer": new}, turns)
                    for side in SIDES:
                        found[str(cell)][side] += answers[side]
                    ratios = (shown(ratio(answers, side)) or "none" for side in ("base", "peer"))
                    print(f"{cell}: {' of BASE, '.join(ratios)} of its own", file=sys.stderr, flush=True)
    return found


def take_turns(cell: Cell, processes: dict[str, Process], turns: int) -> Answers:
    """Time a cell on each side, in turns; a side that cannot do it is asked once."""
    answers: Answers = {side: [] for side in SIDES}
    for turn in range(turns):
        for side in SIDES if turn % 2 == 0 else ("new", "base", "peer"):
            if not answers[side] or "wall" in answers[side][0]:
                answers[side].append(processes[side].ask(cell=cell, peer=side == "peer"))
    return answers


def ratio(answers: Answers, other: str, clock: str = "processor") -> float | None:
    """The median over turns of our time, divided by that of the other side; None where one of them has none."""
    pairs = zip(answers["new"], answers[other], strict=False)
    ratios = [ours[clock] / max(theirs[clock], 1e-9) for ours, theirs in pairs if clock in ours and clock in theirs]
    return statistics.median(ratios) if ratios else None


def milliseconds(answers: list[dict[str, Any]]) -> str:
    """The median over turns of the processor's time, or nothing."""
    found = [answer["processor"] * 1e3 for answer in answers if "processor" in answer]
    middle = statistics.median(found) if found else 0.0
    return (f"{middle:,.0f}" if middle >= 1000 else f"{middle:.3g}") if found else ""


def shown(number: float | None) -> str:
    """A ratio, or nothing."""
    return "" if number is None else f"{number:.2f}"


def grid(*headings: str) -> rich.table.Table:
    """A table whose first column is a name, and the others numbers."""
    numbers = (rich.table.Column(heading, justify="right") for heading in headings[1:])
    return rich.table.Table(headings[0], *numbers, box=None)


def tell(found: dict[str, Answers], console: rich.console.Console) -> None:
    """Print a row for each cell, why some have no number, and the cells above the limit."""
    table = grid("cell", "base ms", "ours ms", "own ms", "/ BASE", "/ own", "wall / BASE", "wall / own")
    for name, answers in found.items():
        times = [milliseconds(answers[side]) for side in SIDES]
        ratios = [shown(ratio(answers, side, clock)) for clock in ("processor", "wall") for side in ("base", "peer")]
        table.add_row(name, *times, *ratios)
    console.print(table)
    for name, answers in found.items():
        for side, where in zip(SIDES, ("not in BASE", "not here", "not by its own"), strict=True):
            if errors := [answer["error"] for answer in answers[side] if "error" in answer]:
                console.print(f"{name}: {where} ({errors[0]})")
    for side, title in (("base", "BASE"), ("peer", "the library's own")):
        ratios = {name: number for name, answers in found.items() if (number := ratio(answers, side)) is not None}
        above = sorted(((number, name) for name, number in ratios.items() if number > LIMIT), reverse=True)
        console.print(f"\nabove {LIMIT} of {title}: {len(above)} of {len(ratios)}")
        for number, name in above:
            console.print(f"  {number:6.2f}  {name}")


def programs(options: argparse.Namespace) -> Iterator[tuple[str, Any, Any]]:
    """Yield names of programs, with what is told of eager calls and of them: a row for each length, or an error."""
    wanted = [f"{direction} {rule}" for direction in ("forward", "both") for rule in OPTIONS if rule != "last"]
    for library in options.libraries:
        modes = dict.fromkeys(cell.mode for cell in CELLS if cell.library == library and cell.mode != "eager")
        with Process(library, options.threads, options.new, FREED) as process:
            for what in wanted:
                chosen = ["eager", *(mode for mode in modes if options.only in f"{library} {mode} {what}")]
                if len(chosen) == 1:
                    continue
                told = {mode: process.ask(program=(library, mode, *what.split(), LENGTHS)) for mode in chosen}
                for mode in chosen[1:]:
                    yield f"{library} {mode} {what}", told["eager"], told[mode]


def compare_programs(options: argparse.Namespace, console: rich.console.Console) -> None:
    """Print programs next to eager calls, and which of them hold an array of queries × keys that eager has not."""
    table = grid("program", "eager ms", "ms", "/ eager", "eager MiB", "MiB", "graphs", "operations")
    larger = []
    for name, eager, rows in programs(options):
        if "error" in rows or "error" in eager:
            console.print(f"{name}: {rows}; eager: {eager}" if "error" in eager else f"{name}: {rows}")
            continue
        print(f"{name}: {milliseconds(rows)} ms", file=sys.stderr, flush=True)
        for length, row, plain in zip(LENGTHS, rows, eager, strict=True):
            times = (plain["processor"] * 1e3, row["processor"] * 1e3)
            numbers = (*times, times[1] / times[0], plain["memory"] / MIB, row["memory"] / MIB)
            table.add_row(
                f"{name} {length}", *(f"{each:.3g}" for each in numbers), str(row["graphs"]), str(row["operations"])
            )
        if holds_pairs_alone(rows, eager):
            larger.append(name)
    console.print(table)
    console.print(f"\nan array of queries × keys that eager has not: {len(larger)}", *larger, sep="\n  ")


def holds_pairs_alone(rows: list[dict[str, Any]], eager: list[dict[str, Any]]) -> bool:
    """Whether a program holds an array of queries × keys at the longer length, and eager calls hold none.

    What a program holds besides eager calls at the shorter length is counted out. A boolean takes a byte for each pair.
    An eager call holds such an array if its memory grows by four bytes, as under a bias, whose gradient is one.
    """
    pairs = LENGTHS[-1] ** 2 - LENGTHS[0] ** 2
    first, last = (row["memory"] - plain["memory"] for row, plain in zip(rows, eager, strict=True))
    return last - max(first, 0) > pairs / 2 and eager[-1]["memory"] - eager[0]["memory"] < 4 * pairs


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on: versions, machine, load."""
    command = ("git", "-C", str(options.new), "describe", "--always", "--dirty")
    processor = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    versions = {name: importlib.metadata.version(name) for name in (*LIBRARIES, "keras")}
    return {
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(command, capture_output=True, text=True).stdout.strip(),
        "base": options.base,
        "processor": processor,
        "load": f"{os.getloadavg()[0]:.1f}",
        "threads": options.threads,
        "turns": options.turns,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def title_of(work: str) -> str:
    """A call of attention by its sizes and rule, or the name of other work."""
    if work not in PROBLEMS:
        return work
    batch, heads, kv_heads, queries, keys, width, rule, dtype = PROBLEMS[work][0]
    grouped = f"{heads}/{kv_heads}" if heads != kv_heads else f"{heads}"
    lengths = f"{queries}" if queries == keys else f"{queries} on {keys}"
    return f"{batch} × {grouped} × {lengths} × {width}, {rule}" + (f", {dtype}" if dtype != "float32" else "")


def page_cell(answers: Answers | None) -> str:
    """Our time, and in brackets its ratio to the library's own, bold above the limit."""
    if answers is None or not (ours := milliseconds(answers["new"])):
        return ""
    number = ratio(answers, "peer")
    mark = "**" if number and number > LIMIT else ""
    return f"{ours} ({mark}{shown(number)}{mark})" if number else ours


def write_page(kept: dict[str, Any]) -> None:
    """Write the conditions and a table for each section between the two marks of the page."""
    lines = ["| condition | |", "|---|---|", *(f"| {name} | {told} |" for name, told in kept["conditions"].items())]
    for title, columns, direction in SECTIONS:
        lines += ["", f"### {title}", "", f"| ms (ratio) | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        for work in dict.fromkeys(cell.work for cell in CELLS):
            texts = [page_cell(kept["cells"].get(str(Cell(*column.split(), direction, work)))) for column in columns]
            if any(texts):
                lines.append(f"| {title_of(work)} | {' | '.join(texts)} |")
    begin, end = "<!-- tools/pace.py writes from here -->\n", "<!-- to here -->"
    text = PAGE.read_text(encoding="utf-8")
    new = re.sub(f"{begin}.*?{end}", lambda _: begin + "\n".join([*lines, end]), text, flags=re.DOTALL)
    PAGE.write_text(new, encoding="utf-8")


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pace"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("base", nargs="?", default=settings["reference"], help="a commit or a folder; by default %(default)s")
    add("--new", type=Path, default=ROOT, metavar="FOLDER", help="by default this working tree")
    add("--quick", action="store_true", help="twelve cells, in three minutes")
    add("--only", default="", metavar="TEXT", help="cells whose name contains a text")
    add("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    add("--turns", type=int, default=6, help="how often each side is timed; by default %(default)s")
    add("--processes", type=int, default=2, help="fresh pairs of processes, among which turns are divided")
    add("--threads", type=int, choices=(1, 2), default=1)
    add("--json", type=Path, metavar="FILE", help="keep every turn")
    add("--programs", action="store_true", help="compare programs with eager calls instead")
    add("--page", action="store_true", help=f"write the tables of {PAGE.name} from {KEPT.name}; alone, measure nothing")
    return parser.parse_args()


def main() -> None:
    """Measure and print, or write the page."""
    options, console = parsed(), rich.console.Console(width=None if sys.stdout.isatty() else 132, markup=False)
    if options.programs:
        compare_programs(options, console)
    elif options.json or not options.page:
        cells = [cell for cell in CELLS if cell.library in options.libraries and options.only in str(cell)]
        cells = [cell for cell in cells if str(cell) in QUICK or not options.quick]
        with tree_of(options.base) as base:
            found = measure(cells, base, options)
        if options.json:
            options.json.write_text(json.dumps({"conditions": conditions(options), "cells": found}), encoding="utf-8")
        tell(found, console)
    if options.page:
        write_page(json.loads(KEPT.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
