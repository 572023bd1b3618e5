"""The JSON of the survey, a line for each row, and the page from the JSON."""

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
from attention_conformance.measure.finding import VERDICTS
from survey.rows import (
    ABSENT,
    PROPERTIES,
    ROWS,
    Remark,
    findings_of,
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


def _said(remark: Mapping[str, str]) -> str:
    """What a remark says, with its kernels and its link."""
    about = f"({remark['subject']}) " if "mark" in remark and remark.get("subject") else ""
    link = f" [Link]({remark['link']})." if remark.get("link") else ""
    return about.replace("*", "…") + " ".join(remark["says"].split()) + link


def _plain(text: str) -> str:
    return text.replace("`", "'").replace("|", "¦").replace("\n", " ").rstrip(".")


def main(folder: Path, docs: Path) -> None:
    """Write ``survey.json`` and ``survey.md`` into a folder of the documentation."""
    path = docs / "survey.json"
    rows = joined(folder, json.loads(path.read_text(encoding="utf-8")) if path.exists() else ())
    path.write_text(written(rows), encoding="utf-8")
    (docs / "survey.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
