"""The conformance kit: by how many units in the last place does an attention miss its definition.

`check_subject` checks anybody's attention, which a `Subject` describes. `check` runs the catalogue of cases against any
callable with the signature of `attention_core.scaled_dot_product_attention`. The commands ``attention-core check`` and
``attention-core conformance`` run them in processes. The kit needs NumPy and ml_dtypes; only the commands need the
libraries of the extra ``cli``.

Its rooms import downward only, each in this order:

* ``written``: reports; ``run``: a run over the cases, for anybody's kernel.
* ``golden``: golden hashes of reproducible arithmetic; ``own``: the backends of this project, and models.
* ``bits``: two kernels to the last bit; ``verdict``: whether a kernel is right; ``mistakes``: which mistake it makes.
* ``measure``: what a case asks, and how far results are from the truth; ``port``: two models, place by place.
* ``kernel``: what a kernel expects; ``launch``: how it is called.
* ``cases``: the catalogue; ``named``: mistakes of others; ``oracle``: the truth.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_conformance.cases import CASES as CASES
    from attention_conformance.cases.case import Case as Case
    from attention_conformance.golden.digest import digest as digest
    from attention_conformance.golden.identical import Verdict as Verdict
    from attention_conformance.kernel.target import load_target as load_target
    from attention_conformance.launch.subject import Subject as Subject
    from attention_conformance.measure.finding import Finding as Finding
    from attention_conformance.own.runner import check as check
    from attention_conformance.port.comparison import Comparison as Comparison, compare as compare
    from attention_conformance.run.again import problem_of as problem_of
    from attention_conformance.run.kernels import check_subject as check_subject
    from attention_conformance.same_call import check_same_call as check_same_call
    from attention_conformance.sharded import check_sharded as check_sharded

_HOMES = {
    "CASES": "cases",
    "Case": "cases.case",
    "Comparison": "port.comparison",
    "Finding": "measure.finding",
    "Subject": "launch.subject",
    "Verdict": "golden.identical",
    "check": "own.runner",
    "check_same_call": "same_call",
    "check_sharded": "sharded",
    "check_subject": "run.kernels",
    "compare": "port.comparison",
    "digest": "golden.digest",
    "load_target": "kernel.target",
    "problem_of": "run.again",
}


__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for, so that the command can start, and complain, without NumPy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
