"""The memory of this process and of the machine, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from typing import Any


def available() -> int | None:
    """Bytes of memory that are available on the machine; None where the system does not tell."""
    with contextlib.suppress(OSError, StopIteration):
        return _bytes_of("/proc/meminfo", "MemAvailable")
    return None


def resident() -> int:
    """The resident memory of this process in bytes, after what is free went back; 0 where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not every C library can give memory back
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError, StopIteration):
        return _bytes_of("/proc/self/status", "VmRSS")
    return 0


def peak_growth(function: Callable[[], Any]) -> int | None:
    """Run a function; return by how many bytes resident memory grew at most, or ``None`` if unknown."""
    gc.collect()
    before = resident()
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/self/clear_refs", "w") as maximum:
            maximum.write("5")  # which begins a new one
        function()
        return max(_bytes_of("/proc/self/status", "VmHWM") - before, 0)
    return None


def _bytes_of(path: str, name: str) -> int:
    """A number of bytes that the system tells in KiB, by name."""
    with open(path) as lines:
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024
