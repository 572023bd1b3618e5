"""What was found about a kernel: text for people, JSON for programs."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attention_conformance.cases.contract import LINES
from attention_conformance.measure.finding import (
    ENDED,
    VERDICT_TEXTS,
    Finding,
    counted,
    grouped,
    little,
    since,
    to_row,
)
from attention_conformance.mistakes.variants import FAULTS
from attention_conformance.written.story import thread_of
from attention_files.writing import write_file

MOST_UNNAMED = 4
"""Cases of a verdict that the terminal tells in full, where the cause has no name."""

WORDS = {
    "keep": "True = may attend",
    "drop": "True = hidden",
    "integer": "1 = may attend, 0 = hidden",
    "additive": "0 and -inf, added",
    "sqrt": "1/√D",
    "one": "1",
}
HIDDEN = ("name", "native", "asks", "order", "array_names", "returns", "options", "keeps_dtype", "keeps_library",
          "positional")  # fmt: skip

NAMES = {
    "causal_name": "keyword of the causal mask",
    "full_mask": "masks must have the full shape",
    "mask_with_causal": "masks and causality at once",
    "default_scale": "scale by default",
    "grouped": "query heads that share KV heads (GQA)",
    "same_width": "values must be as wide as keys",
    "differentiates": "gradients",
    "unknown": "unknown parameters, left at their defaults",
    "batch_invariant": "bitwise equal in any batch",
}
"""Facts whose names say too little."""


def assumptions(facts: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    """A line for each fact about a kernel, with how it is known."""
    if facts.get("native"):
        return ["the signature of attention_core.scaled_dot_product_attention"]
    lines = []
    for name, fact in facts.items():
        if name in HIDDEN or (name.endswith(("_name", "unknown")) and not fact):
            continue
        text = ", ".join(fact) if isinstance(fact, tuple) else WORDS.get(str(fact), str(fact))
        text = {"True": "yes", "False": "no"}.get(text, text)
        label = f"keyword of {name.removesuffix('_name')}" if name.endswith("_name") else name.replace("_", " ")
        lines.append(f"{NAMES.get(name, label)}: {text} ({sources.get(name, 'found by a call')})")
    return lines


def line_of(result: Finding) -> Text:
    """A result in a line or two: what is wrong in words, where there are any, and one element."""
    is_same = result.verdict == "right" and result.bound == 0
    text = Text(f"{'bitwise equal' if is_same else result.label}: ", style=VERDICT_TEXTS[result.verdict][0])
    text.append(result.case if result.dtype == "-" else f"{result.case} {result.dtype}", style="bold")
    line = "; ".join(each for each in (result.says, result.detail) if each)
    text.append(f": {line}", style="default")
    return text


def tables(results: Sequence[Finding]) -> Iterable[Table | Text | Padding]:
    """What is wrong, the worst first and grouped by cause; then the numbers of all verdicts."""
    groups = grouped(each for each in results if each.verdict not in ("right", "not offered"))
    seen: list[str] = []
    for verdict, of_verdict in itertools.groupby(groups, key=lambda group: group[0].verdict):
        yield _heading(verdict)
        shown = list(of_verdict)
        named = [group for group in shown if group[0].variant or verdict in ENDED]
        unnamed = [group for group in shown if group not in named]
        for group in (*named, *unnamed[:MOST_UNNAMED]):
            yield from _group(group, since(group, results))
            if (thread := thread_of(group[0])) and thread not in seen:
                seen.append(thread)
                yield _indented(Text(thread, style="dim"), 4)
        others = [each for group in unnamed[MOST_UNNAMED:] for each in group]
        yield from [_indented(Text(f"and in other cases: {_names(others, 24)}"), 2)] if others else []
    lacking = Counter(part for each in results if each.verdict == "not offered" for part in each.detail.split(", "))
    if lacking:
        count = sum(each.verdict == "not offered" for each in results)
        parts = ", ".join(f"{part} {count}" for part, count in lacking.most_common())
        yield _heading("not offered", f" ({count} cases)")
        yield _indented(Text(parts, style="dim"), 2)
    yield Text("")
    yield _counts(results)


def _heading(verdict: str, more: str = "") -> Text:
    style, label, _ = VERDICT_TEXTS[verdict]
    return Text(f"\n{label.upper()}{more}", style=style)


def _indented(text: Text, by: int) -> Padding:
    """Text whose further lines are indented as the first."""
    return Padding(text, (0, 0, 0, by), expand=False)


def _group(group: Sequence[Finding], sizes: str) -> Iterable[Text | Padding]:
    first = group[0]
    if first.verdict in (*ENDED, "refused"):
        count = f"{len(group)} × " * (len(group) > 1)
        yield _indented(Text(f"{count}{first.detail}", style="bold"), 2)
        yield _indented(Text(_names(group, 8)), 4)
        return
    cause = first.says or first.shows.rstrip(".")
    name = f" ({first.variant})" if first.variant else ""
    yield _indented(Text("; ".join(filter(None, (f"{cause}{name}", sizes))), style="bold"), 2)
    if first.line in LINES and first.line:
        yield _indented(Text(f"contract, line {first.line}: {LINES[first.line]}", style="dim"), 4)
    yield from [_indented(Text(first.reason, style="dim"), 4)] if first.reason else []
    if first.dtype == "-":  # of no case
        yield from [_indented(Text(first.detail), 4)] if first.detail else []
        return
    yield _indented(Text(_names(group, 8)), 4)
    yield from [_indented(Text(f"{first.case}: {first.detail}"), 4)] if first.detail else []


def _names(results: Iterable[Finding], most: int) -> str:
    """The cases, each with its dtypes; those beyond the most are counted."""
    dtypes: dict[str, list[str]] = {}
    for result in results:
        dtypes.setdefault(result.case, []).append(result.dtype)
    names = [case if each == ["-"] else f"{case} [{', '.join(each)}]" for case, each in dtypes.items()]
    rest = len(names) - most
    return ", ".join(names[:most]) + (f", and {rest} more" if rest > 0 else "")


def _counts(results: Sequence[Finding]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("verdict")
    table.add_column("cases", justify="right")
    table.add_column("means")
    for verdict, count in counted(results).items():
        style, label, means = VERDICT_TEXTS[verdict]
        table.add_row(Text(label, style=style), str(count), means)
    return table


def power(results: Sequence[Finding], profile: str) -> list[str]:
    """How many planted faults the bounds reject, and which they miss."""
    rejected = {fault for each in results if each.planted for fault in each.rejected}
    names = [fault.name for fault in FAULTS if any(fault.name in each.planted for each in results)]
    if not names:
        return []
    lines = [
        f"Would the bounds of profile {profile} see a mistake? They reject {len(rejected)} of {len(names)} mutants "
        f"of the definition."
    ]
    missed = [name for name in names if name not in rejected]
    if missed:
        lines.append(f"No case that is right rules these out: {', '.join(missed)}.")
    return lines


def count_text(results: Iterable[Finding]) -> str:
    """All verdicts with their numbers, the worst first."""
    counts = counted(results)
    leading = [] if "silently wrong" in counts else [f"0 {VERDICT_TEXTS['silently wrong'][1]}"]
    return ", ".join([*leading, *(f"{count} {VERDICT_TEXTS[verdict][1]}" for verdict, count in counts.items())])


def summary(results: Sequence[Finding]) -> str:
    """The numbers of all verdicts, and how little was checked."""
    few = little(results)
    return count_text(results) + f"; little was checked: {few}" * bool(few)


def write_findings(path: Path, findings: Sequence[Finding], about: Mapping[str, Any]) -> None:
    """Write what a run found, also one that was interrupted."""
    document = {"about": about, "summary": counted(findings), "findings": [to_row(each) for each in findings]}
    write_file(path, (json.dumps(document, indent=1, allow_nan=False, default=str) + "\n").encode())
