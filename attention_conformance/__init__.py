"""The conformance kit: by how many units in the last place does an attention miss its definition.

`check` runs the catalogue of cases against any callable with the signature of
`attention_core.scaled_dot_product_attention`; the command ``attention-core conformance`` runs it against the core on
every backend. The kit needs NumPy and ml_dtypes; only the command needs the libraries of the extra ``cli``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_conformance.cases import CASES
    from attention_conformance.cases.case import Case
    from attention_conformance.run.digest import digest
    from attention_conformance.run.identical import Verdict
    from attention_conformance.run.result import Result
    from attention_conformance.run.runner import check

__all__ = ["CASES", "Case", "Result", "Verdict", "check", "digest"]

_HOMES = {
    "CASES": "cases",
    "Case": "cases.case",
    "Result": "run.result",
    "Verdict": "run.identical",
    "check": "run.runner",
    "digest": "run.digest",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for, so that the command can start, and complain, without NumPy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
