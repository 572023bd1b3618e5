"""What comes of one case on a subject: a verdict, the measured error, and what the wrong answer equals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["VERDICTS", "WRONG", "Finding", "counted", "exit_status", "finding_from", "to_row"]

VERDICTS = (
    "silently wrong",
    "visibly wrong",
    "crashed",
    "timed out",
    "differs by convention",
    "refused",
    "not offered",
    "accepted",
    "right",
)
"""All verdicts, the worst first."""

WRONG = ("silently wrong", "visibly wrong")


@dataclass(frozen=True)
class Finding:
    """What came of one case in one dtype.

    Attributes
    ----------
    case, dtype : str
    line : int
        The line of the contract that the case shows.
    shows : str
        The sentence of the case.
    verdict : str
        One of `VERDICTS`. *Silently wrong*: finite numbers that are not the answer. *Visibly wrong*: NaN or infinity
        instead of a number, or a wrong shape or dtype. *Refused*: an exception before there was a result.
    error, bound : float
        In units in the last place of the scale.
    detail : str
        Where the worst error is, or what was raised.
    variant : str
        The name of the convention or fault that the result equals; empty where there is none.
    says : str
        That convention or fault in words.
    rejected : tuple of str
        The planted faults of the definition that this bound rejects on this problem.
    planted : tuple of str
        The faults that were planted, as they apply to this problem.
    seconds : float
    traceback : str
    seed : int
    """

    case: str
    dtype: str
    line: int
    shows: str
    verdict: str
    error: float = math.nan
    bound: float = math.nan
    detail: str = ""
    variant: str = ""
    says: str = ""
    rejected: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()
    seconds: float = 0.0
    traceback: str = ""
    seed: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether faults were planted, and none was rejected."""
        return bool(self.planted) and not self.rejected


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 3 if a case crashed or timed out, 1 if one is wrong or none is right, and 0 otherwise."""
    verdicts = {each.verdict for each in findings}
    if verdicts & {"crashed", "timed out"}:
        return 3
    return int(bool(verdicts & {*WRONG, "differs by convention"}) or not verdicts & {"right", "accepted"})


def to_row(finding: Finding) -> dict[str, Any]:
    """A finding as JSON takes it: infinity as text, and NaN as null."""
    return {name: _plain(each) for name, each in dataclasses.asdict(finding).items()}


def _plain(each: Any) -> Any:
    if not isinstance(each, float) or math.isfinite(each):
        return each
    return None if math.isnan(each) else "inf"


def finding_from(row: dict[str, Any]) -> Finding:
    """A finding from what JSON held."""
    numbers = {name: math.nan if row[name] is None else float(row[name]) for name in ("error", "bound", "seconds")}
    return Finding(**{**row, **numbers, "rejected": tuple(row["rejected"]), "planted": tuple(row["planted"])})


def counted(findings: Iterable[Finding]) -> dict[str, int]:
    """How many findings have each verdict, the worst first."""
    counts = dict.fromkeys(VERDICTS, 0)
    for each in findings:
        counts[each.verdict] += 1
    return {verdict: count for verdict, count in counts.items() if count}
