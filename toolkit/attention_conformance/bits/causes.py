"""Why two attentions have other bits: ways of computing, of which a change of one explains the difference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attention_conformance.bits.emulated import AXES, Head, Way, changes_of, emulated, unlike
from attention_conformance.problem import NumpyArray

NO_CAUSE = "none of the tried causes"

EXPLAINED = 0.75
"""The share of the squared difference from which on a cause is told."""


@dataclass(frozen=True)
class Seen:
    """Outputs of a head that have other bits: rows of the whole call, and all rows of another."""

    head: Head
    rows: NumpyArray
    first: NumpyArray
    other: Head
    second: NumpyArray


class _Emulations:
    """Outputs of rows of one head by the way of computing, each computed once, next to those that were seen."""

    def __init__(self, head: Head, rows: NumpyArray | None, target: NumpyArray, dtype: str) -> None:
        self._head, self._rows, self._dtype = head, rows, dtype
        self.target = target.astype(np.float64)
        self._known: dict[Way, NumpyArray] = {}

    def __getitem__(self, way: Way) -> NumpyArray:
        if way not in self._known:
            with np.errstate(all="ignore"):
                found = emulated(self._head, way, self._dtype)
            self._known[way] = (found if self._rows is None else found[self._rows]).astype(np.float64)
        return self._known[way]

    def distance(self, way: Way) -> tuple[float, float]:
        """The share of other numbers, and the size of the difference; both 0 where it is the same."""
        found = self[way]
        return float((found != self.target).mean()), float(np.linalg.norm(found - self.target))

    def nearest(self) -> Way:
        """The way that comes nearest: the best of a grid, then field after field."""
        grid = itertools.product(*(AXES[name][1] for name in ("scale", "division")), ("exp", "exp2"), (0, 64, 128))
        ways = (Way(scale=scale, division=division, power=power, block=block) for scale, division, power, block in grid)
        best = min(ways, key=self.distance)
        while self.distance(best)[0]:
            better = min(changes_of(best), key=self.distance)
            if self.distance(better) >= self.distance(best):
                break
            best = better
        return best


class _Both:
    """What two ways explain of the difference that was seen."""

    def __init__(self, seen: Seen, dtype: str) -> None:
        self.first = _Emulations(seen.head, seen.rows, seen.first, dtype)
        self.second = _Emulations(seen.other, None, seen.second, dtype)
        self._seen = self.second.target - self.first.target
        self._size = float(np.sum(self._seen**2))

    def explained(self, pair: tuple[Way, Way]) -> float:
        """The share of the squared difference that two ways explain; 2 where they have every bit of both."""
        if not (self.first.distance(pair[0])[0] or self.second.distance(pair[1])[0]):
            return 2.0
        left = self._seen - (self.second[pair[1]] - self.first[pair[0]])
        return 1 - float(np.sum(left**2)) / self._size if self._size else 0.0


def cause_of(seen: Sequence[Seen], dtype: str) -> tuple[str, str]:
    """What the outputs of two attentions differ in, as a name and in words; without a name, nothing that was tried is.

    A cause is found on the first head. It is told if two ways of computing that differ in it alone explain all heads:
    every bit of both outputs, or three quarters of their difference.
    """
    both = [_Both(each, dtype) for each in seen]
    if not all(np.isfinite(part.target).all() for each in both for part in (each.first, each.second)):
        return "", NO_CAUSE
    ways = (both[0].first.nearest(), both[0].second.nearest())
    bases = dict.fromkeys((*ways, Way(), Way(block=64)))
    pairs = [pair for base in bases for each in changes_of(base) for pair in ((base, each), (each, base))]
    pairs += [_without_idle(both[0], *ways)]
    best = max(pairs, key=lambda pair: (both[0].explained(pair), -len(unlike(*pair))))
    share = min(each.explained(best) for each in both)
    if share < EXPLAINED or best[0] == best[1]:
        return "", NO_CAUSE
    names = unlike(*best)
    told = "; ".join(f"{AXES[name][0]}: {getattr(best[0], name)} and {getattr(best[1], name)}" for name in names)
    return (
        f"other-{names[0]}",
        f"{told}; this explains {'every bit' if share > 1 else f'{share:.0%} of the difference'}",
    )


def _without_idle(both: _Both, first: Way, second: Way) -> tuple[Way, Way]:
    """Two ways without the differences that change nothing."""
    for name in unlike(first, second):
        without = replace(second, **{name: getattr(first, name)})
        if both.explained((first, without)) >= both.explained((first, second)):
            second = without
    return first, second
