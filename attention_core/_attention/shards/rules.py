"""Calls by positions of the whole, of which the last only pad shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..._arrays import Array, Namespace, clipped
from ..._backend import array_namespace, register
from ...masks import Mask, Positions
from ...masks._band import LIMIT, Band, intersection
from ...masks._mask import as_mask, band_of, bounds_of
from ...masks._rules import rule_of
from ...scores import ScoreMod
from ..call import Call


@dataclass(frozen=True, eq=False)
class Within(Mask):
    """A rule for the first queries and keys; those behind them pad shards, and are masked."""

    mask: Mask | None
    queries: int
    keys: int

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        inside = xp.logical_and(xp.less(at.query, self.queries), xp.less(at.key, self.keys))
        if self.mask is None:
            return inside
        query, key = clipped(at.query, self.queries, xp=xp), clipped(at.key, self.keys, xp=xp)
        return xp.logical_and(inside, self.mask.allowed(at._replace(query=query, key=key), xp=xp))

    def bounds(self) -> Band:
        return intersection(bounds_of(self.mask), Band(stop=self.keys))


@dataclass(frozen=True)
class Clipped:
    """A function of scores that is asked for the positions of the first queries and keys alone."""

    function: Callable[..., Array]
    queries: int
    keys: int

    def __call__(self, scores: Array, batch: Array, head: Array, query: Array, key: Array, *arrays: Array) -> Array:
        xp = array_namespace(scores)
        query, key = clipped(query, self.queries, xp=xp), clipped(key, self.keys, xp=xp)
        return self.function(scores, batch, head, query, key, *arrays)


register("shards.Within", Within)
register("shards.Clipped", Clipped)


def within(call: Call, queries: int = LIMIT, keys: int = LIMIT) -> Call:
    """A call over the positions of the whole, for the first queries and keys."""
    mask, score_mod = None if call.mask is None else as_mask(call.mask), call.score_mod
    if queries == keys == LIMIT:
        return call._replace(mask=mask)
    if score_mod is not None:
        function, arrays = (
            (score_mod.function, score_mod.arrays) if isinstance(score_mod, ScoreMod) else (score_mod, ())
        )
        score_mod = ScoreMod(Clipped(function, queries, keys), arrays)
    return call._replace(mask=Within(mask, queries, keys), score_mod=score_mod)


def from_starts(call: Call, query: Any, key: Any) -> Call:
    """A call from positions on: in its rule, which kernels take, if that is a band and nothing else looks at them."""
    starts, is_free = (query, key), call.score_mod is None and call.dropout is None
    if is_free and call.mask is None:
        starts = 0, 0
    elif is_free and isinstance(query, int) and isinstance(key, int) and (band := band_of(call.mask)).is_exact:
        starts, call = (0, 0), call._replace(mask=rule_of(moved(band, query, key)))
    return call._replace(starts=starts)


def moved(band: Band, query: int, key: int) -> Band:
    """A band of queries and keys from positions on, counted from there."""
    ends = zip(band[:3], (query - key, query - key, -key), strict=True)
    low, high, stop = (end if abs(end) == LIMIT else end + by for end, by in ends)
    return Band(low, high, stop, band.is_exact)
