"""The calls of attention that are being recorded, for those who look at weights."""

from __future__ import annotations

import threading
from collections.abc import Callable

from attention_core._attention.call import Call
from attention_core._backend import is_concrete


class Recorders(threading.local):
    """Functions that are given every call of this thread; none unless something records."""

    def __init__(self) -> None:
        self.all: list[Callable[[Call], None]] = []


RECORDERS = Recorders()


def record(call: Call) -> None:
    """Give a call to all that record.

    Raises
    ------
    ValueError
        When the call is traced: its arrays have no values, and are gone when the program runs.
    """
    if not all(map(is_concrete, (call.query, call.key))):
        raise ValueError("expected eager calls while attention is recorded; got one that is traced or compiled")
    for give in RECORDERS.all:
        give(call)
