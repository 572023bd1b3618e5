"""Mistakes of published attentions that show what a case of the kit shows."""

from __future__ import annotations

from attention_conformance.named.case import NamedCase
from attention_conformance.named.catalogue import named_cases

__all__ = ["related"]


def related(case: str) -> list[NamedCase]:
    """The named cases of the same property as a case of the kit."""
    return [each for each in named_cases() if case in each.like]
