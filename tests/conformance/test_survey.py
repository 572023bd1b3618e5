"""The survey: every case has a column, page and JSON agree, and a red cell has been seen again by its script."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attention_conformance import check_subject
from attention_conformance.bits.cases import BITS
from attention_conformance.kernel.presets import Preset
from attention_conformance.kernel.target import load_object, load_target
from attention_conformance.measure.catalogue import KERNEL_CASES
from attention_conformance.measure.finding import VERDICTS
from sharding.page import page as page_of_sharding
from survey import presets as surveyed
from survey.check import RED, shown
from survey.page import page, written
from survey.rows import PROPERTIES, ROWS, Row, findings_of, property_of, read_remarks, remark_of

PAGES = Path(__file__).parents[2] / "docs" / "evidence"


@pytest.fixture(scope="module")
def rows():
    return json.loads((PAGES / "survey.json").read_text(encoding="utf-8"))


def test_every_case_has_a_column_and_every_row_a_preset():
    assert {property_of(case, "float32") for case in (*KERNEL_CASES, *BITS)} | {"16 bits"} == set(PROPERTIES)
    assert {row.preset for row in ROWS} == set(surveyed.PRESETS) - {"attention-core"}
    assert {type(load_object(row.target)) for row in ROWS if ":" in row.target} == {Preset}
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_pages_are_those_of_the_json(rows):
    assert (PAGES / "sharding-numbers.md").read_text(encoding="utf-8") == page_of_sharding()
    assert (PAGES / "survey.md").read_text(encoding="utf-8") == page(rows)
    assert (PAGES / "survey.json").read_text(encoding="utf-8") == written(rows)


def test_the_json_has_thirty_rows_whose_red_cells_were_seen_twice(rows):
    assert len(rows) >= 30
    remarks = read_remarks()
    for row in rows:
        assert row["versions"]
        assert row["cells"]["bits"]["counts"]
        for name, cell in row["cells"].items():
            assert name in PROPERTIES
            assert set(cell["counts"]) <= set(VERDICTS)
            bare = [each for each in findings_of(cell) if remark_of(row["subject"], each, remarks) is None]
            red = {(each["case"], each["dtype"]) for each in bare if each["verdict"] in RED}
            if red:
                script = cell["script"]
                assert script["showed"], (row["subject"], name, script)
                assert (script["case"], script["dtype"]) in red, (row["subject"], name, script)


LEAKING = """
import numpy as np


def attention(query, key, value, is_causal=False):
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    rows, columns = (np.arange(size) for size in scores.shape[-2:])
    scores = np.where(is_causal & (columns > rows[:, None] + 1), -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ value
"""


@pytest.mark.parametrize("case", ["shape-13x13-causal", "shape-13x13-plain"])
def test_a_script_shows_what_was_found_and_nothing_else(case, monkeypatch, tmp_path):
    (tmp_path / "leaking.py").write_text(LEAKING)
    monkeypatch.setattr(Row, "target", f"{tmp_path / 'leaking.py'}:attention")
    row, options = Row("planted", "others"), {"cases": [case], "dtypes": ["float32"], "power": False}
    (found,) = check_subject(load_target(row.target), **options)
    assert found.verdict == ("silently wrong" if case.endswith("causal") else "right")
    script = shown([replace(found, verdict="silently wrong")], row, tmp_path / "script.py")["script"]
    assert script["showed"] == case.endswith("causal"), script
