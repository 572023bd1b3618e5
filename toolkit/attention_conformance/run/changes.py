"""What another run found of the same cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attention_conformance.run.experiments import is_exact
from attention_conformance.run.finding import QUIET, VERDICTS, Finding

AGAIN = 2.0
"""How much larger an error without a name may be than it was, and be the same."""


@dataclass(frozen=True)
class Change:
    """A case with another verdict, cause, or error without a cause than in a former run.

    Attributes
    ----------
    case, dtype : str
    before, after : str
        The verdict, with the cause or the error of a wrong answer; empty where it was not run then.
    says : str
        Whether it is new, mended, or another change.
    """

    case: str
    dtype: str
    before: str
    after: str
    says: str


def changes(before: Sequence[Finding], after: Sequence[Finding]) -> list[Change]:
    """The cases of the second run with other verdicts or causes than in the first, the worst first."""
    old = {(each.case, each.dtype): each for each in before}
    pairs = [(old.get((each.case, each.dtype)), each) for each in after]
    found = [
        pair
        for pair in pairs
        if pair[0] is None or not is_same(pair[1], pair[0].verdict, pair[0].variant, pair[0].error)
    ]
    return [
        Change(now.case, now.dtype, "" if then is None else _told(then), _told(now), _says(then, now))
        for then, now in sorted(found, key=lambda pair: VERDICTS.index(pair[1].verdict))
    ]


def is_same(finding: Finding, verdict: str, variant: str, error: float) -> bool:
    """Whether a finding has this verdict and cause, and at most twice this error unless the cause is exact."""
    if finding.verdict != verdict or finding.verdict in ("right", "refused", "not offered"):
        return finding.verdict == verdict
    if is_exact(variant):
        return variant in (finding.variant, *finding.equals)
    return variant == finding.variant and not finding.error > AGAIN * error


def _told(finding: Finding) -> str:
    cause = finding.variant or (f"{finding.error:.3g} ulp" if 0 < finding.error < float("inf") else "")
    return f"{finding.verdict} ({cause})" if cause and finding.verdict != "right" else finding.verdict


def _says(then: Finding | None, now: Finding) -> str:
    was_wrong = then is not None and then.verdict not in QUIET
    if now.verdict not in QUIET:
        return "wrong in another way" if was_wrong else "newly wrong"
    return "mended" if now.verdict == "right" and was_wrong else "changed"
