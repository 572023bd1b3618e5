"""The published hashes of the cases of `identical`; ``python -m attention_conformance.hashes`` prints them anew.

They stand in ``hashes.json`` next to this file, and those of models in ``models.json``, by the SHA-256 of their
weights. Results are computed by NumPy, and gradients by the backend that is named as an argument, by default the first
installed that differentiates. With the directory of an encoder, or a GGUF file, in place of a backend, its entries
alone are printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from attention_conformance.golden.cases import IDENTICAL
from attention_conformance.golden.identical import computed, digest
from attention_conformance.own.identical import Identical
from attention_conformance.own.language_model import LanguageModel
from attention_conformance.own.model import load_model, model_cases
from attention_core.backend import available_backends, get_backend


def published() -> dict[str, str | None]:
    """Read the SHA-256 of every case."""
    return _read("hashes.json")


def published_model(path: Path | None, *, long: bool = False) -> dict[str, str | None]:
    """Read the SHA-256 of the cases of a model: `None` if its weights are not known."""
    if path is None:
        return {}
    known = _read("models.json").get(_name(path, long))
    return {case.name: known for case in model_cases(path, long=long)}


def _name(path: Path, long: bool) -> str:
    """The SHA-256 of the weights, by which a model is published."""
    model = load_model(path)
    return f"{model.sha256}{' long' * (long and isinstance(model, LanguageModel))}"


def _read(name: str) -> dict[str, str | None]:
    hashes: dict[str, str | None] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return hashes


def _sha256(case: Identical, differentiating: str) -> str:
    backend = get_backend(differentiating if case.variables else "numpy")
    return digest(computed(case, backend, backend.devices()[0], "eager"))


def _anew(argument: str) -> dict[str, str]:
    path = Path(argument)
    if path.exists():
        is_file = path.is_file()
        return {_name(path, long): _sha256(model_cases(path, long=long)[0], "numpy") for long in {False, is_file}}
    return {case.name: _sha256(case, argument) for case in IDENTICAL}


if __name__ == "__main__":
    named = sys.argv[1:] or [name for name in available_backends() if get_backend(name).differentiates]
    print(json.dumps(_anew(named[0]), indent=1))
