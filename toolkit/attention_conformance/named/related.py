"""Mistakes of published attentions that show what a case of the kit shows."""

from __future__ import annotations

from fnmatch import fnmatchcase

from attention_conformance.named.case import TABLES, NamedCase, named_cases


def related(case: str) -> list[NamedCase]:
    """The named cases that show the same as a case of the kit."""
    return [each for each in named_cases() if case in each.like]


def property_of(case: str, variant: str = "") -> str:
    """The property that a wrong case shows to be broken: that of the fault which its answer equals, where there is one.

    >>> property_of("shape-257x257-causal"), property_of("causal-more-keys", "no-mask")
    ('causal', 'mask')
    """
    of_fault = _matching(variant, "faults") if variant else ""
    like = related(case)
    return of_fault or (like[0].property if like else _matching(case, "cases"))


def _matching(name: str, table: str) -> str:
    rows = TABLES[table].items()
    return next((each for patterns, each in rows if any(fnmatchcase(name, p) for p in patterns.split())), "")


def seen_before(case: str, variant: str = "") -> list[NamedCase]:
    """The named cases about the property that a wrong case shows to be broken, those that show the same case first."""
    broken = property_of(case, variant)
    same = [each for each in named_cases() if each.property == broken]
    return sorted(same, key=lambda each: (case not in each.like, not each.like))
