"""Bands: bounds of what a rule allows, by which keys are cut, blocks are skipped, and kernels get their flags."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from .._arrays import Array, Namespace, dtype_name, index_dtype
from .._backend import array_namespace, can_be_read, numbers_of

LIMIT = 2**29  # above all positions; three times as much still fits int32
FREE, CAUSAL = (None, None), (None, 0)  # ends


class Band(NamedTuple):
    """Bounds of the pairs that a rule allows: ``low <= key - query - offset <= high``, and ``key < stop``.

    Attributes
    ----------
    low, high : int
        By default no bound, as is ``stop``.
    stop : int or Array of int, shape (...)
        One for all, or one for each sample of the batch.
    is_exact : bool
        Whether the rule is known to allow all pairs within these bounds.
    offset : int or Array of int, shape (...)
        Of the positions of queries.
    """

    low: int = -LIMIT
    high: int = LIMIT
    stop: Any = LIMIT
    is_exact: bool = False
    offset: Any = 0

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """The bounds of ``key - query - offset``, with ``None`` for no bound."""
        return None if self.low <= -LIMIT else self.low, None if self.high >= LIMIT else self.high

    @property
    def has_stop(self) -> bool:
        """Whether there is a bound on keys alone, behind which no query attends."""
        return not isinstance(self.stop, int) or self.stop < LIMIT

    @property
    def is_plain(self) -> bool:
        """Whether the rule is exactly these bounds, without an offset."""
        return self.is_exact and isinstance(self.offset, int) and self.offset == 0

    @property
    def is_relative(self) -> bool:
        """Whether the rule is known to depend on ``key - query`` alone, and to have numbers alone."""
        return self.is_plain and not self.has_stop

    def holds(self, query: tuple[Array, Array], key: tuple[Array, Array], xp: Namespace) -> Array:
        """Whether the first of two positions of keys is low enough for the first of two queries, and the last for it.

        These are the two ends of a block, in the order that asks for some pair of it, or for all; or one pair twice.
        """
        (low, high), tests = self.ends, []
        if high is not None:
            tests.append(xp.less_equal(key[0], self._end(query[0], high, xp)))
        if low is not None:
            tests.append(xp.greater_equal(key[1], self._end(query[1], low, xp)))
        if self.has_stop:
            tests.append(xp.less(key[0], self.stop))
        if not tests:
            return xp.ones_like(xp.add(key[0], query[0]), dtype=xp.bool)
        return tests[0] if len(tests) == 1 else functools.reduce(xp.logical_and, tests)

    def _end(self, query: Array, end: int, xp: Namespace) -> Array:
        query = query if isinstance(self.offset, int) and self.offset == 0 else xp.add(query, self.offset)
        return query if end == 0 else xp.add(query, end)

    def over_batch(self, like: Array, xp: Namespace) -> Band:
        """The band with arrays of the type of positions that broadcast to scores, for `holds`."""
        if isinstance(self.stop, int) and isinstance(self.offset, int):
            return self
        return self._replace(stop=_over_batch(self.stop, like, xp), offset=_over_batch(self.offset, like, xp))

    def numbers(self, leading: tuple[int, ...] | None = None) -> list[Band]:
        """Bounds in numbers: one band for all of the batch, or one for each of its samples.

        They come from numbers; and, where the leading axes are given, from short arrays that can be read without
        waiting. Others bound nothing.
        """
        if isinstance(self.stop, int) and isinstance(self.offset, int) and self.offset == 0:
            return [self]
        stops, offsets = integers(self.stop, leading), integers(self.offset, leading)
        low, high = FREE if offsets is None else self.ends
        is_exact = self.is_exact and stops is not None and offsets is not None
        stops, offsets = stops or [LIMIT], offsets or [0]
        count = max(len(stops), len(offsets))  # one each, or one for all
        pairs = zip(stops * (count // len(stops)), offsets * (count // len(offsets)), strict=True)
        return [exact_band(low, high, stop, offset)._replace(is_exact=is_exact) for stop, offset in pairs]


UNKNOWN, ALL = Band(), Band(is_exact=True)


def exact_band(low: int | None = None, high: int | None = None, stop: Any = LIMIT, offset: Any = 0) -> Band:
    """An exact band of numbers that are clamped to the positions, by default without bounds."""
    by, most = (offset, LIMIT) if isinstance(offset, int) else (0, LIMIT - 1)
    low = -LIMIT if low is None else _clamped(low + by, most)
    high = LIMIT if high is None else _clamped(high + by, most)
    stop = _clamped(stop) if isinstance(stop, int) else stop
    return Band(low, high, stop, True, 0 if most == LIMIT else offset)


def intersection(a: Band, b: Band) -> Band:
    """Bounds of what two rules allow, which are exact unless both have an array for the same bound."""
    ends, stop, is_exact = a if b.ends == FREE else b, a.stop if not b.has_stop else b.stop, a.is_exact and b.is_exact
    if FREE not in (a.ends, b.ends):
        are_numbers = all(isinstance(each.offset, int) for each in (a, b))
        ends = Band(max(a.low, b.low), min(a.high, b.high)) if are_numbers else a
        is_exact = is_exact and are_numbers
    if a.has_stop and b.has_stop:
        are_numbers = all(isinstance(each.stop, int) for each in (a, b))
        stop = min(a.stop, b.stop) if are_numbers else a.stop
        is_exact = is_exact and are_numbers
    return Band(ends.low, ends.high, stop, is_exact, ends.offset)


def hull(a: Band, b: Band) -> Band:
    """The least band of numbers that holds two others, which is exact if it is one of them."""
    if not all(isinstance(number, int) for each in (a, b) for number in (each.stop, each.offset)):
        return UNKNOWN
    found = Band(min(a.low, b.low), max(a.high, b.high), max(a.stop, b.stop), is_exact=True)
    return found if found in (a, b) else found._replace(is_exact=False)


def _clamped(value: int, most: int = LIMIT) -> int:
    return -most if value < -most else min(value, most)


def _over_batch(value: Any, like: Array, xp: Namespace) -> Any:
    """Clamp an array of integers (...) to the positions, with axes for heads, queries and keys: (..., 1, 1, 1)."""
    if isinstance(value, int):
        return value
    if dtype_name(value.dtype) in ("int32", "uint32", "int64", "uint64"):
        value = xp.clip(xp.astype(value, index_dtype(value, xp=xp)), -LIMIT, LIMIT)
    value = xp.astype(value, like.dtype)
    return value[..., None, None, None] if len(value.shape) else value


def integers(value: Any, leading: tuple[int | None, ...] | None) -> list[int] | None:
    """Integers of the batch, one for all or one for each sample; ``None`` if they cannot be read without waiting."""
    if isinstance(value, int):
        return [value]
    if leading is None or 0 in leading or not can_be_read(value):
        return None
    if not len(value.shape):
        return [int(value)]
    if tuple(value.shape) != leading or len(leading) != 1:
        xp = array_namespace(value)
        value = xp.reshape(xp.broadcast_to(value, leading), (-1,))
    return numbers_of(value)
