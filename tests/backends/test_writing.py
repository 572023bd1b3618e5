"""Files are written whole or not at all: what is no regular file stays, and killed savers leave nothing for long."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from attention_files import writing
from attention_files.safetensors import FileError, load_arrays, load_tree, save_arrays, save_tree
from attention_files.writing import check_writable, write_file

KILLED = """
import os, signal, sys
from attention_files import writing
writing.os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
writing.write_file(sys.argv[1], b"half of it")
"""


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, os.devnull):
        before = os.stat(path)
        with pytest.raises(FileError, match=r"^expected a file to write; got .*, no regular file$"):
            save_arrays(path, {"x": np.zeros(1)})
        after = os.stat(path)
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    with pytest.raises(FileError, match="no regular file"):
        save_tree(link, ())
    assert names(tmp_path) == ["link", "pipe"]


def test_what_a_killed_saver_left_is_removed_by_the_next(tmp_path):
    path, other = tmp_path / "weights", tmp_path / "others"
    for target in (path, path, other):
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, target],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL
    assert [each.endswith(".tmp") for each in names(tmp_path)] == [True, True]  # the second removed what the first left
    write_file(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert len(names(tmp_path)) == 2  # that of the other target is its own saver's
    write_file(other, b"whole")
    assert names(tmp_path) == ["others", "weights"]


def test_a_saver_that_lives_keeps_its_temporary_file(tmp_path, monkeypatch):
    path, seen, fsync = tmp_path / "weights", [], os.fsync

    def meanwhile(number):
        monkeypatch.setattr(writing.os, "fsync", fsync)
        write_file(path, b"second")
        seen.append(names(tmp_path))
        fsync(number)

    monkeypatch.setattr(writing.os, "fsync", meanwhile)
    write_file(path, b"first")
    assert (path.read_bytes(), names(tmp_path)) == (b"first", ["weights"])
    assert [len(each) for each in seen] == [2]


def test_a_saver_whose_file_was_taken_for_abandoned_makes_another(tmp_path, monkeypatch):
    path, lock, calls = tmp_path / "weights", writing._lock, []

    def late(file):
        calls.append(file.name)
        if len(calls) == 1:
            os.unlink(file.name)
        return lock(file)

    monkeypatch.setattr(writing, "_lock", late)
    write_file(path, b"whole")
    assert (path.read_bytes(), names(tmp_path), len(set(calls))) == (b"whole", ["weights"], 2)


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    path = tmp_path / "weights"
    write_file(path, b"first")
    path.chmod(0o640)
    write_file(path, b"second")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"second", 0o640)


def test_a_path_with_a_null_byte_is_an_error_of_files():
    reason = r"got 'a\\x00b': (lstat: )?embedded null (byte|character in path)$"  # the words of Python, and of 3.13
    for save in (lambda path: save_arrays(path, {}), lambda path: save_tree(path, ()), check_writable):
        with pytest.raises(FileError, match=f"^expected a file that can be written; {reason}"):
            save("a\0b")
    for load in (load_arrays, load_tree):
        with pytest.raises(FileError, match=f"^expected a file of safetensors; {reason}"):
            load("a\0b")
