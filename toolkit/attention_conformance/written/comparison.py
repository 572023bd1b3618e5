"""How two models differ, in words."""

from __future__ import annotations

from attention_conformance.port.comparison import Comparison


def verdict(comparison: Comparison) -> list[str]:
    """Where two models differ, and why, in a line or more."""
    if comparison.first is None:
        worst = max(comparison.places, key=lambda each: each.ulps / each.bound)
        nearest = f"nearest to it is {worst.name}, by {worst.ulps:.3g} ulp of {worst.bound:.3g}"
        return [f"all {len(comparison.places)} activations are within the bound; {nearest}"]
    first = comparison.first
    lines = [f"first to leave the bound: {first.name}, by {first.ulps:.3g} ulp of {first.bound:.3g}", first.says]
    lines += [f"cause: {each.name}: {each.says}" for each in comparison.causes]
    return lines if comparison.causes else [*lines, "cause: none of those that were tried"]
