"""What another run found of the same cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attention_conformance.run.finding import QUIET, VERDICTS, Finding


@dataclass(frozen=True)
class Change:
    """A case with another verdict than in a former run, which is empty where it was not run then.

    Attributes
    ----------
    case, dtype : str
    before, after : str
    """

    case: str
    dtype: str
    before: str
    after: str

    @property
    def says(self) -> str:
        """Whether it is new, mended, or another change."""
        if self.after not in QUIET:
            return "wrong in another way" if self.before and self.before not in QUIET else "newly wrong"
        return "mended" if self.after in ("right", "accepted") and self.before not in ("", *QUIET) else "changed"


def changes(before: Sequence[Finding], after: Sequence[Finding]) -> list[Change]:
    """The cases of the second run with other verdicts than in the first, the worst first."""
    old = {(each.case, each.dtype): each.verdict for each in before}
    new = {(each.case, each.dtype): each.verdict for each in after}
    found = [Change(*name, old.get(name, ""), verdict) for name, verdict in new.items()]
    return sorted((each for each in found if each.before != each.after), key=lambda each: VERDICTS.index(each.after))
