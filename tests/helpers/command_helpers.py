"""The command in this process, and the environment of another that finds the same sources."""

import os
import sys
import time
from pathlib import Path

from typer.testing import CliRunner

from attention_cli.app import app

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def invoke(*arguments):
    """What the command does, on a screen that is wide enough for its tables."""
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def refusal(*arguments, status=2):
    """The line in which the command says why it does nothing, and nothing else."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (status, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("attention-core: ")
    return line.removeprefix("attention-core: ")


def is_alive(number):
    """Whether a process of Linux runs."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    """Wait for two minutes at most."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
