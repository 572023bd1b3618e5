"""The processor that a run is on."""

from __future__ import annotations

import functools
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def available_threads() -> list[int]:
    """The threads of the processor that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@functools.cache
def machine() -> dict[str, Any]:
    """The processor, the vector instructions that it has, and how many of its threads this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # only Linux has it
        lines = []
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    known = facts.get("flags", facts.get("Features", "")).split()
    vector = [flag for flag in known if flag.startswith(("sse", "avx", "fma", "amx", "asimd", "neon", "sve", "f16c"))]
    return {
        "processor": facts.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "instructions": sorted(set(vector)),
        "threads": len(available_threads()),
    }


def environment() -> dict[str, Any]:
    """Where and when a run took place, and of which version."""
    try:
        installed = version("attention-core")
    except PackageNotFoundError:
        installed = "from its sources"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **machine(),
        "attention-core": installed,
    }
