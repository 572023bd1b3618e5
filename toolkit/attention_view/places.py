"""The patches of a picture that queries and keys are, and which queries are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attention_view.images import image_data
from attention_view.model import Picture
from attention_view.sources import whole

Grid = tuple[int, int]
MOST_BEFORE = 8
"""So many queries and keys before the patches are thought of: a class token, and some registers."""


def picture_of(
    image: Any, lengths: Grid, grids: tuple[Grid | None, Grid | None], *, class_tokens: int, query: Any, most: int
) -> tuple[Picture, Sequence[int] | None, int]:
    """A picture, the queries that are kept (None: all), and the row of the one that is looked at first.

    Of more queries than ``most``, every second or third in each direction is kept, and so is the one that is asked for.
    """
    source, size = image_data(image)
    class_tokens = whole("class_tokens", class_tokens)
    if not 0 <= class_tokens < lengths[1]:
        raise ValueError(f"expected class_tokens in [0, {lengths[1]}); got {class_tokens}")
    several = query if isinstance(query, list) else None if query is None or lengths[0] > 1 else [query]
    has_them_alone = several is not None and len(several) == lengths[0]
    grid = None if has_them_alone else _grid("grid", grids[0], lengths[0] - class_tokens, size)
    key_grid = _grid("key_grid", grids[1], lengths[1] - class_tokens, size)
    if grid is None:
        grid = key_grid if grids[0] is None else _grid("grid", grids[0], None, size)
    if several is None:
        at = (grid[0] // 2) * grid[1] + grid[1] // 2 if query is None else _place(query, grid, class_tokens)
        places = _every(grid, class_tokens, at, most)
    else:
        places = [_place(each, grid, class_tokens) for each in several]
        at = places[0] if places else 0
    if not 0 < len(places) <= most:
        raise ValueError(f"expected at least one query, and at most {most} with an image; got {len(places)}")
    kept = None if len(places) == lengths[0] else [class_tokens + patch for patch in places]
    return Picture(source, size, grid, key_grid, class_tokens, places), kept, places.index(at)


def _every(grid: Grid, class_tokens: int, at: int, most: int) -> list[int]:
    """Places in even rows and columns with one of them, as many as may be, and all before the patches."""
    step, before = 1, range(-class_tokens, 0)
    while class_tokens + -(-grid[0] // step) * -(-grid[1] // step) > most and step < max(grid):
        step += 1
    rows, columns = (
        range(each % step, side, step) for each, side in zip(divmod(max(0, at), grid[1]), grid, strict=True)
    )
    return [*before, *(row * grid[1] + column for row in rows for column in columns)]


def _place(query: Any, grid: Grid, class_tokens: int) -> int:
    """Row times columns plus column of a query, which is given by its number or by row and column."""
    if not isinstance(query, tuple):
        patch = whole("query", query) - class_tokens
        if not -class_tokens <= patch < math.prod(grid):
            raise ValueError(f"expected query in [0, {class_tokens + math.prod(grid)}); got {query}")
        return patch
    if len(query) != 2 or not all(0 <= whole("query", each) < side for each, side in zip(query, grid, strict=True)):
        raise ValueError(f"expected query as (row, column) within {grid[0]} × {grid[1]}; got {query}")
    return whole("query", query[0]) * grid[1] + whole("query", query[1])


def _grid(name: str, grid: Any, count: int | None, size: Grid) -> Grid:
    if grid is not None:
        sides = [whole(name, each) for each in grid]
        if len(sides) != 2 or min(sides) < 1 or count not in (None, math.prod(sides)):
            patches = "rows and columns" if count is None else f"{count} patches"
            raise ValueError(f"expected {name} of {patches}; got {' × '.join(map(str, sides))}")
        return sides[0], sides[1]
    assert count is not None
    found = _told(count, size)
    if found is None:
        before = next((each for each in range(1, MOST_BEFORE) if _told(count - each, size)), None)
        chosen = "; query=[...] places chosen ones" if name == "grid" else ""
        hint = chosen if before is None else f"; behind a class token or registers they do: class_tokens={before}"
        raise ValueError(
            f"expected {name}, as {count} patches do not tell theirs on {size[0]} × {size[1]} pixels{hint}"
        )
    return found


def _told(count: int, size: Grid) -> Grid | None:
    """Rows and columns of so many patches that are about squares."""
    rows = math.isqrt(max(0, count * size[0] // size[1]))
    near = [
        each
        for each in (rows, rows + 1)
        if 0 < each <= count and count % each == 0 and _is_alike(each, count // each, size)
    ]
    return (near[0], count // near[0]) if near else None


def _is_alike(rows: int, columns: int, size: Grid) -> bool:
    return abs(math.log((rows / columns) / (size[0] / size[1]))) < 0.1
