"""The processor that a run is on."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
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
    text = ""
    with contextlib.suppress(OSError):  # only Linux has it
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    facts: dict[str, str] = dict(re.findall(r"^(model name|flags|Features)\s*: (.*)$", text, re.MULTILINE))
    vector = re.findall(r"\b(?:sse|avx|fma|amx|asimd|neon|sve|f16c)\w*", facts.get("flags", facts.get("Features", "")))
    return {
        "processor": facts.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "instructions": sorted({*vector}),
        "threads": len(available_threads()),
    }


def environment() -> dict[str, Any]:
    """Where and when a run took place, and of which version."""
    installed = "from its sources"
    with contextlib.suppress(PackageNotFoundError):
        installed = version("attention-core")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **machine(),
        "attention-core": installed,
    }
