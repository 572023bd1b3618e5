"""How two models differ, in words."""

from __future__ import annotations

from attention_conformance.port.comparison import Comparison


def verdict(found: Comparison) -> list[str]:
    """Where two models part, and why, in a line or more."""
    if found.first is None:
        worst = max(found.places, key=lambda each: each.ulps / each.bound)
        nearest = f"nearest to it is {worst.name}, by {worst.ulps:.3g} ulp of {worst.bound:.3g}"
        return [f"all {len(found.places)} activations are within the bound; {nearest}"]
    first = found.first
    lines = [f"first to leave the bound: {first.name}, by {first.ulps:.3g} ulp of {first.bound:.3g}", first.says]
    lines += [f"cause: {each.name}: {each.says}" for each in found.causes]
    return lines if found.causes else [*lines, "cause: none of those that were tried"]
