"""The command ``check``: what is said of a kernel in a file, and of one that crashes or hangs."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from attention_cli.app import app

pytestmark = pytest.mark.needs("numpy")

KERNEL = """
import os, time
import numpy as np

def attention(query, key, value, mask=None, is_causal=False, scale=None):
    rows = query.shape[-2]
    if "abort" in os.environ.get("HABIT", "") and rows == 13:
        os.abort()
    if "hang" in os.environ.get("HABIT", "") and rows == 31:
        time.sleep(600)
    query, key, value = (np.asarray(each, np.float32) for each in (query, key, value))
    scores = query @ np.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        at = np.arange(rows)[:, None]
        scores = np.where(np.arange(key.shape[-2]) <= at + (at >= 64), scores, -1e9)
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    return f"{tmp_path / 'kernel.py'}:attention"


def in_this_process(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments), "--jobs", "0"])


def command(*arguments, **environment):
    words = [sys.executable, "-m", "attention_cli", "check", *map(str, arguments)]
    return {"args": words, "env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment}


def test_the_fault_is_told_in_words_and_conventions_are_accepted_by_name(target):
    case = ("--case", "ladder-128x64-causal", "--case", "empty-row-mask", "--dtype", "float32")
    found = in_this_process(target, *case)
    assert found.exit_code == 1
    told = " ".join(found.stdout.split())
    assert "SILENTLY WRONG queries from 64 on see one key of the future (future-key-from-64)" in told
    assert "a fully masked row gives the average of all values (mean-of-masked-row) contract, line 4" in told
    assert found.stdout.splitlines()[-1] == "1 silently wrong, 1 differs by convention"
    accepted = ("--accept", "mean-of-masked-row", "--accept", "future-key-from-64")
    assert in_this_process(target, *case, *accepted).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.sdpa"], "expected module:callable, file.py:callable or one of attention-core, torch.sdpa,"),
        (["none.py:attention"], "expected a file of Python; got 'none.py', which is none"),
        (["no_such_module:attention"], "expected a module to import; got 'no_such_module'"),
        (["numpy:no_such_name"], "expected a callable of numpy; got 'no_such_name', which it does not have"),
        (["equinox"], "expected equinox for equinox; got none: pip install equinox"),
        (["numpy:abs", "--backend", "cupy"], "expected a backend out of numpy, torch, jax, tensorflow; got 'cupy'"),
        (["numpy:abs", "--layout", "SDHB"], "expected a layout out of BHSD, BSHD"),
        (["numpy:abs", "--profile", "loose"], "expected a profile out of exact, kernel, tf32, 'like TARGET'; got 'loose'"),
        (["numpy:abs", "--case", "none-such"], "expected a case; got 'none-such', which none matches"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line_and_status_2(arguments, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox.nn._attention", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "equinox", None)
    found = in_this_process(*arguments)
    assert found.exit_code == 2
    assert words in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_after_a_crash_and_a_hang_the_run_goes_on_and_can_be_resumed(target, tmp_path):
    cases = ("--case", "ladder-[13]?x*", "--case", "scale", "--dtype", "float32")
    written = tmp_path / "found.json"
    run = command(target, *cases, "--timeout", 2, "--json", written, HABIT="abort hang")
    found = subprocess.run(**run, capture_output=True, text=True, check=False)
    rows = {row["case"]: row for row in json.loads(written.read_text())["findings"]}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts.pop("ladder-13x32-causal") == "crashed"
    assert verdicts.pop("ladder-31x80-plain") == "timed out"
    assert set(verdicts.values()) == {"right"}
    assert rows["ladder-13x32-causal"]["detail"] == "its process died: SIGABRT"
    assert found.returncode == 3
    assert found.stdout.splitlines()[-1] == f"0 silently wrong, 1 crashed, 1 timed out, {len(verdicts)} right"
    resumed = in_this_process(target, *cases, "--resume", written)
    assert (resumed.exit_code, resumed.stdout.splitlines()[-1]) == (3, found.stdout.splitlines()[-1])


def test_the_least_wrong_of_drawn_calls_is_a_program_that_a_seed_replays(target, tmp_path):
    pytest.importorskip("hypothesis")
    source = tmp_path / "kernel.py"
    source.write_text(KERNEL + "\n\ndef zeros(query, key, value):\n    return np.zeros_like(query)\n")
    words = ("--fuzz", 1, "--seed", 3, "--dtype", "float32")
    drawn = [in_this_process(f"{source}:zeros", *words).stdout for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert "queries=1, keys=1, width=16" in drawn[0]
    found = in_this_process(target, *words)
    assert found.exit_code == 1
    program = tmp_path / "program.py"
    program.write_text('"""' + found.stdout.partition('\n"""')[2].rpartition("\n")[0].rpartition("\n")[0])
    words = [sys.executable, "-P", program]
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 1, run.stderr
    assert ": expected " in run.stdout
    assert "attention_conformance" not in program.read_text()
    source.write_text(KERNEL.replace("at + (at >= 64)", "at"))
    run = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
