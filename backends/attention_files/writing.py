"""Files that are written whole or not at all, whatever ends the process."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from attention_core.backend import one_line


class FileError(ValueError):
    """A file that cannot be read or written, or does not hold what was expected; said in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, which is replaced whole or, on an error, left as it was.

    A process that is killed meanwhile leaves a hidden file next to it, which ends with ``.tmp``.

    Raises
    ------
    FileError
        When the file cannot be written, or is no regular file.
    """
    target = check_writable(path)
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if target.exists():
                temporary.chmod(target.stat().st_mode)
        temporary.replace(target)
    except OSError as error:
        raise FileError(f"expected a file that can be written; got {target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


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
