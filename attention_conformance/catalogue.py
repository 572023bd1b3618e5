"""All cases, in the order of the table."""

from __future__ import annotations

from attention_conformance.case import Case
from attention_conformance.contract import CONTRACT
from attention_conformance.differentiated import DIFFERENTIATED
from attention_conformance.hard import HARD
from attention_conformance.wrong import WRONG

__all__ = ["CASES"]

CASES: tuple[Case, ...] = (*CONTRACT, *WRONG, *HARD, *DIFFERENTIATED)
