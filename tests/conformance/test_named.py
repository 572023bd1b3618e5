"""Named cases: the data is complete, and the scripts ask for what they need."""

import ast
import json
import re
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest

from attention_conformance import CASES as CATALOGUE
from attention_conformance.cases.contract import LINES
from attention_conformance.named import PROPERTIES, RESULTS, named_cases
from reproducers import __main__ as reproducers

ROOT = Path(__file__).parents[2]
CASES = named_cases()


def script_of(tmp_path, code):
    path = tmp_path / "script.py"
    path.write_text(code)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_says_everything(case):
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", case.thread)
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/issues/\d+", case.url)
    assert case.thread.rpartition("#")[2] in case.name
    assert case.title
    assert case.versions
    assert case.property in PROPERTIES
    assert case.line in {0, *LINES}
    assert case.needs in ("cpu", "cuda", "metal")
    assert set(case.geometry) <= set("BHGMNDE")
    assert set(case.like) <= {case.name for case in CATALOGUE}
    assert case.summary.endswith(".")
    assert len(re.findall(r"\.(?:\s|$)", case.story)) >= 3
    for sentence in re.split(r"(?<=[.!?])\s+", f"{case.summary} {case.story}"):
        assert len(sentence.split()) <= 30, sentence


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_it_showed_is_recorded(case):
    shown = case.shown
    assert shown.result in RESULTS
    assert shown.detail
    if shown.result == "not run":
        assert case.needs != "cpu"
        assert not shown.date
        assert not shown.versions
    else:
        assert date.fromisoformat(shown.date)
        assert [part.split()[0] for part in shown.versions.split(", ")] == list(case.packages)


@pytest.mark.parametrize("case", [case for case in CASES if case.script], ids=lambda case: case.name)
def test_a_script_imports_its_packages_alone_prints_both_results_and_exits(case):
    script = (ROOT / case.script).read_text(encoding="utf-8")
    tree = ast.parse(script)
    assert ast.get_docstring(tree).replace("\n", " ") == case.summary
    assert f"# dependencies = {json.dumps(case.packages)}\n" in script
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
    modules = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert modules - {"numpy"} == {*case.packages} - {"numpy"}
    assert ast.unparse(tree.body[-1]).startswith("raise SystemExit(int(")
    assert script.count('print("expected') == script.count('print("got') == 1
    assert len(tree.body) <= 25


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print('seen')", 0),
        ("import sys; print('seen'); sys.exit(1)", 1),
        ("import sys; print('seen'); sys.exit(77)", 77),
        ("print('seen'); raise ValueError('no result')", 3),
        ("import os; print('seen', flush=True); os.abort()", 3),
    ],
)
def test_a_run_tells_a_wrong_result_from_none(tmp_path, code, status):
    assert reproducers.run(script_of(tmp_path, code))[0] == status


def test_what_lacks_a_name_or_a_package_is_not_here_and_what_hangs_ends(tmp_path):
    status, printed = reproducers.run(script_of(tmp_path, "from numpy import nothing"))
    assert (status, printed[:54]) == (77, "not here: cannot import name 'nothing' from 'numpy' (/")
    script = script_of(tmp_path, "import time; time.sleep(60)")
    assert reproducers.run(script, seconds=0.5) == (3, "no result in 0 s\n")
    assert reproducers.run(script, ("numpy", "no-such-package[cpu]>=1")) == (77, "not here: no-such-package\n")


@pytest.mark.needs("torch")
def test_a_run_compares_with_the_last(capsys, monkeypatch):
    assert reproducers.main(["101967"]) == 0
    monkeypatch.setattr(reproducers, "run", lambda *script: (0, "seen\n"))
    assert reproducers.main(["101967"]) == 1
    assert "right; expected wrong:\nseen" in capsys.readouterr().out


def test_the_session_installs_what_a_cpu_can_run():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    installed = {name.partition("[")[0] for name in groups["reproducers"]}
    assert {name for case in CASES if case.needs == "cpu" for name in case.packages} == installed


def test_the_page_is_made_of_the_data():
    page = (ROOT / "docs/evidence/named-cases.md").read_text(encoding="utf-8")
    assert reproducers.renewed(page) == page
    assert all(f"| `{case.name}`: " in page for case in CASES)
