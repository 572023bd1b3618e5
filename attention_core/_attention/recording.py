"""The calls of attention that are being recorded, for those who look at weights."""

from __future__ import annotations

from collections.abc import Callable

from attention_core._attention.call import Call
from attention_core._backend import is_concrete

RECORDERS: list[Callable[[Call], None]] = []
"""Functions that are given every call; none unless something records."""


def record(call: Call) -> None:
    """Give a call to all that record.

    Raises
    ------
    ValueError
        When the call is traced: its arrays have no values, and are gone when the program runs.
    """
    if not all(map(is_concrete, (call.query, call.key))):
        raise ValueError("expected eager calls while attention is recorded; got one that is traced or compiled")
    for give in RECORDERS:
        give(call)
