"""Mistakes of published attentions that show what a case of the kit shows."""

from __future__ import annotations

import fnmatch

from attention_conformance.named.case import NamedCase, named_cases

PROPERTIES_OF_FAULTS = {
    "bottom-right-causal": "causal",
    "top-left-causal": "causal",
    "nan-through-mask": "masked non-finite",
    "nan-spreads": "masked non-finite",
    "attended-nonfinite": "attended non-finite",
    "narrow-scores": "precision",
    "float64-in-float32": "precision",
    "tf32": "precision",
    "*-of-masked-row": "fully masked row",
    "*softcap*": "softcap",
    "*sink*": "sinks",
    "lowest-bias-*": "fully masked row",
    "*bias*": "score function",
    "*scale*": "scale",
    "window-*": "window",
    "*-mask": "mask",
    "mask-*": "mask",
    "*causal*": "causal",
    "future-key*": "causal",
    "strict-from-*": "causal",
    "heads-in-turn": "grouped heads",
    "*-head*": "grouped heads",
    "*-lost": "sizes",
    "*stale-*": "range",
    "logsumexp-*": "weights",
    "gradient-*": "gradient",
    "strides-*": "memory layout",
}
"""Patterns of conventions and faults, and the property that each breaks; the first that matches counts."""

PROPERTIES_OF_CASES = {
    "*memory-is-freed": "repetition",
    "*same-memory": "repetition",
    "*after-other-*": "repetition",
    "after-*": "repetition",
    "as-the-first-call": "repetition",
    "*twice*": "repetition",
    "results-are-kept": "repetition",
    "sample-alone": "repetition",
    "batch-invariance*": "repetition",
    "large-*-among-others": "repetition",
    "*memory-*": "memory layout",
    "gradient-memory": "memory layout",
    "dropout*": "dropout",
    "gradient-dropout": "dropout",
    "*softcap*": "softcap",
    "*sink*": "sinks",
    "*empty*": "fully masked row",
    "*lowest-*bias": "fully masked row",
    "*masked-*": "masked non-finite",
    "*padding*": "masked non-finite",
    "*-nan-cache": "masked non-finite",
    "nan-*": "attended non-finite",
    "attended-*": "attended non-finite",
    "*decod*": "decode",
    "*cache*": "decode",
    "*grouped*": "grouped heads",
    "one-key-head*": "grouped heads",
    "*scale*": "scale",
    "*score-*": "score function",
    "alibi*": "score function",
    "*relative-bias": "score function",
    "*window*": "window",
    "gradient*": "gradient",
    "mask*-and-*": "combined rules",
    "masks-combined": "combined rules",
    "*causal*": "causal",
    "merged-pieces": "weights",
    "weights*": "weights",
    "*mask*": "mask",
    "*lengths": "mask",
    "*bias*": "mask",
    "segments": "mask",
    "band-*": "mask",
    "first-block-*": "range",
    "*-scores*": "range",
    "scores-*": "range",
    "[0-9][0-9]-*": "range",
    "average-*": "precision",
    "dtype-*": "precision",
    "*": "sizes",
}
"""The same for cases of the kit."""


def related(case: str) -> list[NamedCase]:
    """The named cases that show the same as a case of the kit."""
    return [each for each in named_cases() if case in each.like]


def property_of(case: str, variant: str = "") -> str:
    """The property that a wrong case shows to be broken: that of the fault which its answer equals, where there is one.

    >>> property_of("ladder-257x32-causal"), property_of("grouped-65", "no-mask")
    ('causal', 'mask')
    """
    told = _matching(variant, PROPERTIES_OF_FAULTS) if variant else ""
    like = related(case)
    return told or (like[0].property if like else _matching(case, PROPERTIES_OF_CASES))


def _matching(name: str, properties: dict[str, str]) -> str:
    return next((each for pattern, each in properties.items() if fnmatch.fnmatchcase(name, pattern)), "")


def seen_before(case: str, variant: str = "") -> list[NamedCase]:
    """The named cases about the property that a wrong case shows to be broken, those that show the same case first."""
    broken = property_of(case, variant)
    same = [each for each in named_cases() if each.property == broken]
    return sorted(same, key=lambda each: (case not in each.like, not each.like))
