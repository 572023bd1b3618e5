"""Profiles: how near a kernel must come to the definition."""

from __future__ import annotations

from attention_conformance.cases.case import Case, probability

PROFILES = ("exact", "kernel", "tf32")
"""``exact``: the bounds of the core. ``kernel``: weights of 16 bits. ``tf32``: products of 11 bits."""

HAZARDS = ("06-subnormal-values", "08-underflow-times-huge", "12-product-overflows", "14-largest-values")
"""Numbers at the ends of a type's range, which only ``exact`` asks for."""


MOST = 2.0**17
"""Units in float32, a part in 64: a larger bound would show nothing, as where all scores are the lowest number."""

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def of_narrow_weights(profile: str, dtype: str) -> float:
    r"""Add to the bound of a logsumexp what the rounding of weights to 16 bits costs, in units of float32.

    A sum of such weights is off by a factor within :math:`1 \pm u`, and its logarithm by `u`, whatever the scores are.
    """
    return 2.0**23 * ROUNDOFF.get(dtype, 0.0) if profile == "kernel" else 0.0


def bound_for(profile: str, case: Case, name: str, dtype: str, kappa: float) -> float:
    r"""Bound the error of a result by a profile, in units in the last place.

    * ``exact``: the bound of the case.
    * ``kernel``, 16 bits: 2 units, and 4 for gradients, as weights and gradients of scores are rounded to 16 bits.
    * ``kernel``, float32: 12 units, twice the bound of the case, or :math:`5 (1 + \kappa)`, and
      :math:`10 (1 + \kappa)` for gradients: scores are rounded several times. 3.3 and 5.2 kappa were seen.
    * ``tf32``: float32 has products of 11 bits, which costs :math:`2^{12} (1 + \kappa)` units.
    """
    stated = (probability if name == "weights" else case.bound)(dtype, kappa)
    if profile == "exact":
        return stated
    is_gradient = case.measure == "gradient"
    if dtype in ROUNDOFF:
        return max(4.0 if is_gradient else 2.0, 2 * stated)
    if dtype != "float32":
        return 2 * stated
    if profile == "tf32":
        return 2.0**12 * (1 + kappa)
    roundings = (10 if is_gradient else 5) * (1 + kappa)
    return max(12.0, 2 * stated, min(roundings, MOST))


def is_asked(profile: str, case: Case) -> bool:
    """Whether a profile asks for a case at all."""
    return profile == "exact" or case.name not in HAZARDS
