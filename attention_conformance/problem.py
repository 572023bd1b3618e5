"""One attention problem in plain NumPy arrays: what a backend is given, and what the oracle answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

__all__ = ["DTYPES", "NumpyArray", "Problem", "Rule", "Seed", "array", "rounded"]

NumpyArray: TypeAlias = np.ndarray[Any, Any]

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""The floating-point types of the contract, narrow ones first."""


@dataclass(frozen=True)
class Seed:
    """Dropout as the contract gives it: a rate and an integer seed of at most 64 bits."""

    rate: float
    seed: int


@dataclass(frozen=True)
class Rule:
    """A structured mask, by the name of its kind, or a combination of masks.

    Attributes
    ----------
    kind : str
        ``Causal``, ``SlidingWindow``, ``KeyLengths``, ``Segments``; ``array`` for a boolean array; ``and``, ``or``,
        ``not``.
    arguments : mapping
        Numbers, or names of arrays of the problem; for a combination its parts, named ``first`` (a structured mask) and
        ``second``.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __and__(self, other: Rule) -> Rule:
        return Rule("and", {"first": self, "second": other})

    def __or__(self, other: Rule) -> Rule:
        return Rule("or", {"first": self, "second": other})

    def __invert__(self) -> Rule:
        return Rule("not", {"first": self})


def array(name: str) -> Rule:
    """Name a boolean array of the problem as a mask."""
    return Rule("array", {"name": name})


@dataclass(frozen=True)
class Problem:
    """The arrays and options of one call.

    Attributes
    ----------
    arrays : mapping of str to numpy.ndarray
        ``query``, ``key``, ``value``, and what else the call needs: ``bias``, and the arrays that the mask names.
    mask : Rule, optional
    options : mapping
        The options that are no arrays: ``is_causal``, ``scale``, ``softcap``, ``return_weights``, ``return_logsumexp``,
        and ``dropout`` as a `Seed`.
    cotangent : numpy.ndarray, optional
        The gradient of the loss in the output, for cases about gradients.
    """

    arrays: Mapping[str, NumpyArray]
    mask: Rule | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    cotangent: NumpyArray | None = None

    @property
    def sizes(self) -> tuple[tuple[int, ...], int, int, int]:
        """The leading axes, the number of query heads, the query length and the key length."""
        *leading, heads, rows, _ = self.arrays["query"].shape
        return tuple(leading), heads, rows, self.arrays["key"].shape[-2]


def rounded(numbers: Any, dtype: str) -> NumpyArray:
    """Round numbers to a floating-point type by name, bfloat16 included."""
    return np.asarray(numbers, dtype=np.float64).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
