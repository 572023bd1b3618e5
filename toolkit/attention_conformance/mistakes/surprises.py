"""Conventions of a kernel that calls have found, and that the contract has otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attention_conformance.cases.contract import LINES
from attention_conformance.kernel.options import OPTION_OF
from attention_conformance.measure.finding import Finding

USUAL: dict[str, tuple[Any, ...]] = {
    "mask": ("keep", "integer", "additive", "none"),
    "causal": ("top-left", "none"),
    "default_scale": ("sqrt",),
    "keeps_dtype": (True,),
    "keeps_library": (True,),
}
"""What the contract says; other answers, found by a call, are differences of convention."""

SURPRISES = {
    "parameters": (0, "unknown-parameters", "left at their defaults; --keyword may tell what they are"),
    "mask": (1, "inverted-mask", "True hides a key"),
    "causal": (3, "bottom-right-causal", "causality counts from the last query and the last key"),
    "always": (3, "always-causal", "causality is applied unasked"),
    "keeps_dtype": (8, "other-dtype", "the output has another dtype than the query"),
    "keeps_library": (8, "other-kind", "the output is an array of NumPy, and not of the library of the query"),
    "default_scale": (7, "no-scale", "the scores are not scaled by default"),
}


def surprises(facts: Mapping[str, Any], declared: Iterable[str]) -> list[Finding]:
    """Conventions that calls have found, and that the contract has otherwise, as results."""
    findings = []
    refused = [facts["mask_name"]] if facts.get("mask") == "none" and facts.get("mask_name") else []
    if unknown := [*facts.get("unknown", ()), *(refused if "mask" not in declared else ())]:
        shows = "Every parameter is understood."
        _, variant, says = SURPRISES["parameters"]
        row = ("probe: parameters", "-", 0, shows, "not understood")
        findings.append(Finding(*row, detail=", ".join(unknown), variant=variant, says=says))
    for name, usual in USUAL.items():
        if name in facts and name not in declared and facts[name] not in usual:
            number, variant, says = SURPRISES["always" if facts[name] == "always" else name]
            verdict = "visibly wrong" if name == "keeps_dtype" else "differs by convention"
            detail = f"declare it with --{OPTION_OF[name]} {facts[name]}" if name in OPTION_OF else ""
            names = (f"probe: {name}", "-", number, f"{LINES[number]}.")
            findings.append(Finding(*names, verdict=verdict, detail=detail, variant=variant, says=says))
    return findings
