"""Peak memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["SETTINGS", "available", "peak_growth"]

SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # oneDNN comes with an allocator of its own
    "ATTENTION_BENCHMARK_MEMORY": "1",
}
"""Environment variables that make allocators return freed memory to the system at once."""

PROCESS = Path("/proc/self")


def peak_growth(function: Callable[[], Any]) -> int | None:
    """Run a function; return by how many bytes resident memory grew at most, or ``None`` if unknown."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (PROCESS / "clear_refs").write_text("5")  # reset the peak memory
        before = _kilobytes(PROCESS / "status", "VmRSS")
        function()
        return max(_kilobytes(PROCESS / "status", "VmHWM") - before, 0) * 1024
    except (OSError, AttributeError):
        return None


def available() -> int | None:
    """Bytes of memory that are available on the machine."""
    try:
        return _kilobytes(Path("/proc/meminfo"), "MemAvailable") * 1024
    except OSError:
        return None


def _kilobytes(path: Path, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"expected {name} in {path}; got none")
    return int(match[1])
