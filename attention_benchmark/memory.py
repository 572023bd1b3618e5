"""The peak of this process's memory, as Linux counts it."""

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
"""Environment variables with which memory is given back to the system as soon as it is free."""

OWN = Path("/proc/self")


def peak_growth(function: Callable[[], Any]) -> int | None:
    """Bytes by which resident memory grows at most while a function runs; ``None`` where the system does not tell."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (OWN / "clear_refs").write_text("5")  # begin the peak anew
        before = _kilobytes(OWN / "status", "VmRSS")
        function()
        return max(_kilobytes(OWN / "status", "VmHWM") - before, 0) * 1024
    except (OSError, AttributeError):
        return None


def available() -> int | None:
    """Bytes of memory that the machine has to give."""
    try:
        return _kilobytes(Path("/proc/meminfo"), "MemAvailable") * 1024
    except OSError:
        return None


def _kilobytes(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"expected {name} in {path}; got none")
    return int(found[1])
