"""Known deviations, each with its reason: such a result is shown, and neither passes nor fails."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EXEMPTIONS", "Exemption", "exemption"]


@dataclass(frozen=True)
class Exemption:
    """A case that some backends are known to miss in some dtypes, perhaps by one implementation alone."""

    case: str
    backends: tuple[str, ...]
    dtypes: tuple[str, ...]
    reason: str
    implementation: str = ""


FLUSHED = "XLA and TensorFlow set subnormal numbers to 0 on a CPU"

EXEMPTIONS = (
    Exemption("06-subnormal-values", ("jax", "tensorflow"), ("bfloat16", "float32", "float64"), FLUSHED),
    Exemption("08-underflow-times-huge", ("jax", "tensorflow"), ("bfloat16", "float32", "float64"), FLUSHED),
    Exemption(
        "08-underflow-times-huge",
        ("torch",),
        ("bfloat16", "float32", "float64"),
        "PyTorch's kernel for CPUs sets subnormal weights to 0",
        "fused",
    ),
)


def exemption(case: str, backend: str, dtype: str, implementation: str) -> str:
    """Why this result may pass its bound; empty where it may not."""
    for entry in EXEMPTIONS:
        is_meant = entry.case == case and backend in entry.backends and dtype in entry.dtypes
        if is_meant and implementation.startswith(entry.implementation):
            return entry.reason
    return ""
