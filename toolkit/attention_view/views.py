"""A view, and what can be made of it: a page or text."""

from __future__ import annotations

import os
from pathlib import Path

from attention_files.writing import write_file
from attention_view.html import frame, page
from attention_view.model import ViewData
from attention_view.terminal import text_of


class View(ViewData):
    """Attention or a mask, to be looked at: as HTML or as text.

    Notebooks show it as it is. ``print`` shows it in a terminal. All of them draw weights on the same scale: from 0 to
    the largest, and to 4 / N at least.
    """

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write one HTML file that needs no network."""
        target = Path(path)
        if target.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"expected a file that ends in html; got {target.name}")
        write_file(target, self.html().encode())

    def html(self) -> str:
        """The page as text."""
        return page(self)

    def __str__(self) -> str:
        return text_of(self)

    def __repr__(self) -> str:
        lengths = dict.fromkeys("{} × {}".format(*each.part.lengths) for each in self.maps)
        return f"View({self.title!r}, {len(self.maps)} maps of {', '.join(lengths)})"

    def _repr_html_(self) -> str:
        return frame(self.title, self.html())
