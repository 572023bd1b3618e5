"""Remarks: what a fair reader has to know about findings of the survey."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Remark", "findings_of", "matches", "read_remarks", "remark_of"]

Remark: TypeAlias = Mapping[str, str]


def read_remarks() -> list[Remark]:
    """All remarks of the file, in its order."""
    text = (Path(__file__).parent / "remarks.toml").read_text(encoding="utf-8")
    return [{name: str(each) for name, each in remark.items()} for remark in tomllib.loads(text)["remark"]]


def findings_of(cell: Mapping[str, Any]) -> list[dict[str, str]]:
    """The findings of a cell, one for each case and dtype; the detail is that of the first of its cause."""
    return [
        {"case": case, "dtype": dtype, **{name: each for name, each in cause.items() if name != "cases"}}
        for cause in cell.get("findings", ())
        for dtype, cases in cause["cases"].items()
        for case in cases
    ]


def matches(remark: Remark, subject: str, finding: Mapping[str, str]) -> bool:
    """Whether a remark is about a finding of a subject."""
    told = {"subject": subject, **{name: finding.get(name, "") for name in ("case", "dtype", "variant")}}
    return all(fnmatch(told[name], remark[name]) for name in told if name in remark)


def remark_of(subject: str, finding: Mapping[str, str], remarks: Sequence[Remark]) -> Remark | None:
    """The first remark about a finding that stands in place of its verdict."""
    return next((each for each in remarks if "mark" in each and matches(each, subject, finding)), None)
