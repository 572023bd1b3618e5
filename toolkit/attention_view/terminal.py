"""A view as text: a coarse map in Unicode blocks, and what they stand for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attention_view.model import CLASSES, Map, ViewData, printable

SHADES = "·░▒▓█"
CLASS_MARKS = "·█12?"
MOST_ROWS, MOST_COLUMNS = 32, 64
LONGEST_TOKEN, LONGEST_TITLE = 12, 200


def text_of(view: ViewData) -> str:
    """The first map of a view in at most 32 lines of 64 characters, under its title and above its scale.

    Of a picture, it is the keys of a query in their rows and columns.
    """
    found = view.first
    show = view.shows[found.show]
    codes = found.levels[0].codes if view.picture is None else view.picture.keys(found, view.query)
    shape = tuple(min(most, size) for most, size in zip((MOST_ROWS, MOST_COLUMNS), codes.shape, strict=True))
    if show.kind == "class":
        drawn = np.array(list(CLASS_MARKS))[_blocks(codes, shape, "class")]
        legend = ", ".join(f"{mark} {name}" for mark, name in zip(CLASS_MARKS, CLASSES, strict=True) if mark in drawn)
    else:
        top = view.top(found, codes)
        values = _blocks(view.values(found, codes), shape, "mean" if show.kind == "share" else "max")
        # Only 0 has the first mark, and of shares only 1 the last.
        steps = np.clip(np.rint(np.nan_to_num(values) / top * 4), 1, np.where(values < 1, 3 + (show.decades > 0), 4))
        drawn = np.where(np.isnan(values), "!", np.array(list(SHADES))[np.where(values == 0, 0, steps).astype(int)])
        legend = f"· masked, █ allowed{', ░▒▓ in part' * any(mark in drawn for mark in '░▒▓')}"
        if show.decades:
            legend = f"░▒▓█ from 0 to {top:.3g}, · {'equal' if show.kind == 'difference' else '0'}"
            legend += ", ! NaN" * ("!" in drawn)
    lines = ["".join(line) for line in drawn]
    tokens = found.part.tokens[0]
    if tokens is not None and view.picture is None and len(lines) == len(tokens):
        names = [printable(token, LONGEST_TOKEN) for token in tokens]
        width = max(map(len, names))
        lines = [f"{name:>{width}} {line}" for name, line in zip(names, lines, strict=True)]
    return "\n".join([_title(view, found), *lines, legend])


def _title(view: ViewData, found: Map) -> str:
    if view.picture is None:
        sides = "{} queries × {} keys".format(*found.part.lengths)
    else:
        sides = "{}, {} × {} keys".format(view.picture.name(view.query), *view.picture.key_grid)
    told = f"{printable(view.title, LONGEST_TITLE)}: {sides}"
    if view.shows[found.show].kind in ("share", "class"):
        return f"{told}, {view.notes[0].partition(': ')[2].partition(', ')[0]}" if len(view.shows) == 1 else told
    return f"{told}, layer {found.layer}, head {found.head}, {view.shows[found.show].name}"


def _blocks(values: Any, shape: tuple[int, ...], how: str) -> Any:
    sizes = [math.ceil(size / most) for size, most in zip(values.shape, shape, strict=True)]
    found = [
        [_one(values[i : i + sizes[0], j : j + sizes[1]], how) for j in range(0, values.shape[1], sizes[1])]
        for i in range(0, values.shape[0], sizes[0])
    ]
    return np.array(found)


def _one(block: Any, how: str) -> Any:
    if how == "class":
        return block.flat[0] if (block == block.flat[0]).all() else 4
    return block.mean() if how == "mean" else block.max()
