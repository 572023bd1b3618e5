"""Files are written whole or not at all: what is no regular file stays, and what a killed saver was to replace."""

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
        with pytest.raises(FileError):
            save_arrays(path, {"x": np.zeros(1)})
        after = os.stat(path)
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    with pytest.raises(FileError):
        save_tree(link, ())
    assert names(tmp_path) == ["link", "pipe"]


def test_a_killed_saver_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "weights"
    write_file(path, b"whole")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", KILLED, path], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"whole"
    assert [each.endswith(".tmp") for each in names(tmp_path)] == [True, False]


def test_two_savers_of_one_file_at_once_both_write_it_whole(tmp_path, monkeypatch):
    path, seen, fsync = tmp_path / "weights", [], os.fsync

    def meanwhile(number):
        monkeypatch.setattr(writing.os, "fsync", fsync)
        write_file(path, b"second")
        seen.append(path.read_bytes())
        fsync(number)

    monkeypatch.setattr(writing.os, "fsync", meanwhile)
    write_file(path, b"first")
    assert (seen, path.read_bytes(), names(tmp_path)) == ([b"second"], b"first", ["weights"])


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    path = tmp_path / "weights"
    write_file(path, b"first")
    path.chmod(0o640)
    write_file(path, b"second")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"second", 0o640)


def test_a_path_with_a_null_byte_is_an_error_of_files():
    for save in (lambda path: save_arrays(path, {}), lambda path: save_tree(path, ()), check_writable):
        with pytest.raises(FileError):
            save("a\0b")
    for load in (load_arrays, load_tree):
        with pytest.raises(FileError):
            load("a\0b")
