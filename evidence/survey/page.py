"""The JSON of the survey, a line for each row, and the page from the JSON.

``python -m survey.page docs/survey.json SUBJECT`` prints all about one row, or about every row.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from attention_conformance.bits.cases import VARIATIONS
from attention_conformance.bits.pair import OTHER_BITS
from attention_conformance.measure.finding import VERDICTS, WRONG
from attention_conformance.named.case import NamedCase
from attention_conformance.named.related import related
from survey.rows import (
    ABSENT,
    PROPERTIES,
    ROWS,
    Remark,
    findings_of,
    matches,
    read_remarks,
    remark_of,
)

SHORT = {
    "silently wrong": "**silent**",
    "visibly wrong": "**visible**",
    "crashed": "**crash**",
    "timed out": "**time**",
    "differs by convention": "convention",
    "other bits": "other",
    "right": "✓",
    "refused": "refused",
    "not offered": "–",
}


def joined(folder: Path, former: Sequence[Mapping[str, Any]] = ()) -> list[Mapping[str, Any]]:
    """The rows as the files of the folder have them, or else as they were."""
    known = {row["subject"]: row for row in former}
    for row in ROWS:
        path = folder / "rows" / f"{row.name}.json"
        if path.exists():
            known[row.name] = json.loads(path.read_text(encoding="utf-8"))
    return [known[row.name] for row in ROWS if row.name in known]


def written(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as JSON, a line for each."""
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _word(subject: str, cell: Mapping[str, Any], remarks: Sequence[Remark]) -> str:
    """What stands in the table: the worst verdict without a remark, or the mark of a remark, with a number."""
    marks: Counter[str] = Counter()
    for finding in findings_of(cell):
        remark = remark_of(subject, finding, remarks)
        marks[remark["mark"] if remark else SHORT[finding["verdict"]]] += 1
    order = [SHORT[verdict] for verdict in VERDICTS if verdict in SHORT]
    first = min(marks, key=lambda mark: order.index(mark) if mark in order[:4] else 4, default="")
    if not first:
        counts = cell["counts"]
        return next(
            f"{SHORT[verdict]} {counts[verdict]}"
            for verdict in ("right", "refused", "not offered")
            if verdict in counts
        )
    return f"{first} {marks[first]}"


def _only_here(rows: Sequence[Mapping[str, Any]], remarks: Sequence[Remark]) -> dict[str, list[str]]:
    """The cases in float32 in which one row alone is wrong, and no remark tells why."""
    wrong: dict[str, set[str]] = {}
    for row in rows:
        for each in (each for cell in row["cells"].values() for each in findings_of(cell)):
            if each["verdict"] in WRONG and each["dtype"] == "float32":
                is_told = remark_of(row["subject"], each, remarks) is not None
                wrong.setdefault(each["case"], set()).add("" if is_told else row["subject"])
    found: dict[str, list[str]] = {}
    for case, subjects in wrong.items():
        if len(subjects) == 1:
            found.setdefault(next(iter(subjects)), []).append(case)
    return found


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of all rows."""
    remarks, table = read_remarks(), []
    names = [name for name in PROPERTIES if any(name in row["cells"] for row in rows)]
    for row in rows:
        cells = [row["cells"].get(name) for name in names]
        words = [_word(row["subject"], each, remarks) if each else " " for each in cells]
        table.append((row, sum(sum(cell["counts"].values()) for cell in row["cells"].values()), words))
    told = [(each["mark"], _said(each)) for each in remarks if "mark" in each]
    values = {"bits": map(_bits, rows), "remarks": told, "absent": ABSENT, "columns": PROPERTIES}
    template = Path(__file__).with_name("survey.md.jinja").read_text(encoding="utf-8")
    how: dict[str, Any] = {
        "undefined": StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
        "keep_trailing_newline": True,
    }
    return str(Template(template, **how).render(names=names, table=table, **values))


def _bits(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """A row, in which calls it has the bits of the whole one, and in which others."""
    cell = row["cells"]["bits"]
    verdicts = {each["case"]: each["verdict"] for each in findings_of(cell)}
    same = [name.removeprefix("bits-") for name in VARIATIONS if name in cell["same"]]
    other = [
        name.removeprefix("bits-") + ("" if verdicts[name] == OTHER_BITS else f" ({verdicts[name]})")
        for name in VARIATIONS
        if name in verdicts
    ]
    if not (same or other):
        return row["subject"], f"refused: `{_plain(cell['refusals'][0])}`", ""
    return row["subject"], ", ".join(same) or "none", ", ".join(other) or "none"


def details(rows: Sequence[Mapping[str, Any]], subjects: Sequence[str] = ()) -> str:
    """How rows were called, and what came: of these subjects, or of all."""
    remarks = read_remarks()
    only = _only_here(rows, remarks)
    asked = [row for row in rows if not subjects or row["subject"] in subjects]
    return "\n".join(line for row in asked for line in _about(row, only.get(row["subject"], []), remarks))


def _about(row: Mapping[str, Any], only_here: Sequence[str], remarks: Sequence[Remark]) -> list[str]:
    lines = [f"# {row['subject']}", ""]
    told = [f"- *called*: {_called(row)}."]
    for name, cell in row["cells"].items():
        script = cell.get("script")
        groups: dict[tuple[str, str], list[Mapping[str, str]]] = {}
        for each in findings_of(cell):
            if remark_of(row["subject"], each, remarks) is None:
                groups.setdefault((each["verdict"], each.get("says", "")), []).append(each)
        told += [_group(name, *cause, group) for cause, group in groups.items()]
        if script and any(verdict in (*WRONG, "crashed", "timed out") for verdict, _ in groups):
            who = "" if script["alone"] else " with the kit"
            seen = (
                f"showed `{script['printed']}`" if script["showed"] else f"did **not** show it: `{script['printed']}`"
            )
            told[-1] += f" The script of {script['case']} in {script['dtype']}{who} {seen}."
    refusals = [reason for cell in row["cells"].values() for reason in cell.get("refusals", ())]
    if refusals:
        told.append(f"- *refused*: {'; '.join(f'`{_plain(each)}`' for each in dict.fromkeys(refusals))}.")
    bad = [each for cell in row["cells"].values() for each in findings_of(cell)]
    for note in remarks:
        if "mark" not in note and any(matches(note, row["subject"], each) for each in bad):
            told.append(f"- *note*: {_said(note)}")
    if only_here:
        told.append(f"- *wrong here alone*: {', '.join(only_here[:8])}.")
    threads = [f"[{case.thread}]({case.url})" for case in _threads(row)]
    if threads:
        told.append(f"- *threads about the same property*: {', '.join(threads)}.")
    return [*lines, *told, ""]


def _said(remark: Mapping[str, str]) -> str:
    """What a remark says, with its subjects and its link."""
    about = f"({remark['subject']}) " if "mark" in remark and remark.get("subject") else ""
    link = f" [Link]({remark['link']})." if remark.get("link") else ""
    return about.replace("*", "…") + " ".join(remark["says"].split()) + link


def _called(row: Mapping[str, Any]) -> str:
    """With which versions a subject was called, and how."""
    facts = row["called"]
    versions = [f"{name} {each}" for name, each in row["versions"].items() if name != "ml_dtypes"]
    return "; ".join([*versions, *(f"{name}: {each}" for name, each in facts.items())])


def _group(name: str, verdict: str, says: str, group: Sequence[Mapping[str, str]]) -> str:
    cases = list(dict.fromkeys(each["case"] for each in group))
    rest = f", and {len(cases) - 4} more" if len(cases) > 4 else ""
    told = f"{says}: " if says else ""
    return f"- {name}, *{verdict}*: {told}{', '.join(cases[:4])}{rest}. First: {_plain(group[0].get('detail', ''))}."


def _plain(text: str) -> str:
    return text.replace("`", "'").replace("|", "¦").replace("\n", " ").rstrip(".")


def _threads(row: Mapping[str, Any]) -> list[NamedCase]:
    """Threads of the named cases about the cases that were wrong, of the packages of the row."""
    packages = {name.partition(".")[0] for name in row["versions"]}
    found: dict[str, NamedCase] = {}
    for cell in row["cells"].values():
        for each in findings_of(cell):
            for case in related(each["case"]):
                if packages & set(case.packages) - {"numpy"}:
                    found[case.name] = case
    return list(found.values())[:6]


def main(folder: Path, docs: Path) -> None:
    """Write ``survey.json`` and ``survey.md`` into the folder of the documentation."""
    path = docs / "survey.json"
    rows = joined(folder, json.loads(path.read_text(encoding="utf-8")) if path.exists() else ())
    path.write_text(written(rows), encoding="utf-8")
    (docs / "survey.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1].endswith(".json"):
        print(details(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2:]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
