"""The model of what is looked at: maps by levels of detail, with tokens or a picture, and what can be made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from attention_numpy.writing import write_file
from attention_view.codes import Details, Level
from attention_view.html import frame, page

__all__ = ["Map", "Picture", "Show", "View", "printable"]


class Show(NamedTuple):
    """One kind of map that a view has for every layer and head.

    Attributes
    ----------
    name : str
    kind : {"weights", "difference", "share", "class"}
        Numbers on a logarithmic scale; shares of allowed pairs; or one of `attention_view.masks.CLASSES`.
    bits : int
    decades : int
    """

    name: str
    kind: str
    bits: int = 8
    decades: int = 0


class Map(NamedTuple):
    """A map of one head of one layer, finest level first, and blocks of it that are kept one by one."""

    layer: int
    head: int
    show: int
    levels: Sequence[Level]
    details: Details | None = None


class Picture(NamedTuple):
    """A picture whose patches are queries and keys: its address as data, its size, and the rows and columns of each.

    Attributes
    ----------
    source : str
    size : tuple of int
        Height and width.
    grid, key_grid : tuple of int
        Rows and columns of queries and of keys; fewer keys where they are pooled.
    prefix : int
        Queries and keys before the patches, such as a class token.
    """

    source: str
    size: tuple[int, int]
    grid: tuple[int, int]
    key_grid: tuple[int, int]
    prefix: int


@dataclass(frozen=True, eq=False)
class View:
    """Attention or a mask, to be looked at: as HTML, as a figure, or as text.

    Notebooks show it as it is. ``print`` shows it in a terminal.
    """

    title: str
    lengths: tuple[int, int]
    shows: Sequence[Show]
    maps: Sequence[Map]
    tokens: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None)
    dimmed: tuple[Sequence[int], Sequence[int]] = ((), ())
    picture: Picture | None = None
    blocks: Level | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    reduction: str = "max"

    def save(self, path: str | os.PathLike[str], /, **options: Any) -> None:
        """Write one HTML file that needs no network, or a picture: png, svg or pdf, with the options of `figure`."""
        target = Path(path)
        if target.suffix.lower() in (".html", ".htm"):
            if options:
                raise TypeError(f"expected no options for HTML; got {', '.join(sorted(options))}")
            write_file(target, self.html().encode())
            return
        from attention_view.figures import save_figure  # noqa: PLC0415 (matplotlib is an extra)

        save_figure(self, target, options)

    def html(self) -> str:
        """The page as text."""
        return page(self.title, self.payload())

    def figure(
        self,
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
        show: int | None = None,
        smooth: bool = False,
    ) -> Any:
        """Draw a layer and head by matplotlib; of a picture, one query in all heads of the layer.

        Parameters
        ----------
        layer, head : int, optional
            By default the first.
        query : int, optional
            Of a picture, by default that in the middle.
        show : int, optional
            Of a comparison, 0, 1 or 2: first, second or difference. By default the last.
        smooth : bool
            Whether keys on a picture run into each other. By default each is a block.

        Returns
        -------
        matplotlib.figure.Figure
        """
        from attention_view.figures import figure  # noqa: PLC0415 (matplotlib is an extra)

        return figure(self, layer=layer, head=head, query=query, show=show, smooth=smooth)

    def find(self, *, layer: int | None = None, head: int | None = None, show: int | None = None) -> Map:
        """The map of a layer, head and show; by default the first layer and head, and the last show."""
        wanted = (layer, head, len(self.shows) - 1 if show is None else show)
        for each in self.maps:
            if all(want in (None, got) for want, got in zip(wanted, each[:3], strict=True)):
                return each
        raise ValueError(f"expected a layer, head and show of the view; got {wanted}")

    def payload(self) -> bytes:
        """The length of a header in JSON as four bytes, the header, and the codes of all levels."""
        chunks: list[bytes] = []
        blocks = [*_placed([self.blocks] if self.blocks else [], chunks)]
        header = {
            "title": self.title,
            "lengths": self.lengths,
            "shows": [show._asdict() for show in self.shows],
            "maps": [
                {"layer": each.layer, "head": each.head, "show": each.show, "levels": [*_placed(each.levels, chunks)]}
                | {"details": each.details and _placed_details(each.details, chunks)}
                for each in self.maps
            ],
            "tokens": self.tokens,
            "dimmed": self.dimmed,
            "picture": self.picture and self.picture._asdict(),
            "blocks": blocks[0] if blocks else None,
            "notes": self.notes,
            "reduction": self.reduction,
        }
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
        text += b" " * (-len(text) % 4)
        return len(text).to_bytes(4, "little") + text + b"".join(chunks)

    def __str__(self) -> str:
        from attention_view.terminal import text_of  # noqa: PLC0415 (of what is printed alone)

        return text_of(self)

    def __repr__(self) -> str:
        return f"View({self.title!r}, {len(self.maps)} maps of {self.lengths[0]} × {self.lengths[1]})"

    def _repr_html_(self) -> str:
        return frame(self.title, self.html())


def printable(text: str, most: int, /) -> str:
    """A text in one line without control characters, of some characters at most."""
    text = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _placed(levels: Sequence[Level], chunks: list[bytes]) -> Iterator[dict[str, Any]]:
    """Append codes to chunks, and say where they stand."""
    for codes, block in levels:
        yield {"rows": codes.shape[0], "columns": codes.shape[1], "block": block, "at": _appended(codes, chunks)}


def _placed_details(details: Details, chunks: list[bytes]) -> dict[str, int]:
    places, codes = details
    return {"count": len(places), "places": _appended(places, chunks), "at": _appended(codes, chunks)}


def _appended(codes: Any, chunks: list[bytes]) -> int:
    """Append an array to chunks of four bytes each or a multiple; where it stands."""
    data = codes.tobytes()
    at = sum(map(len, chunks))
    chunks.append(data + b"\0" * (-len(data) % 4))
    return at
