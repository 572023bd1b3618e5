"""The command ``attention-core``: starts with the core alone, says what is missing, and ends when it is told to."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from types import FrameType

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

SETTINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "3",  # TensorFlow is talkative
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # several libraries share an accelerator
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
"""Environment variables for this process and its children."""

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_seen: list[int] = []
_stderr: list[int] = []  # the stream, also while what libraries write to it is kept


class _Interrupt(BaseException):
    """Raised by a signal; no KeyboardInterrupt, about which some versions of typer print a line."""


def main() -> None:
    """Run the command; when it is interrupted, end its processes, say so in a line, and exit with 128 + the signal."""
    with contextlib.suppress(OSError):  # there may be none
        _stderr.append(os.dup(2))
    try:
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, _interrupt)
        run()
    except BaseException:
        _ignore_signals()
        if not _seen:
            raise
    _ignore_signals()
    if _seen:
        _end()


def run() -> None:
    """Run the command; say in a line which module it lacks or cannot import, or that a disk is full."""
    for name, setting in SETTINGS.items():
        os.environ.setdefault(name, setting)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # whose encoding may have no ≤
    try:
        importlib.import_module("attention_cli.app").app()
    except ImportError as error:
        extra = next((word for word in (error.name, *sys.argv[1:2]) if word in ("gguf", "bench", "view")), "check")
        lacks = f"the command needs {error.name}: install attention-toolkit[{extra}]"
        message = lacks if isinstance(error, ModuleNotFoundError) else str(error)
        print(f"attention-core: {message}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in FULL:
            raise
        with contextlib.suppress(OSError):  # what is not written yet would raise again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.write(2, f"attention-core: expected output that can be written; got {error.strerror}\n".encode())
        sys.exit(2)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _seen.append(number)
    # Libraries print or pass over what is raised while they are imported.
    if len(_seen) > 1 or _is_importing(frame):
        _ignore_signals()
        _end()
    raise _Interrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _ignore_signals() -> None:
    """Ignore further signals: what is left to do takes no time."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end() -> None:
    """Exit at once, and so do processes that were started: what libraries do at the end, they may do with a trace."""
    with contextlib.suppress(OSError):  # of a pipe whose reader has ended
        sys.stdout.flush()
    with contextlib.suppress(OSError, IndexError):
        os.write(_stderr[0], b"attention-core: interrupted\n")
    os._exit(128 + _seen[0])
