"""Mistakes of published attentions that show what a case of the kit shows."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from attention_conformance.named.case import NamedCase, named_cases

FAULTS = (
    ("causal", "bottom-right-causal top-left-causal"),
    ("masked non-finite", "nan-through-mask nan-spreads"),
    ("attended non-finite", "attended-nonfinite"),
    ("precision", "narrow-scores float64-in-float32 tf32"),
    ("fully masked row", "*-of-masked-row"),
    ("softcap", "*softcap*"),
    ("sinks", "*sink*"),
    ("fully masked row", "lowest-bias-*"),
    ("score function", "*bias*"),
    ("scale", "*scale*"),
    ("window", "window-*"),
    ("mask", "*-mask mask-*"),
    ("causal", "*causal* future-key* strict-from-*"),
    ("grouped heads", "heads-in-turn *-head*"),
    ("sizes", "*-lost"),
    ("range", "*stale-*"),
    ("weights", "logsumexp-*"),
    ("gradient", "gradient-*"),
    ("memory layout", "strides-*"),
)
"""Properties, and patterns of the conventions and faults that break them; the first pattern that matches counts."""

CASES = (
    (
        "repetition",
        "*memory-is-freed after-* as-the-first-call *twice* shape-*-again shape-*-rewritten",
    ),
    ("repetition", "shape-*-parts batch-invariance* large-*-among-others"),
    (
        "memory layout",
        "*memory-* shape-*-permuted* shape-*-part* shape-*-expanded* shape-*-shared* shape-*-strided* shape-*-offset*",
    ),
    ("dropout", "dropout* gradient-dropout"),
    ("softcap", "*softcap*"),
    ("sinks", "*sink*"),
    ("fully masked row", "*empty* *lowest-*bias"),
    ("masked non-finite", "*masked-* *padding* *-nan-cache"),
    ("attended non-finite", "nan-* attended-*"),
    ("decode", "*decod* *cache*"),
    ("grouped heads", "*grouped* one-key-head*"),
    ("scale", "*scale*"),
    ("score function", "*score-* alibi* *relative-bias"),
    ("window", "*window*"),
    ("gradient", "gradient* shape-*-gradient"),
    ("combined rules", "mask*-and-* masks-combined"),
    ("causal", "*causal*"),
    ("weights", "merged-pieces weights*"),
    ("mask", "*mask* *lengths *bias* segments band-*"),
    ("range", "first-block-* *-scores* scores-* [0-9][0-9]-*"),
    ("precision", "average-* dtype-*"),
    ("sizes", "*"),
)
"""The same for cases of the kit."""


def related(case: str) -> list[NamedCase]:
    """The named cases that show the same as a case of the kit."""
    return [each for each in named_cases() if case in each.like]


def property_of(case: str, variant: str = "") -> str:
    """The property that a wrong case shows to be broken: that of the fault which its answer equals, where there is one.

    >>> property_of("shape-257x257-causal"), property_of("causal-more-keys", "no-mask")
    ('causal', 'mask')
    """
    told = _matching(variant, FAULTS) if variant else ""
    like = related(case)
    return told or (like[0].property if like else _matching(case, CASES))


def _matching(name: str, properties: Sequence[tuple[str, str]]) -> str:
    return next((each for each, patterns in properties if any(fnmatchcase(name, p) for p in patterns.split())), "")


def seen_before(case: str, variant: str = "") -> list[NamedCase]:
    """The named cases about the property that a wrong case shows to be broken, those that show the same case first."""
    broken = property_of(case, variant)
    same = [each for each in named_cases() if each.property == broken]
    return sorted(same, key=lambda each: (case not in each.like, not each.like))
