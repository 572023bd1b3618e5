"""Checks one row of the survey, and runs the script of each red cell before it is told."""

from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attention_conformance.bits.cases import BITS, VARIATIONS
from attention_conformance.bits.pair import OTHER_BITS
from attention_conformance.measure.catalogue import kernel_cases
from attention_conformance.measure.finding import (
    CONVENTION,
    VERDICTS,
    WRONG,
    Finding,
    most_telling,
    to_row,
)
from attention_conformance.run.again import script_of
from attention_conformance.written.summary import assumptions
from survey.rows import PROPERTIES, Row, property_of, read_remarks, remark_of

RED = (*WRONG, "crashed", "timed out")
"""Verdicts of cells that are published only after their script has shown them."""

NARROW = ("mask", "grouped-heads", "shape-65x65-d64-causal", "scores-above-100", "average-32768",
          "shape-64x64-d64-plain-gradient")  # fmt: skip
"""Cases in 16 bits where a compiler takes most of the time."""

CALLED = ("layout", "mask", "causal", "masks and causality at once", "scale by default",
          "query heads that share KV heads (GQA)", "values must be as wide as keys", "dtypes", "gradients")  # fmt: skip
"""The facts of a kernel that the survey keeps."""

LONGEST = 540.0
"""Seconds for a run of a script, and for each check of a kernel."""


def checked(row: Row, folder: Path) -> dict[str, Any]:
    """Check a row in processes of its own; JSON and scripts that the folder has stay."""
    folder.mkdir(parents=True, exist_ok=True)
    wide = _found(row, folder / f"{row.name}.json", ("--dtype", "float32") if row.is_compiled else ())
    documents = [wide]
    is_wide = not any(each["dtype"] == "bfloat16" for each in wide["findings"])
    if row.is_compiled and is_wide and "bfloat16" in wide["about"].get("assumed", {}).get("dtypes", ()):
        cases = [word for each in NARROW for word in ("--case", each)]
        documents.append(_found(row, folder / f"{row.name}.narrow.json", ("--dtype", "bfloat16", *cases)))
    bits = ("--same-bits-as", row.target, "--dtype", "float32")
    documents.append(_found(row, folder / f"{row.name}.bits.json", bits))
    return row_of(row, documents, folder)


def _found(row: Row, path: Path, words: Iterable[str]) -> dict[str, Any]:
    """The document of a check that was not interrupted."""
    if not path.exists() or json.loads(path.read_text())["about"].get("interrupted"):
        command = [sys.executable, "-m", "attention_cli", "check", row.target, *words]
        command += ["--timeout", "300", "--json", str(path)]
        done = subprocess.run(command, env=_environment(row), check=False, capture_output=True, text=True)
        print(done.stderr, file=sys.stderr, end="")
        if not path.exists():  # as no call returns
            told = done.stderr.rpartition("the first ")[2].partition(";")[0]
            refused = Finding(BITS[-1].name, "float32", 0, BITS[-1].shows, "refused", detail=told)
            return {"about": {}, "findings": [to_row(refused)]}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _finding(row: dict[str, Any]) -> Finding:
    """A result from what JSON held, without its worst element."""
    numbers = {name: math.nan if row[name] is None else float(row[name]) for name in ("error", "bound", "seconds")}
    several = {name: tuple(row[name]) for name in ("rejected", "planted", "kinds", "equals")}
    shapes = {name: tuple(each) for name, each in row["shapes"].items()}
    return Finding(**row | numbers | several | {"shapes": shapes, "worst": None})


def _environment(row: Row) -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", **row.environment}


def row_of(row: Row, documents: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """A row of the survey from the documents of its checks: a cell for each property that has a result."""
    about = documents[0]["about"]
    findings = [_finding(each) for document in documents for each in document["findings"]]
    facts = {name: tuple(each) if isinstance(each, list) else each for name, each in about["assumed"].items()}
    groups: dict[str, list[Finding]] = {name: [] for name in PROPERTIES}
    cases = {case.name: case for case in (*kernel_cases(), *BITS)}
    for each in findings:
        if each.case in cases:
            groups[property_of(cases[each.case], each.dtype)].append(each)
    cells = {
        name: _cell(group, row, folder / "scripts" / f"{row.name}.{name.partition(',')[0]}.py")
        for name, group in groups.items()
        if group
    }
    if groups["bits"]:
        cells["bits"]["same"] = [each.case for each in groups["bits"] if each.verdict == "right"]
    return {
        "subject": row.name,
        "preset": row.preset,
        "versions": {**_version(row.package), **about["versions"]},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "called": _called(assumptions(facts, dict.fromkeys(facts, ""))),
        "cells": cells,
    }


def _called(assumed: list[str]) -> dict[str, str]:
    facts = dict(each.partition(" (")[0].partition(": ")[::2] for each in assumed)
    return {name: facts[name] for name in CALLED if name in facts}


def _version(package: str) -> dict[str, str]:
    name = package.partition("[")[0]
    try:
        return {name: version(name)}
    except PackageNotFoundError:
        return {}


def _cell(findings: list[Finding], row: Row, path: Path) -> dict[str, Any]:
    verdicts = [each.verdict for each in findings]
    cell: dict[str, Any] = {"counts": {name: verdicts.count(name) for name in VERDICTS if name in verdicts}}
    bad = [each for each in findings if each.verdict in (*RED, CONVENTION, OTHER_BITS)]
    refusals = sorted({each.detail[:160] for each in findings if each.verdict == "refused"})[:3]
    cell |= {"findings": _causes([_short(each) for each in bad], row)} if bad else {}
    cell |= {"refusals": refusals} if refusals else {}
    red = [each for each in bad if each.verdict in RED]
    if red:
        cell |= shown(red, row, path)
    return cell


def _short(finding: Finding) -> dict[str, str]:
    names = ("case", "dtype", "verdict", "variant", "says", "detail")
    return {name: getattr(finding, name) for name in names if getattr(finding, name)}


def _causes(findings: list[dict[str, str]], row: Row) -> list[dict[str, Any]]:
    """Results by verdict, cause and remark: the first detail, and the cases in each dtype."""
    remarks, causes = read_remarks(), dict[object, dict[str, Any]]()
    for each in findings:
        remark = remark_of(row.name, each, remarks)
        key = (each["verdict"], each.get("variant"), each.get("says"), remark and remark["says"])
        rest = {name: text for name, text in each.items() if name not in ("case", "dtype")}
        cause = causes.setdefault(key, {**rest, "cases": {}})
        cause["cases"].setdefault(each["dtype"], []).append(each["case"])
    return list(causes.values())


def shown(red: list[Finding], row: Row, path: Path) -> dict[str, Any]:
    """What the script of the most telling result shows, of those without a remark first."""
    remarks = read_remarks()
    bare = [each for each in red if remark_of(row.name, _short(each), remarks) is None]
    telling = most_telling(bare or red)
    assert telling is not None
    text = (
        script_of(telling, row.target, {}, f"same-bits-as {row.target}" if telling.case in VARIATIONS else "kernel")
        + "raise SystemExit(int(result.verdict in ('silently wrong', 'visibly wrong')))\n"
    )
    return _run(text, path, row, telling)


def _run(text: str, path: Path, row: Row, telling: Finding) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    about = {"case": telling.case, "dtype": telling.dtype, "verdict": telling.verdict}
    command = [sys.executable, str(path)]
    try:
        done = subprocess.run(
            command, env=_environment(row), check=False, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return {"script": {**about, "showed": False, "printed": f"no answer within {LONGEST:g} s"}}
    died = done.returncode < 0 and telling.verdict == "crashed"
    is_shown = died or (done.returncode == 1 and done.stdout.startswith(WRONG))
    printed = [] if died else (done.stdout if is_shown else done.stdout + done.stderr).strip().splitlines()
    told = printed[0 if is_shown else -1] if printed else f"the process ended with {done.returncode}"
    return {"script": {**about, "showed": is_shown, "printed": told}}
