"""The command: what it prints, what it writes, and its exit status."""

import importlib
import io
import json
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_helpers import ENVIRONMENT, invoke, refusal
from rich.console import Console

import attention_core as ac
from attention_benchmark.problem import MASKS, PRESETS
from attention_cli import app as command_line, backends, main as program
from attention_conformance import CASES
from attention_conformance.cases.contract import LINES
from attention_conformance.measure.finding import Finding
from attention_conformance.measure.implementations import is_quick
from attention_conformance.problem import DTYPES
from attention_conformance.processes import Order
from attention_conformance.written import report
from attention_conformance.written.summary import count_text
from attention_core.backend import get_backend
from attention_models.layouts import LAYOUTS
from attention_numpy.trees import devices_of_kind
from attention_workers import carried_out


def conformance(*arguments):
    """A short run in this process."""
    return invoke("conformance", "--backend", "numpy", "--dtype", "float32", "--case", "mask*", "--jobs", 0, *arguments)


def result(case, error, bound, verdict, dtype="float32", **way):
    way = {"backend": "numpy", "device": "cpu", "mode": "eager", "implementation": "dense", "measure": "ulp", **way}
    return Finding(case, dtype, 0, "", verdict, error, bound, **way)


def wrong_by_a_percent(query, key, value, /, **options):
    return ac.scaled_dot_product_attention(query, key, value, **options) * 1.01


def test_a_run_that_holds_ends_with_its_counts_and_status_0():
    result = conformance()
    assert result.exit_code == 0
    count = 2 * sum(case.name.startswith("mask") for case in CASES)  # dense and blockwise
    assert result.stdout.splitlines()[-1] == f"0 wrong, {count} right"
    assert "units in the last place of S" in result.stdout


def test_a_run_that_does_not_hold_names_what_failed_and_has_status_1(monkeypatch):
    monkeypatch.setattr("attention_conformance.own.runner.run.__defaults__", (wrong_by_a_percent,))
    result = conformance("--case", "weights")
    assert result.exit_code == 1
    assert "mask on numpy (cpu, float32, eager, dense): error" in result.stdout
    assert re.fullmatch(r"\d+ wrong, \d non-finite or mismatched", result.stdout.splitlines()[-1])


def test_the_line_of_the_contract_shows_its_worst_error_where_and_of_how_many():
    nan = float("nan")
    found = [
        result("mask", 3.0, 6.0, "right"),
        result("mask", 0.5, 0.51, "right", "float16"),  # nearest to its bound
        result("gradient-mask-and-bias", nan, nan, "not offered"),
        result("grouped-heads", 7.0, 6.0, "silently wrong"),
        result("grouped-heads", float("inf"), nan, "visibly wrong", "float64"),
        result("dropout", 0.0, 0.0, "right"),
        result("model", 1.0, 1.0, "right"),
    ]
    table = report.line_table(found, 120)
    rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    assert [row[0] for row in rows] == ["1", "9", "11"]
    assert rows[0][1:] == (
        "A mask is boolean, and True means may attend",
        "0.5 of 0.51",
        "2 of 2",
        "mask numpy cpu, float16, eager, dense",
    )
    assert rows[1][2:] == ("inf", "0 of 2", "grouped-heads numpy cpu, float64, eager, dense")
    assert rows[2][2:4] == ("0", "1 of 1")


def test_the_lines_of_the_contract_fit_the_terminal():
    way = {"backend": "array_api_strict", "device": "CPU_DEVICE", "implementation": "blockwise"}
    every = [result(case.name, 12.345, 1.2e10, "right", **way) for case in CASES]
    screen = Console(width=80, file=io.StringIO())
    screen.print(report.line_table(every, 80))
    printed = screen.file.getvalue().splitlines()
    assert len(printed) == 2 + 12
    assert all(len(line) <= 80 and "12.3 of 1.2e" in line for line in printed[2:])


def test_the_lines_are_those_of_the_contract():
    text = (Path(__file__).parents[2] / "docs/explanation/contract.md").read_text(encoding="utf-8")
    titles = dict(re.findall(r"^## (\d+)\. (.*)$", text, re.MULTILINE))
    assert {int(number): title.replace("*", "") for number, title in titles.items()} == {
        line: says for line, says in LINES.items() if line
    }
    assert {case.line for case in CASES} == {*LINES} - {12}


def test_what_is_found_is_told_as_it_is_found(monkeypatch):
    monkeypatch.setattr("attention_conformance.own.runner.run.__defaults__", (wrong_by_a_percent,))
    result = invoke("conformance", "--backend", "numpy", "--dtype", "float32", "--case", "mask", "--jobs", 0)
    told = result.stderr.splitlines()
    assert told[0].startswith("mask on numpy (cpu, float32, eager, dense): error")
    assert len(told) == 2


def test_how_little_was_checked_is_told():
    result = invoke("conformance", "--backend", "numpy", "--case", "gradient", "--dtype", "float32", "--jobs", 0)
    assert result.exit_code == 1
    assert result.stdout.endswith("0 wrong, 2 not applicable; little was checked: 0 of 2 cases were computed\n")


def test_a_quick_run_is_eager_in_float32_on_one_device(tmp_path):
    path = tmp_path / "results.json"
    result = invoke(
        "conformance", "--quick", "--backend", "array_api_strict", "--case", "mask*", "--jobs", 0, "--json", path
    )
    assert result.exit_code == 0
    ways = {(row["device"], row["dtype"], row["mode"]) for row in json.loads(path.read_text())["findings"]}
    assert ways == {("CPU_DEVICE", "float32", "eager")}
    backend = get_backend("numpy")
    assert is_quick(backend, "eager", "float32", "blockwise")
    assert not is_quick(backend, "compiled", "float32", "dense")
    assert not is_quick(backend, "eager", "float16", "dense")


COMMANDS = ("conformance", "digest", "bench", "convert", "backends", "view")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_is_whole_and_imports_no_library(command):
    script = (
        "import sys\nfrom attention_cli.main import run\nsys.argv = ['attention-core', *sys.argv[1:]]\n"
        "try:\n    run()\nfinally:\n    print({'numpy', 'rich.table', 'attention_core'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script, *command, "--help"]
    printed = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, env=ENVIRONMENT).stdout
    assert printed.splitlines()[-1] == "set()"
    assert "..." not in re.sub(r"(?i)\[args\]\.\.\.|\[?\{?files\}?\]?\.\.\.", "", printed)
    assert "…" not in printed


def test_help_names_what_there_is():
    known = (
        (command_line.Convert, ["attention-core", *LAYOUTS]),
        (command_line.Bench, MASKS),
        (command_line.Bench, PRESETS),
    )
    for kind, names in known:
        assert f"{', '.join(names)}" in " ".join(kind.__doc__.split())


def test_results_are_written_as_json(tmp_path):
    path = tmp_path / "results.json"
    assert conformance("--json", path, "--case", "gradient").exit_code == 0
    written = json.loads(path.read_text())
    assert set(written) == {"about", "summary", "findings"}
    assert written["about"]["backends"]["numpy"]["numpy"]
    assert written["summary"] == {"not offered": 2, "right": len(written["findings"]) - 2}
    assert {row["implementation"] for row in written["findings"]} == {"dense", "blockwise"}
    rows = {row["case"]: row for row in written["findings"] if row["implementation"] == "dense"}
    assert rows["mask"]["verdict"] == "right"
    assert 0 < rows["mask"]["error"] <= rows["mask"]["bound"] == 6
    assert (rows["gradient"]["verdict"], rows["gradient"]["error"]) == ("not offered", None)
    assert rows["gradient"]["detail"] == "numpy does not differentiate"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backend", "numpi"], "expected a backend out of array_api_strict, "),
        (["--implementation", "flash"], "expected an implementation out of dense, blockwise, fused; got 'flash'"),
        (["--dtype", "float8"], f"expected a dtype out of {', '.join(DTYPES)}; got 'float8'"),
        (["--mode", "fast", "--backend", "numpy"], "expected a mode out of eager; got 'fast'"),
        (["--device", "cuda:9", "--backend", "numpy"], "expected a device out of cpu; got 'cuda:9'"),
        (["--case", "mask", "--case", "softpac"], "expected a case of --list; got 'softpac', which none matches"),
        (["--json", "/no/such/folder/results.json"], "expected a file that can be written; got /no/such/folder/results.json"),
        (["--json", "."], "expected a file to write; got ., a directory"),
        (["--json", "/dev/null"], "expected a file to write; got /dev/null, no regular file"),
        (["--backend", "numpy", "--model", "/no/such/model"], "expected --identical with --model, whose numbers"),
    ],
    ids=lambda each: each[-2] if isinstance(each, list) else "",
)  # fmt: skip
def test_what_is_not_known_is_told_in_one_line_before_any_work(arguments, text, monkeypatch):
    monkeypatch.setattr("attention_cli.conformance.carried_out", None)
    assert refusal("conformance", *arguments).startswith(text)


def test_a_kind_of_devices_is_all_of_them(tmp_path):
    path = tmp_path / "results.json"
    chosen = ["--backend", "array_api_strict", "--case", "mask", "--dtype", "float32", "--implementation", "dense"]
    assert invoke("conformance", *chosen, "--device", "device", "--json", str(path)).exit_code == 0
    assert {row["device"] for row in json.loads(path.read_text())["findings"]} == {"device1", "device2"}
    assert devices_of_kind("cuda", ["CPU:0", "GPU:0"]) == ["GPU:0"]
    assert devices_of_kind("cpu", ["CPU:0", "GPU:0"]) == ["CPU:0"]


def test_backends_are_listed_with_those_that_are_not_installed(monkeypatch):
    monkeypatch.setattr("attention_cli.backends.available_backends", lambda: ["numpy"])
    result = invoke("backends")
    assert result.exit_code == 0
    assert "bfloat16" in result.stdout
    assert "not installed: install attention-core[torch]" in result.stdout
    told = "backend torch is not installed: install attention-core[torch]"
    assert told in refusal("conformance", "--backend", "torch")


def test_without_the_libraries_of_the_command_it_says_what_to_install(monkeypatch, capsys):
    for name, extra in (("gguf", "gguf"), ("typer", "view"), ("one_that_no_extra_has", "check"), ("broken", "")):

        def app(name=name, extra=extra):
            raise ModuleNotFoundError(name=name) if extra else ImportError(f"expected {name}")

        monkeypatch.setitem(sys.modules, "attention_cli.app", types.SimpleNamespace(app=app))
        monkeypatch.setattr(sys, "argv", ["attention-core", "view" if extra == "view" else "digest"])
        with pytest.raises(SystemExit) as caught:
            program.run()
        needs = f"the command needs {name}: install attention-toolkit[{extra}]" if extra else "expected broken"
        assert (caught.value.code, capsys.readouterr().err) == (2, f"attention-core: {needs}\n")
    monkeypatch.setattr(backends, "announced_backends", list)
    monkeypatch.setattr("attention_core._backend._find.entries", dict)
    with pytest.raises(ImportError):
        backends.chosen_backends(["numpy"])


def test_an_encoding_without_a_sign_shows_another(monkeypatch):
    monkeypatch.setitem(sys.modules, "attention_cli.app", types.SimpleNamespace(app=lambda: print("error ≤ bound")))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    program.run()
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"error ? bound" + os.linesep.encode()


def test_a_view_ends_quietly_where_nobody_reads_on(tmp_path):
    np.save(tmp_path / "weights.npy", np.eye(3)[None])
    closed, end = os.pipe()
    os.close(closed)
    words = [sys.executable, "-m", "attention_core", "view", str(tmp_path / "weights.npy")]
    with os.fdopen(end, "w") as stream:
        done = subprocess.run(words, stdout=stream, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to a device of Linux")
@pytest.mark.parametrize("command", ["view", "backends"])
def test_output_on_a_full_disk_is_told_in_a_line(command, tmp_path):
    np.save(tmp_path / "weights.npy", np.eye(3)[None])
    words = [command, str(tmp_path / "weights.npy")][: 1 + (command == "view")]
    with open("/dev/full", "w") as stream:
        command = [sys.executable, "-m", "attention_core", *words]
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, check=False)
    expected = b"attention-core: expected output that can be written; got No space left on device\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_backends_run_in_processes_of_their_own(tmp_path):
    backends = ("--backend", "numpy", "--backend", "array_api_strict")
    path = tmp_path / "results.json"
    result = invoke("conformance", "--case", "mask", "--dtype", "float64", *backends, "--json", path)
    assert result.exit_code == 0, result.output
    found = [(row["backend"], row["detail"]) for row in json.loads(path.read_text())["findings"]]
    assert {backend for backend, _ in found} == {"numpy", "array_api_strict"}
    assert found.count(("array_api_strict", "array_api_strict on no_float64 has no float64")) == 2


MORTAL = """
import os
from attention_conformance.measure.finding import Started
from attention_conformance.own.runner import work

def worker(order):
    for message in work(order):
        yield message
        if isinstance(message, Started) and message.result.case == "softcap":
            os.abort()

def stillborn(order):
    raise SystemExit(3)
    yield
"""


def test_a_case_that_kills_its_process_fails_and_the_others_run(tmp_path, monkeypatch):
    (tmp_path / "mortal.py").write_text(MORTAL)
    monkeypatch.syspath_prepend(tmp_path)
    mortal = importlib.import_module("mortal")
    names = ("mask", "scale", "softcap", "dropout", "grouped-heads")
    messages = list(carried_out([Order("numpy", names, dtypes=("float32", "float64"))], 1, mortal.worker))
    results = [message for message in messages if isinstance(message, Finding)]
    assert {result.case for result in results} == set(names)
    assert len(results) == 4 * len(names)
    failed = [result for result in results if result.passed is False]
    assert {(result.case, result.detail) for result in failed} == {("softcap", "its process died: SIGABRT")}
    assert [(result.implementation, result.dtype) for result in failed] == [
        (implementation, dtype) for implementation in ("dense", "blockwise") for dtype in ("float32", "float64")
    ]
    (start,) = carried_out([Order("numpy", names)], 1, mortal.stillborn)
    assert (start.case, start.passed, start.detail) == ("start", False, "its process died: exit status 3")


def test_what_is_refused_is_counted_apart_and_fails_nothing():
    way, nan = {"backend": "torch", "implementation": "fused"}, float("nan")
    refused = replace(result("mask", nan, nan, "refused", **way), detail="kernel has no masks; none at all")
    skipped = replace(result("mask", nan, nan, "not offered", **way), detail="torch on cpu has none")
    passed = result("mask", 1.0, 6.0, "right", **way)
    counts = "0 wrong, 1 raised (unsupported), 1 not applicable, 1 right"
    assert count_text([refused, skipped, passed]) == counts
    assert report.failures([refused]) == []


def test_an_implementation_that_is_asked_for_is_run_in_full():
    result = conformance("--implementation", "blockwise")
    assert result.exit_code == 0
    count = sum(case.name.startswith("mask") for case in CASES)
    assert result.stdout.splitlines()[-1] == f"0 wrong, {count} right"
    nothing = conformance("--implementation", "fused")
    assert (nothing.exit_code, nothing.stdout.splitlines()[-1]) == (1, "0 wrong")


def test_the_core_is_a_program_and_has_a_version():
    for words in (["-m", "attention_core"], ["-c", "from attention_cli.main import main; main()"]):
        command = [sys.executable, *words, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
        assert (done.stdout, done.stderr) == (f"attention-core {ac.__version__}\n", "")
    with pytest.raises(AttributeError):
        ac.__versions__  # noqa: B018  # to look it up raises
