"""An interrupt ends the command with one line and status 130, at any time, with its processes, and leaves files whole."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import ENVIRONMENT, is_alive, wait_until

pytestmark = [
    pytest.mark.needs("numpy"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the processes of Linux"),
]

CONFORMANCE = ["conformance", "--backend", "numpy"]
BENCH = ["bench", "--backend", "numpy", "--shape", "1,2,64,16", "--seconds", "60", "--rounds", "1000"]


@pytest.fixture(autouse=True)
def heeded_interrupts():
    """Let children heed interrupts, also where this process was told to ignore them, as in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start():
    """Start the command in a session of its own, and leave nothing of it behind."""
    with contextlib.ExitStack() as started:

        def start(*arguments):
            command = [sys.executable, "-m", "attention_cli", *map(str, arguments)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = subprocess.Popen(command, **pipes, text=True, env=ENVIRONMENT, start_new_session=True)
            started.enter_context(process)
            started.callback(killed, process)
            return process

        yield start


def killed(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def children_of(number):
    """All processes below one."""
    found = []
    for task in Path(f"/proc/{number}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # of a thread that has ended meanwhile
            for child in map(int, task.read_text().split()):
                found += [child, *children_of(child)]
    return found


def interrupted(process, number=signal.SIGINT):
    """Signal the group of a process, as a terminal does; return its status and errors, and what it left running."""
    below = children_of(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=120)
    wait_until(lambda: not any(map(is_alive, below)))
    return process.returncode, errors


def holds(number, field, which):
    """Whether a signal is among those that a process blocks (``SigBlk``) or catches (``SigCgt``)."""
    status = Path(f"/proc/{number}/status").read_text()
    return bool(int(re.search(rf"^{field}:\s*(\w+)", status, re.MULTILINE)[1], 16) & 1 << which - 1)


ONE_LINE = (130, "attention-core: interrupted\n")


@pytest.mark.parametrize(
    "arguments",
    [CONFORMANCE, [*CONFORMANCE, "--jobs", "0"], ["backends"]],
    ids=lambda each: " ".join(each[:1] + each[3:]),
)
@pytest.mark.parametrize("library", ["", "numpy"])
def test_an_interrupt_while_libraries_are_imported_is_one_line(start, arguments, library):
    process = start(*arguments)
    # The command runs, and no longer Python's own start.
    wait_until(lambda: holds(process.pid, "SigCgt", signal.SIGTERM))
    wait_until(lambda: library in Path(f"/proc/{process.pid}/maps").read_text() or process.poll() is not None)
    found = interrupted(process)
    assert found == ONE_LINE or found[0] == 0  # it may have ended by itself


@pytest.mark.parametrize("arguments", [CONFORMANCE, BENCH], ids=lambda each: each[0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_processes_that_were_started_and_leaves_the_old_file(start, arguments, number, tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"old": true}')
    process = start(*arguments, "--json", path)
    wait_until(lambda: children_of(process.pid))
    assert interrupted(process, number) == (128 + number, ONE_LINE[1])
    assert json.loads(path.read_text()) == {"old": True}
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def groups_of_workers(number):
    """The groups of the processes that run cases."""
    found = []
    for each in children_of(number):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [os.getpgid(each)] * (b"attention_workers" in Path(f"/proc/{each}/cmdline").read_bytes())
    return found


def test_no_interrupt_of_a_terminal_reaches_workers(start):
    process, groups = start(*CONFORMANCE), []
    wait_until(lambda: groups.extend(groups_of_workers(process.pid)) or groups)
    assert interrupted(process) == ONE_LINE
    assert process.pid not in groups


def test_an_interrupt_of_a_check_leaves_a_report_and_no_process(start, tmp_path):
    kernel, path = tmp_path / "kernel.py", tmp_path / "found.json"
    kernel.write_text("import time\ndef attention(query, key, value):\n    time.sleep(600 * (query.shape[-2] == 31))\n")
    process = start("check", f"{kernel}:attention", "--case", "shape-*", "--json", path)
    while "first verdict" not in process.stdout.readline():
        assert process.poll() is None
    below = children_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "attention-core: interrupted\n")
    assert "Interrupted: the cases after these were not run." in output
    assert json.loads(path.read_text())["about"]["interrupted"] is True
    wait_until(lambda: not any(map(is_alive, below)))


def test_an_interrupt_within_an_import_that_passes_over_exceptions_ends_the_command(tmp_path):
    (tmp_path / "swallowing.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
        "open('went-on', 'w')\n"
    )
    script = (
        "import sys; sys.path.insert(0, '.')\nfrom attention_cli import main as program\n"
        "def run(): import swallowing\nprogram.run = run\nprogram.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "attention-core: interrupted\n")
    assert not (tmp_path / "went-on").exists()
