"""A view, and what can be made of it: a page, a figure, or text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attention_files.writing import write_file
from attention_view.figures import figure, save_figure
from attention_view.html import frame, page
from attention_view.model import ViewData
from attention_view.terminal import text_of


class View(ViewData):
    """Attention or a mask, to be looked at: as HTML, as a figure, or as text.

    Notebooks show it as it is. ``print`` shows it in a terminal. All of them draw weights on the same scale: from 0 to
    the largest, and to 4 / N at least.
    """

    def save(self, path: str | os.PathLike[str], /, **options: Any) -> None:
        """Write one HTML file that needs no network, or a picture: png, svg or pdf, with the options of `figure`."""
        target = Path(path)
        if target.suffix.lower() not in (".html", ".htm"):
            return save_figure(self, target, options)
        if options:
            raise TypeError(f"expected no options for HTML; got {', '.join(sorted(options))}")
        return write_file(target, self.html().encode())

    def html(self) -> str:
        """The page as text."""
        return page(self)

    def figure(
        self,
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int | tuple[int, int] | None = None,
        show: int | None = None,
        smooth: bool = False,
    ) -> Any:
        """Draw a layer and head by matplotlib; of a picture, one query in all heads of the layer.

        Parameters
        ----------
        layer, head : int, optional
            By default the first.
        query : int or tuple of int, optional
            Of a picture, the number of a query, or row and column of one that is kept. By default that of the view.
        show : int, optional
            Of a comparison, 0, 1 or 2: first, second or difference. By default the last.
        smooth : bool
            Whether keys on a picture run into each other. By default each is a block.

        Returns
        -------
        matplotlib.figure.Figure
        """
        return figure(self, layer=layer, head=head, query=query, show=show, smooth=smooth)

    def __str__(self) -> str:
        return text_of(self)

    def __repr__(self) -> str:
        lengths = dict.fromkeys("{} × {}".format(*each.part.lengths) for each in self.maps)
        return f"View({self.title!r}, {len(self.maps)} maps of {', '.join(lengths)})"

    def _repr_html_(self) -> str:
        return frame(self.title, self.html())
