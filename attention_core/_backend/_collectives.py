"""Collectives: what a library lends to compute over several ranks, each of which holds a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .._arrays import Array


class Collectives(Protocol):
    """The collectives of a library, on its own groups of ranks: all of these members.

    An adapter only translates. All ranks call the same members in the same order. Arrays of R leading entries have one
    for each rank.
    """

    def name_of(self, group: Any, /) -> str:
        """Return the name of a group, which plans hold and compilers keep.

        Raises
        ------
        TypeError, ValueError
            When this is no group, or not one of this library, or it cannot be used here.
        """

    def size(self, group: str, /) -> int:
        """Return R, the number of ranks."""

    def rank(self, group: str, /) -> int | Array:
        """Return the index of this rank: a number, or a 0-d array of int32 where one program runs on all ranks."""

    def all_gather(self, x: Array, group: str, /) -> Array:
        """Return the arrays (...) of all ranks, (R, ...), on each."""

    def sum_scatter(self, x: Array, group: str, /) -> Array:
        """Return the sum over ranks of their entry of arrays (R, ...) for this one, (...)."""

    def exchange(self, x: Array, group: str, /) -> Array:
        """Return what each rank has for this one: entry r goes to rank r, where it is the entry of the sender."""

    def rotate(self, arrays: tuple[Array, ...], group: str, by: int, /) -> Callable[[], tuple[Array, ...]]:
        """Start to send arrays to the rank so many places on; what is returned waits for those of the rank behind."""

    def largest(self, x: Array, group: str, /) -> Array:
        """Return the maxima of the arrays of all ranks, which hold no NaN."""

    def total(self, x: Array, group: str, /) -> Array:
        """Return the sum of the arrays of all ranks."""


class Ranks(NamedTuple):
    """The ranks of a group, over which sums and maxima are taken."""

    collectives: Collectives
    group: str

    def largest(self, x: Array) -> Array:
        """Return the maxima of the arrays of all ranks, which hold no NaN."""
        return self.collectives.largest(x, self.group)

    def total(self, x: Array) -> Array:
        """Return the sum of the arrays of all ranks."""
        return self.collectives.total(x, self.group)


def ranks_of(backend: Any, group: str | None) -> Ranks | None:
    """Return the ranks of a group, if there is one."""
    return None if group is None else Ranks(backend.collectives, group)
