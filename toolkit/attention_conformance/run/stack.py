"""Where a process was when it ended or hung: the calls in Python, which faulthandler writes to a file."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["Stack", "frame", "writes_stack"]


class Stack:
    """A file to which another process writes its calls."""

    def __init__(self) -> None:
        file, self.name = tempfile.mkstemp(prefix="attention-", suffix=".stack")
        os.close(file)

    def ask(self, process: BaseProcess) -> None:
        """Let a process that hangs write where it is, if it still answers."""
        if process.pid is None or not hasattr(signal, "SIGUSR1"):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
            process.join(0.2)

    def read(self) -> str:
        """What the process has written; empty where it could not."""
        try:
            return Path(self.name).read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def remove(self) -> None:
        """Remove the file."""
        Path(self.name).unlink(missing_ok=True)


def writes_stack(name: str) -> None:
    """Let this process write its calls to a file when it crashes, or when it is asked."""
    told = open(name, "w")  # noqa: SIM115 (until the process ends)
    faulthandler.enable(told)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, told)


def frame(stack: str, target: str) -> str:
    """The innermost call in the file of a target; empty where there is none."""
    file = target.rpartition(":")[0]
    if not file.endswith(".py"):
        return ""
    found = re.search(rf'File "[^"]*{re.escape(Path(file).name)}", line (\d+) in (\S+)', stack)
    return "" if found is None else f", in line {found[1]} of {Path(file).name} ({found[2]})"
