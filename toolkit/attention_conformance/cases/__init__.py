"""All cases, in the order of the table."""

from __future__ import annotations

from attention_conformance.cases.batch import BATCH
from attention_conformance.cases.case import Case
from attention_conformance.cases.contract import CONTRACT, DIFFERENTIATED
from attention_conformance.cases.hard import HARD

__all__ = ["CASES"]

CASES: tuple[Case, ...] = (*CONTRACT, *BATCH, *HARD, *DIFFERENTIATED)
