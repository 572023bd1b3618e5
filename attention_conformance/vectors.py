"""The published hashes of the cases of `identical_cases`; ``python -m attention_conformance.vectors`` prints them anew.

They stand in ``vectors.json`` beside this file. Results are computed by NumPy, and gradients by the backend that is
named as an argument, by default the first installed that differentiates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from attention_conformance.identical import computed, digest
from attention_conformance.identical_cases import IDENTICAL, Identical
from attention_core import available_backends, get_backend

__all__ = ["published"]


def published() -> dict[str, str]:
    """Read the SHA-256 of every case."""
    hashes: dict[str, str] = json.loads(Path(__file__).with_name("vectors.json").read_text(encoding="utf-8"))
    return hashes


def _sha256(case: Identical, differentiating: str) -> str:
    backend = get_backend(differentiating if case.variables else "numpy")
    return digest(computed(case, backend, backend.devices()[0], "eager"))


if __name__ == "__main__":
    named = sys.argv[1:] or [name for name in available_backends() if get_backend(name).differentiates]
    print(json.dumps({case.name: _sha256(case, named[0]) for case in IDENTICAL}, indent=1))
