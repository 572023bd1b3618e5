"""The command in this process, and the environment of another that finds the same sources."""

import os
import sys

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
