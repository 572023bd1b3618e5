"""One attention problem in plain NumPy arrays: what a backend is given, and what the oracle answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

NumpyArray: TypeAlias = np.ndarray[Any, Any]

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""The floating-point types of the contract, narrow ones first."""

NARROW, WIDE = DTYPES[:2], DTYPES[2:]
"""Those of 16 bits, and the others."""


@dataclass(frozen=True)
class Seed:
    """Dropout as the contract gives it: a rate and an integer seed of at most 64 bits."""

    rate: float
    seed: int


@dataclass(frozen=True)
class Rule:
    """A structured mask or a change of the scores, by the name of its kind, or a combination of masks.

    Attributes
    ----------
    kind : str
        ``Causal``, ``SlidingWindow``, ``KeyLengths``, ``Segments``, or ``periodic``, a function of positions; ``array``
        for a boolean array; ``and``, ``or``, ``not``. For scores ``alibi``, ``relative_bias``, or ``steepened``, a
        function of score and positions.
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
        ``query``, ``key``, ``value``, and what else the call needs: ``bias``, ``sinks``, and what the rules name.
    mask : Rule, optional
    options : mapping
        The options that are no arrays: ``is_causal``, ``scale``, ``softcap``, ``return_weights``, ``return_logsumexp``,
        and ``dropout`` as a `Seed`.
    cotangent : numpy.ndarray, optional
        The gradient of the loss in the output, for cases about gradients.
    score_mod : Rule, optional
    pieces : tuple
        Where the keys are to be cut, as pairs of start and stop, in the order in which the pieces are merged; all keys
        at once where there are none.
    memory : mapping of str to str
        How arrays lie in memory, by the names of `attention_conformance.strides`; contiguous by default. The
        name of another array says that they are one.
    """

    arrays: Mapping[str, NumpyArray]
    mask: Rule | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    cotangent: NumpyArray | None = None
    score_mod: Rule | None = None
    pieces: tuple[tuple[int, int], ...] = ()
    memory: Mapping[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[tuple[int, ...], int, int, int]:
        """The leading axes, the number of query heads, the query length and the key length."""
        *leading, heads, rows, _ = self.arrays["query"].shape
        return tuple(leading), heads, rows, self.arrays["key"].shape[-2]

    @property
    def variables(self) -> list[str]:
        """The arrays that gradients are asked for."""
        of_scores = self.score_mod.arguments.values() if self.score_mod else ()
        named = [name for name in of_scores if isinstance(name, str) and self.arrays[name].dtype.kind not in "iu"]
        return [name for name in ("query", "key", "value", "bias", "sinks") if name in self.arrays] + named

    def changed(self, **fields: Any) -> Problem:
        """The same with other fields."""
        return replace(self, **fields)

    def holding(self, **arrays: NumpyArray) -> Problem:
        """The same with other arrays; a mask that is among them is the mask."""
        return self.changed(arrays={**self.arrays, **arrays}, **({"mask": array("mask")} if "mask" in arrays else {}))

    def turned(self) -> Problem:
        """The same with samples, or heads, from last to first; of one alone, keys and numbers of the other sign."""
        arrays = {name: each[::-1] for name, each in self.arrays.items()}
        if self.arrays["query"].shape[0] == 1:
            arrays |= {name: -arrays[name][..., ::-1, :] for name in ("key", "value")}
        return self.changed(arrays=arrays)

    def without(self, name: str) -> Problem:
        """The same without an array."""
        arrays = {each: array for each, array in self.arrays.items() if each != name}
        return self.changed(arrays=arrays, mask=None if name == "mask" else self.mask)

    def put(self, name: str, index: Any, numbers: Any) -> Problem:
        """The same with other numbers in a part of an array."""
        return self.holding(**{name: put(self.arrays[name], index, numbers)})


def rounded(numbers: Any, dtype: str) -> NumpyArray:
    """Round numbers to a floating-point type by name, bfloat16 included."""
    return np.asarray(numbers, dtype=np.float64).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def put(array: NumpyArray, index: Any, numbers: Any) -> NumpyArray:
    """The array with other numbers in a part."""
    changed = array.copy()
    changed[index] = numbers
    return changed
