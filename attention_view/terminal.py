"""A view as text: a coarse map in Unicode blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from attention_view.codes import decode
from attention_view.model import printable

if TYPE_CHECKING:
    from attention_view.model import View

__all__ = ["text_of"]

SHADES = "·░▒▓█"
CLASSES = "·█12?"
MOST_ROWS, MOST_COLUMNS = 32, 64
LONGEST_TOKEN, LONGEST_TITLE = 12, 200


def text_of(view: View) -> str:
    """The first map of a view, and its notes, in at most 32 lines of 64 characters."""
    found = view.find()
    show = view.shows[found.show]
    codes, _ = found.levels[0]
    shape = tuple(min(most, size) for most, size in zip((MOST_ROWS, MOST_COLUMNS), codes.shape, strict=True))
    if show.kind == "class":
        lines = _lines(np.array(list(CLASSES))[_blocks(codes, shape, "class")])
    else:
        values = decode(codes, show.bits) if show.decades else codes / 255
        values = _blocks(values, shape, "mean" if show.kind == "share" else view.reduction)
        top = np.nanmax(values, initial=0.0) if show.decades else 1.0
        shades = np.ceil(np.nan_to_num(values) / (top or 1) * (len(SHADES) - 1)).astype(int)
        drawn = np.where(np.isnan(values), "!", np.array(list(SHADES))[np.minimum(shades, len(SHADES) - 1)])
        lines = _lines(drawn)
    tokens = view.tokens[0]
    if tokens is not None and len(lines) == len(tokens):
        names = [printable(token, LONGEST_TOKEN) for token in tokens]
        width = max(map(len, names))
        lines = [f"{name:>{width}} {line}" for name, line in zip(names, lines, strict=True)]
    return "\n".join([_title(view, found), *lines])


def _title(view: View, found: Any) -> str:
    told = f"{printable(view.title, LONGEST_TITLE)}: {view.lengths[0]} queries × {view.lengths[1]} keys"
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


def _lines(characters: Any) -> list[str]:
    return ["".join(line) for line in characters]
