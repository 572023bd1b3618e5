"""Files that are written whole or not at all, whatever ends the process."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from attention_core.backend import one_line


class FileError(ValueError):
    """A file that cannot be read or written, or does not hold what was expected; said in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, which is replaced whole or, on an error, left as it was.

    Temporary files of savers that were killed while they wrote the same file are removed.

    Raises
    ------
    FileError
        When the file cannot be written, or is no regular file.
    """
    target = check_writable(path)
    try:
        _remove_abandoned(target)
        with _temporary(target) as (file, temporary):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if target.exists():
                temporary.chmod(target.stat().st_mode)
            temporary.replace(target)
    except OSError as error:
        raise FileError(f"expected a file that can be written; got {target}: {error.strerror}") from error


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The path, links resolved, of a file that `write_file` can replace or make; nothing is written.

    Raises
    ------
    FileError
        When there is something other than a regular file, or no folder to write in.
    """
    try:
        target = Path(os.path.realpath(path))
        there, regular, folder = target.exists(), target.is_file(), target.parent.is_dir()
    except (OSError, ValueError) as error:  # too long, or with a null byte
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"expected a file that can be written; got {str(path)!r}: {reason}") from error
    if there and not regular:
        kind = "a directory" if target.is_dir() else "no regular file"
        raise FileError(f"expected a file to write; got {path}, {kind}")
    if not folder:
        raise FileError(f"expected a file that can be written; got {path}: No such file or directory")
    if not os.access(target.parent, os.W_OK) or (there and not os.access(target, os.W_OK)):
        raise FileError(f"expected a file that can be written; got {path}: Permission denied")
    return target


def _prefix(target: Path) -> str:
    return f".{hashlib.sha256(target.name.encode(errors='surrogateescape')).hexdigest()[:16]}."


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file next to the target, locked as long as its saver lives, and removed afterwards."""
    while True:
        temporary = target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:
                # Another saver may take the file for an abandoned one before it is locked.
                if _lock(file) and not _is_at(file, temporary):
                    continue
                yield file, temporary
                return
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _remove_abandoned(target: Path) -> None:
    """Remove temporary files of this target that no living process has locked."""
    for temporary in target.parent.glob(f"{_prefix(target)}*.tmp"):
        with contextlib.suppress(OSError), temporary.open("rb") as file:
            if _lock(file):
                temporary.unlink(missing_ok=True)


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: BinaryIO) -> bool:
    """Lock an open file, which its process does until it ends; false where another has, or the system cannot."""
    try:
        fcntl: Any = importlib.import_module("fcntl")  # of POSIX
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
