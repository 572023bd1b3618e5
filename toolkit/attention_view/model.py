"""The data of what is looked at: maps by levels of detail, with tokens or a picture, and one rule of their scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from attention_view.codes import Level, decode

EVEN_SHARES = 4
"""A scale of weights reaches at least so many times 1 / N, so that weights that are nearly even stay dark."""
CLASSES = ("both mask", "both allow", "only the first allows", "only the second allows", "several of these")


class Show(NamedTuple):
    """One kind of map that a view has for every layer and head.

    Attributes
    ----------
    kind : {"weights", "difference", "share", "class"}
        Numbers on a logarithmic scale; shares of allowed pairs; or one of `CLASSES`.
    """

    name: str
    kind: str
    bits: int = 8
    decades: int = 0


class Part(NamedTuple):
    """What maps of layers with the same lengths share: their tokens, and which of these are dimmed."""

    lengths: tuple[int, int]
    tokens: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None)
    dimmed: tuple[Sequence[int], Sequence[int]] = ((), ())

    @property
    def least(self) -> float:
        """The least end of a scale of weights."""
        return min(1.0, EVEN_SHARES / self.lengths[1])


class Map(NamedTuple):
    """A map of one head of one layer, finest level first."""

    layer: int
    head: int
    show: int
    part: Part
    levels: Sequence[Level]


class Picture(NamedTuple):
    """A picture whose patches are queries and keys: its address as data, its size, and the rows and columns of each.

    Attributes
    ----------
    size : tuple of int
        Height and width.
    grid, key_grid : tuple of int
        Rows and columns of queries and of keys; fewer keys where they are pooled.
    class_tokens : int
        Keys before the patches, such as a class token.
    places : sequence of int
        Of each query row times columns plus column, and below 0 before the patches.
    """

    source: str
    size: tuple[int, int]
    grid: tuple[int, int]
    key_grid: tuple[int, int]
    class_tokens: int
    places: Sequence[int]

    def name(self, row: int) -> str:
        """Where a query is."""
        at = self.places[row]
        return "query before the patches" if at < 0 else "query ({}, {})".format(*divmod(at, self.grid[1]))

    def keys(self, found: Map, row: int) -> Any:
        """The codes of a query on the grid of keys."""
        return found.levels[0].codes[row, self.class_tokens :].reshape(self.key_grid)


@dataclass(frozen=True, eq=False)
class ViewData:
    """What a view holds, and what is asked of it. ``query`` is the row that is looked at first."""

    title: str
    shows: Sequence[Show]
    maps: Sequence[Map]
    query: int = 0
    picture: Picture | None = None
    blocks: Level | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def first(self) -> Map:
        """The map of the first layer and head, and of the last show."""
        return next(each for each in self.maps if each.show == len(self.shows) - 1)

    def values(self, found: Map, codes: Any = None) -> Any:
        """The numbers of a map or of some of its codes: weights, differences, or shares of allowed pairs."""
        codes, show = found.levels[0].codes if codes is None else codes, self.shows[found.show]
        return decode(codes, show.bits) if show.decades else codes / 255

    def top(self, found: Map, codes: Any = None) -> float:
        """The end of the scale, which begins at 0, of a map or of some of its codes.

        It is the largest number; of weights, at least `EVEN_SHARES` / N; of shares of pairs, 1.
        """
        show = self.shows[found.show]
        if not show.decades:
            return 1.0
        codes = found.levels[0].codes if codes is None else codes
        largest = np.max(codes, initial=0, where=codes < 2**show.bits - 1)
        number = float(decode(np.asarray(largest), show.bits))
        return max(number, found.part.least) if show.kind == "weights" else number or 1.0


def printable(text: str, most: int, /) -> str:
    """A text in one line without control characters, of some characters at most."""
    text = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}…"
