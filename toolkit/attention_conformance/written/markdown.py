"""What was found about a subject as Markdown, for the summary of a build, or an issue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_conformance.run.again import command_of
from attention_conformance.run.changes import Change
from attention_conformance.run.finding import QUIET, Finding, counted, grouped, most_telling
from attention_conformance.written.story import MOST_THREADS, line_told, threads
from attention_conformance.written.summary import MEANINGS, summary
from attention_files.writing import write_file

MOST_NAMES = 12

LONGEST = 60_000
"""Characters, as an issue of GitHub takes 65,536: the causes that come last are left out."""


def write_markdown(
    path: Path, findings: Sequence[Finding], about: Mapping[str, Any], changed: Sequence[Change] = ()
) -> None:
    """Write findings as Markdown, with the arguments of `write_html`: the worst first, and the numbers of verdicts."""
    write_file(path, markdown(findings, about, changed).encode())


def markdown(findings: Sequence[Finding], about: Mapping[str, Any], changed: Sequence[Change] = ()) -> str:
    """The text of `write_markdown`."""
    versions = ", ".join(f"{name} {each}" for name, each in about.get("versions", {}).items())
    lines = [f"## {_text(about['target'])}: {summary(findings)}", "", versions, "", "| verdict | cases | meaning |"]
    lines += ["|---|---:|---|"]
    lines += [f"| {verdict} | {count} | {MEANINGS[verdict]} |" for verdict, count in counted(findings).items()]
    compared: list[str] = []
    if changed:
        compared += [
            "",
            "### Compared with the former run",
            "",
            "| case | dtype | before | after | |",
            "|---|---|---|---|---|",
        ]
        compared += [
            f"| `{each.case}` | {each.dtype} | {each.before} | {each.after} | {each.says} |" for each in changed
        ]
    left = LONGEST - 100 - sum(len(line) + 1 for line in (*lines, *compared))
    groups = grouped(each for each in findings if each.verdict not in QUIET)
    for number, group in enumerate(groups):
        section = _section(group, about)
        left -= sum(len(line) + 1 for line in section)
        if left < 0:
            lines += [
                "",
                f"{len(groups) - number} causes more are left out, of {sum(map(len, groups[number:]))} cases.",
            ]
            break
        lines += section
    return "\n".join([*lines, *compared])[: LONGEST - 1] + "\n"


def _section(group: Sequence[Finding], about: Mapping[str, Any]) -> list[str]:
    first = most_telling(group) or group[0]
    cause = first.says or first.shows.rstrip(".")
    names = list(dict.fromkeys(f"`{each.case}`" for each in group))
    rest = len(names) - MOST_NAMES
    lines = ["", f"### {first.verdict}: {_text(cause)}", ""]
    lines += [f"{line_told(first)}.", ""] if line_told(first) else []
    lines += [", ".join(names[:MOST_NAMES]) + (f", and {rest} more" if rest > 0 else ""), ""]
    lines += [f"`{first.case}`: {_text(first.detail)}", ""] if first.detail else []
    seen = threads(first)[:MOST_THREADS]
    lines += [f"- {relation}: [{each.thread}]({each.url}), {_text(each.title)}" for relation, each in seen]
    again = command_of(first, about["target"], about.get("declared", {}), about.get("profile", "kernel"))
    return [*lines, "", "```console", f"$ {again}", "```"]


def _text(text: str) -> str:
    """Text in which Markdown sees no sign, and in one line."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))
