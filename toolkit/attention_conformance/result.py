"""What comes of running a case in one way."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Result", "one_line"]


@dataclass(frozen=True)
class Result:
    """What came of a trial.

    Attributes
    ----------
    case, backend, device, dtype, mode : str
    implementation : str
        As it was named in the call; empty where none was.
    measure : str
        ``ulp`` (units in the last place), ``exact`` (numbers that differ) or ``message`` (1 for a wrong error).
    error, bound : float
        In the unit of the measure; the error is infinite where an exception, a shape or a nan was not to be.
    passed : bool or None
        ``None`` where the trial was not run, is exempt, or was refused.
    detail : str
        Where the worst error is; what went wrong; why it was not run.
    seconds : float
    values : tuple of float
        What else is to be shown: the cosines that a model finds.
    refused : bool
        Whether the implementation does not take the call, and said so; ``detail`` is what it said.
    """

    case: str
    backend: str
    device: str
    dtype: str
    mode: str
    implementation: str
    measure: str
    error: float
    bound: float
    passed: bool | None
    detail: str
    seconds: float
    values: tuple[float, ...] = ()
    refused: bool = False


def one_line(error: BaseException) -> str:
    """An exception as a line of text."""
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").strip()[:500]
