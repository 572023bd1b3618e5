"""The published hashes of the cases of `identical`; ``python -m attention_conformance.vectors`` prints them anew.

They stand in ``vectors.json`` next to this file, and that of an encoder in ``models.json``, by the SHA-256 of its
weights. Results are computed by NumPy, and gradients by the backend that is named as an argument, by default the first
installed that differentiates. With the directory of an encoder in place of a backend, its entry alone is printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from attention_conformance.cases.identical import IDENTICAL, Identical
from attention_conformance.run.identical import computed, digest
from attention_conformance.run.model import identical_case, load_model
from attention_core import available_backends, get_backend

__all__ = ["published", "published_model"]


def published() -> dict[str, str | None]:
    """Read the SHA-256 of every case."""
    return _read("vectors.json")


def published_model(directory: Path | None) -> dict[str, str | None]:
    """Read the SHA-256 of the case of an encoder: `None` if its weights are not known."""
    return {} if directory is None else {"model": _read("models.json").get(load_model(directory).sha256)}


def _read(name: str) -> dict[str, str | None]:
    hashes: dict[str, str | None] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return hashes


def _sha256(case: Identical, differentiating: str) -> str:
    backend = get_backend(differentiating if case.variables else "numpy")
    return digest(computed(case, backend, backend.devices()[0], "eager"))


def _anew(argument: str) -> dict[str, str]:
    if Path(argument).is_dir():
        model = load_model(Path(argument))
        return {model.sha256: _sha256(identical_case(model), "numpy")}
    return {case.name: _sha256(case, argument) for case in IDENTICAL}


if __name__ == "__main__":
    named = sys.argv[1:] or [name for name in available_backends() if get_backend(name).differentiates]
    print(json.dumps(_anew(named[0]), indent=1))
