"""Static pictures of a view by matplotlib, for papers and notebooks."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from attention_files.writing import write_file
from attention_view.model import CLASSES, Map, Picture, ViewData, printable
from attention_view.places import row_of

FORMATS = ("png", "svg", "pdf")
CLASS_COLOURS = ("#ffffff", "#9aa5b1", "#0072b2", "#d55e00", "#cc79a7")
COLOURS = {"weights": "viridis", "difference": "inferno", "share": "Greys"}
LABELS = {"weights": "weight", "difference": "absolute difference", "share": "share of pairs that are allowed"}
COVER, CONTRAST = 0.8, 0.2
"""How opaque weights are over a picture, and what share of its contrast the picture keeps there, next to white."""
MOST_LABELS = 48
MOST_PIXELS = 1024
PER_ROW = 4


def save_figure(view: ViewData, path: Path, options: dict[str, Any]) -> None:
    """Write a figure, in the format that the name of the file ends in."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"expected a file that ends in html, {', '.join(FORMATS)}; got {path.name}")
    held = io.BytesIO()
    figure(view, **{"layer": None, "head": None, "query": None, "show": None, "smooth": False, **options}).savefig(
        held, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None
    )
    write_file(path, held.getvalue())


def figure(view: ViewData, *, layer: int | None, head: int | None, query: Any, show: int | None, smooth: bool) -> Any:
    """A map with its scale; of a picture, one query in all heads of a layer."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "expected matplotlib for a figure: pip install 'attention-toolkit[view]'", name=error.name
        ) from error
    found = view.find(layer=layer, head=head, show=show)
    if view.picture is not None and head is None:
        return _on_picture(view, found, query, "bilinear" if smooth else "nearest", Figure)
    if query is not None:
        raise ValueError("expected a query only with an image and no head; got one")
    drawn = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = drawn.add_subplot()
    _draw_map(axes, view, found)
    return drawn


def _draw_map(axes: Any, view: ViewData, found: Map) -> None:
    codes, block = found.levels[0]
    kind = view.shows[found.show].kind
    rows, columns = found.part.lengths
    options: dict[str, Any] = {
        "interpolation": "nearest",
        "aspect": "auto" if max(rows, columns) > 8 * min(rows, columns) else "equal",
    }
    options["extent"] = (-0.5, codes.shape[1] * block[1] - 0.5, codes.shape[0] * block[0] - 0.5, -0.5)
    if kind == "class":
        colours = np.array([[int(each[i : i + 2], 16) for i in (1, 3, 5)] for each in CLASS_COLOURS], np.uint8)
        axes.imshow(colours[codes], **options)
        for code in np.unique(codes):
            axes.scatter([], [], marker="s", color=CLASS_COLOURS[code], edgecolors="#9aa5b1", label=CLASSES[code])
        axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    else:
        _draw_values(axes, view, found, view.values(found), view.top(found), options)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), xlabel="key", ylabel="query")
    title = _label(view.title, 72)
    of_mask = kind in ("class", "share")
    axes.set_title(title if of_mask else f"{title}: layer {found.layer}, head {found.head}", fontsize=10)
    sides = zip((axes.set_yticks, axes.set_xticks), found.part.tokens, (0, 90), strict=True)
    for set_ticks, tokens, turned in sides:
        if tokens is not None and len(tokens) <= MOST_LABELS:
            set_ticks(range(len(tokens)), [_label(token) for token in tokens], rotation=turned, fontsize=8)


def _draw_values(axes: Any, view: ViewData, found: Map, values: Any, top: float, options: dict[str, Any]) -> None:
    """Numbers as colours from 0 to the end of their scale, with the bar that says so."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 (an extra)
    from matplotlib.colors import ListedColormap  # noqa: PLC0415 (an extra)

    kind = view.shows[found.show].kind
    drawn = axes.imshow(values, cmap=COLOURS[kind], vmin=0, vmax=top, **options)
    if "alpha" in options:  # the bar has the colours that are seen, over grey in the middle of what lies beneath
        colours = COVER * drawn.cmap(np.linspace(0, 1, 256))[:, :3] + (1 - COVER) * (1 - CONTRAST / 2)
        drawn = ScalarMappable(drawn.norm, ListedColormap(colours))
    bar = axes.figure.colorbar(drawn, ax=axes, label=LABELS[kind], shrink=0.8)
    bar.ax.tick_params(labelsize=8)


def _label(text: str, most: int = 18) -> str:
    """A text in one line, in which matplotlib reads no formula."""
    return printable(text, most).replace("$", r"\$")


def _on_picture(view: ViewData, found: Map, query: Any, how: str, make: Any) -> Any:
    """The query on the picture, and in each head the keys that it looks at, as blocks."""
    picture = view.picture
    assert picture is not None
    rows, columns = picture.grid
    at = view.query if query is None else row_of(picture, query)
    pixels = _pixels(picture)
    maps = [each for each in view.maps if each.layer == found.layer and each.show == found.show]
    across = min(PER_ROW, 1 + len(maps))
    down = -(-(1 + len(maps)) // across)
    drawn = make(figsize=(3.2 * across, 2.8 * down), layout="constrained")
    extent = (0, columns, rows, 0)
    for index, each in enumerate([None, *maps], start=1):
        axes = drawn.add_subplot(down, across, index)
        under = pixels if each is None else 1 - CONTRAST + CONTRAST * _grey(pixels)  # what is seen is the weights
        axes.imshow(under, extent=extent, cmap="gray", **({} if each is None else {"vmin": 0, "vmax": 1}))
        axes.set_axis_off()
        if picture.places[at] >= 0:
            y, x = divmod(picture.places[at], columns)
            axes.plot([x, x + 1, x + 1, x, x], [y, y, y + 1, y + 1, y], color="white", linewidth=2)
            axes.plot([x, x + 1, x + 1, x, x], [y, y, y + 1, y + 1, y], color="black", linewidth=0.8)
        if each is None:
            axes.set_title(picture.name(at), fontsize=9)
            continue
        codes = picture.keys(each, at)
        options = {"extent": extent, "alpha": COVER, "interpolation": how}
        _draw_values(axes, view, each, view.values(each, codes), view.top(each, codes), options)
        axes.set_title(f"layer {each.layer}, head {each.head}", fontsize=9)
    return drawn


def _grey(pixels: Any) -> Any:
    """The brightness of pixels, from 0 to 1."""
    return (pixels if pixels.ndim == 2 else pixels[..., :3].mean(-1)) / np.iinfo(pixels.dtype).max


def _pixels(picture: Picture) -> Any:
    """The pixels of a picture, of a large one as many as a figure shows."""
    from matplotlib.image import pil_to_array  # noqa: PLC0415 (an extra)
    from PIL import Image  # noqa: PLC0415 (comes with matplotlib)

    data = io.BytesIO(base64.b64decode(picture.source.partition(";base64,")[2]))
    try:
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            opened = Image.open(data)
    except Image.DecompressionBombError as error:
        raise ValueError("expected image of fewer pixels in a figure; got {} × {}".format(*picture.size)) from error
    with opened:
        opened.draft(None, (MOST_PIXELS, MOST_PIXELS))
        opened.thumbnail((MOST_PIXELS, MOST_PIXELS))
        return pil_to_array(opened)
