"""Kinds of calls, and those that a kernel offers and refuses throughout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from attention_conformance.measure.finding import Finding
from attention_conformance.problem import Problem

LONG = 256
"""Keys that some kernels hold in one block."""

CAUSAL, MASKED, GROUPED, GRADIENTS = "causality", "a mask or a bias", "grouped heads", "gradients"
MANY = f"more than {LONG} keys"
ADVICE = {CAUSAL: "--causal-alignment none", MASKED: "--mask-kind none", GROUPED: "--no-grouped"}
"""The option that declares a kind away."""

NAMES = {
    CAUSAL: "refused-causality",
    MASKED: "refused-masks",
    GROUPED: "refused-grouped-heads",
    GRADIENTS: "refused-gradients",
    MANY: "refused-many-keys",
    **{dtype: f"refused-{dtype}" for dtype in ("float16", "bfloat16", "float32", "float64")},
}
"""What `accepted` calls a kind that is refused throughout."""

NOT_CALLED = ("not offered", "refused", "crashed", "timed out")


def kinds_of(problem: Problem, dtype: str, several: bool = False) -> tuple[str, ...]:
    """What a fitted problem asks of a kernel; of several calls, what they have in common."""
    _, heads, _, columns = problem.sizes
    asked = {
        CAUSAL: not several and bool(problem.options.get("is_causal")),
        MASKED: not several and (problem.mask is not None or "bias" in problem.arrays),
        GROUPED: not several and problem.arrays["key"].shape[-3] != heads,
        GRADIENTS: problem.cotangent is not None,
        MANY: columns > LONG,
        dtype: True,
    }
    return tuple(kind for kind, each in asked.items() if each)


def never_computed(results: Sequence[Finding]) -> list[Finding]:
    """A result for each kind of call that is offered, and refused in every case."""
    computed = {kind for each in results if each.verdict not in NOT_CALLED for kind in each.kinds}
    refused = Counter(kind for each in results if each.verdict == "refused" for kind in each.kinds)
    findings = []
    if not computed:  # of any kind, as the summary says
        return []
    for kind, name in NAMES.items():
        if not refused[kind] or kind in computed:
            continue
        reasons = Counter(each.detail for each in results if each.verdict == "refused" and kind in each.kinds)
        says = f"all {refused[kind]} cases with {kind} raise, so nothing is known of them"
        ways = " or ".join(filter(None, (ADVICE.get(kind), f"--accept {name}")))
        detail = f"{reasons.most_common(1)[0][0]}; mend it, or say that it is meant by {ways}"
        blank = Finding(
            f"kind: {kind}", "-", 0, "Some case of each kind that is offered is computed.", "never computed"
        )
        findings.append(replace(blank, detail=detail, variant=name, says=says))
    return findings
