"""Plots of time and memory against length."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from attention_benchmark.candidate import Candidate
from attention_benchmark.measurement import Measurement
from attention_files.writing import write_file

OURS = {"dense": "tab:red", "blockwise": "tab:blue", "fused": "tab:orange", "auto": "black"}
PEERS = ("tab:green", "tab:purple", "tab:brown", "tab:olive")
LINES = {"compiled": "--", "xla": "--"}
QUANTITIES = {"time": ("seconds a call", "median"), "memory": ("peak memory in MiB", "memory")}


def write_plots(directory: Path, measurements: Sequence[Measurement], suffix: str = "svg") -> list[Path]:
    """Write a figure for each mask and direction with at least three lengths, with a column for each framework."""
    series: dict[tuple[Any, ...], list[Measurement]] = {}
    for each in measurements:
        (batch, heads, _, width), problem = each.problem.shape, each.problem
        if each.seconds and problem.operation == "attention" and problem.queries is None and problem.group == 1:
            series.setdefault((problem.mask, problem.direction, batch, heads, width), []).append(each)
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for (mask, direction, batch, heads, width), group in series.items():
        if len({each.problem.shape[2] for each in group}) < 3:
            continue
        with mpl.rc_context({"svg.hashsalt": "attention-core", "svg.fonttype": "none", "font.size": 9}):
            figure = _figure(group, f"{mask}, {direction}: {batch}×{heads}×length×{width}, {group[0].problem.dtype}")
            path = directory / f"{mask}-{direction}-{batch}x{heads}x{width}.{suffix}"
            options: dict[str, Any] = {"metadata": {"Date": None}} if suffix == "svg" else {}
            held = io.BytesIO()
            figure.savefig(held, format=suffix, bbox_inches="tight", dpi=110, **options)
            write_file(path, held.getvalue())
        written.append(path)
    return written


def _figure(measurements: Sequence[Measurement], title: str) -> Figure:
    frameworks = list(dict.fromkeys(each.candidate.framework for each in measurements))
    quantities = ["time", *(["memory"] if any(each.memory for each in measurements) else [])]
    figure = Figure(figsize=(3.2 * len(frameworks) + 0.6, 2.8 * len(quantities) + 0.6), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(len(quantities), len(frameworks), sharex=True, sharey="row", squeeze=False)
    for row, quantity in zip(grid, quantities, strict=True):
        for axes, framework in zip(row, frameworks, strict=True):
            _draw(axes, [each for each in measurements if each.candidate.framework == framework], quantity)
            axes.grid(alpha=0.3)
        row[0].set_ylabel(QUANTITIES[quantity][0])
    for axes, framework in zip(grid[0], frameworks, strict=True):
        axes.set_title(framework)
    lengths = sorted({each.problem.shape[2] for each in measurements})
    for axes in grid[-1]:
        axes.set_xlabel("length")
        axes.set_xticks(lengths, map(str, lengths), rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(*grid[0][list(grid[-1]).index(axes)].get_legend_handles_labels(), **_BELOW)
    return figure


_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.32), "fontsize": 7, "frameon": False}


def _draw(axes: Any, measurements: Sequence[Measurement], quantity: str) -> None:
    peers = list(dict.fromkeys(each.candidate.name for each in measurements if each.candidate.is_peer))
    modes = len({each.candidate.mode for each in measurements})
    for candidate in dict.fromkeys(each.candidate for each in measurements):
        points = [
            (each.problem.shape[2], each.median if quantity == "time" else (each.memory or 0) / 2**20)
            for each in measurements
            if each.candidate == candidate and (quantity == "time" or each.memory)
        ]
        colour = PEERS[peers.index(candidate.name) % len(PEERS)] if candidate.is_peer else OURS[candidate.name]
        axes.loglog(
            *zip(*sorted(points), strict=True) if points else ((), ()),
            color=colour,
            linestyle=LINES.get(candidate.mode, "-"),
            marker="x" if candidate.is_peer else "o",
            markersize=3.5,
            linewidth=2.2 if candidate.name == "auto" else 1.2,
            label=_label(candidate, modes),
        )


def _label(candidate: Candidate, modes: int) -> str:
    name = candidate.name if candidate.is_peer else f"attention_core {candidate.name}"
    return f"{name}, {candidate.mode}" if modes > 1 else name
