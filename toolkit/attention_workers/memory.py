"""The memory of this process and of the machine, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def available() -> int | None:
    """Bytes of memory that are available on the machine; None where the system does not tell."""
    return _bytes_of("/proc/meminfo", "MemAvailable")


def resident() -> int:
    """The resident memory of this process in bytes, after what is free went back; 0 where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not every C library can give memory back
        ctypes.CDLL(None).malloc_trim(0)
    return _bytes_of("/proc/self/status", "VmRSS") or 0


def peak_growth(function: Callable[[], Any]) -> int | None:
    """Run a function; return by how many bytes resident memory grew at most, or ``None`` if unknown."""
    gc.collect()
    before = resident()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # which begins a new maximum
        function()
        return max((_bytes_of("/proc/self/status", "VmHWM") or 0) - before, 0)
    return None


def _bytes_of(path: str, name: str) -> int | None:
    """A number of bytes that the system tells in KiB, by name."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s*(\d+)", Path(path).read_text(), re.MULTILINE)
        return found and int(found[1]) * 1024
    return None
