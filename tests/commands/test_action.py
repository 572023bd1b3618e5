"""The action for GitHub: its file, and its check as a shell runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import ENVIRONMENT

ACTION = Path(__file__).parents[2] / "action.yml"
KERNEL = "import numpy as np\n\ndef attention(query, key, value):\n    return np.zeros_like(value)\n"


def test_the_check_writes_the_summary_and_its_files_and_ends_with_the_status(tmp_path):
    action = pytest.importorskip("yaml").safe_load(ACTION.read_text())
    steps = action["runs"]["steps"]
    asked = {name for step in steps for each in (step.get("env") or step["with"]).values() for name in action["inputs"]
             if f"inputs.{name} " in each}  # fmt: skip
    assert asked == set(action["inputs"])
    assert all(step["uses"].partition("@")[2] if "uses" in step else step["shell"] == "bash" for step in steps)
    (check,) = (step["run"] for step in steps if step.get("name") == "Check")
    (tmp_path / "kernel.py").write_text(KERNEL)
    command = tmp_path / "attention-core"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m attention_cli "$@"\n')
    command.chmod(0o755)
    summary, files = tmp_path / "summary.md", tmp_path / "attention-core.d"
    environment = ENVIRONMENT | {
        "TARGET": "kernel.py:attention",
        "OPTIONS": "--case 'shape-1x1-d16-plain' --dtype float32 --jobs 0",
        "RUNNER_TEMP": str(files),
        "GITHUB_STEP_SUMMARY": str(summary),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    # As GitHub runs a step whose shell is bash.
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", check]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert summary.read_text().endswith("\n1 wrong\n````\n")
    written = sorted(path.name for path in (files / "attention-core").iterdir())
    assert written == ["found.json", "found.txt"]
