"""How two models differ, in words and as one page of HTML."""

from __future__ import annotations

from pathlib import Path

from attention_conformance.port.comparison import Comparison
from attention_conformance.templates import rendered
from attention_conformance.written.html import LEVELS, level
from attention_files.writing import write_file


def verdict(found: Comparison) -> list[str]:
    """Where two models part, and why, in a line or more."""
    if found.first is None:
        worst = max(found.places, key=lambda each: each.ulps / each.bound)
        nearest = f"nearest to it is {worst.name}, by {worst.ulps:.3g} ulp of {worst.bound:.3g}"
        return [f"all {len(found.places)} places are within the bound; {nearest}"]
    first = found.first
    lines = [f"first to leave the bound: {first.name}, by {first.ulps:.3g} ulp of {first.bound:.3g}", first.says]
    lines += [f"cause: {each.name}: {each.says}" for each in found.causes]
    return lines if found.causes else [*lines, "cause: none of those that were tried"]


def write_comparison(path: Path, found: Comparison) -> None:
    """Write one page that works from a file."""
    rows = [(each, level(each.ulps, each.bound), [(part, level(part, each.bound)) for part in each.heads])
            for each in found.places]  # fmt: skip
    lines, names = verdict(found), " and ".join(found.names)
    text = rendered("comparison.html", found=found, title=names, lines=lines, rows=rows, levels=LEVELS)
    write_file(path, text.encode())
