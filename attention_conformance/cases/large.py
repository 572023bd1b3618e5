"""Cases of ``--large``: counts of heads and samples beyond 16 bits, and offsets beyond 32 bits."""

from __future__ import annotations

from dataclasses import replace

from attention_conformance.cases.case import Case, Draw
from attention_conformance.cases.kernels import attention
from attention_conformance.problem import Problem

__all__ = ["LARGE", "available_memory", "needed_memory"]

KEYS = 2100
"""Keys whose rows lie so far apart that the last begin beyond 2**31 elements."""

NARROW = ("float16", "bfloat16")


def _far(draw: Draw, name: str) -> Problem:
    return replace(attention(draw, 3, KEYS, 64, heads=1, batch=1), memory={name: "far"})


def _case(name: str, shows: str, memory: float, **more: object) -> tuple[Case, float]:
    return Case(name, 10, shows, compiled=(), **more), memory  # type: ignore[arg-type]


_CASES = (
    _case("large-heads", "65,540 heads.", 0.5, inputs=lambda d: attention(d, 1, 2, 16, heads=65540, batch=1)),
    _case("large-samples", "65,540 samples.", 0.5, inputs=lambda d: attention(d, 1, 2, 16, heads=1, batch=65540)),
    _case("large-offset-key", "Keys lie beyond 2**31 elements of a buffer.", 10.0, dtypes=NARROW,
          inputs=lambda d: _far(d, "key")),
    _case("large-offset-value", "Values lie beyond 2**31 elements of a buffer.", 10.0, dtypes=NARROW,
          inputs=lambda d: _far(d, "value")),
)  # fmt: skip
LARGE: tuple[Case, ...] = tuple(case for case, _ in _CASES)
"""Large cases, for subjects; they run when they are asked for."""


def needed_memory() -> float:
    """The memory that the largest of them takes, in GiB."""
    return max(memory for _, memory in _CASES)


def available_memory() -> float | None:
    """The memory that is free, in GiB; None where the system does not tell."""
    try:
        with open("/proc/meminfo") as told:
            line = next(line for line in told if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) / 2**20
