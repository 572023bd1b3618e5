"""Views of masks: which query may attend to which key, fully masked rows, blocks that are skipped, and two compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attention_core.backend import get_backend
from attention_core.masks import Given, Mask, Positions, Spans
from attention_view.codes import Level, cell_sizes, levels_of, share_codes
from attention_view.model import Map, Part, Show
from attention_view.sources import as_numpy, whole
from attention_view.views import View

MOST_ROWS = 1024
MOST_BLOCKS = 2**20
OPEN_AXES = (None,) * 8  # axes before the heads, of which nothing is known
SKIPPED, PARTIAL, FULL = 0, 1, 2


def view_mask(
    mask: Any,
    num_queries: int,
    num_keys: int,
    /,
    *,
    other: Any = None,
    head: int = 0,
    sample: int = 0,
    block: tuple[int, int] | None = None,
    title: str = "Mask",
) -> View:
    """Make a view of a mask: allowed and masked pairs, fully masked rows, and the blocks that are skipped.

    Parameters
    ----------
    mask : Mask or Array of bool
        A rule of `attention_core.masks`, or an array that is broadcastable to (..., H, M, N).
    num_queries, num_keys : int
        M, N.
    other : Mask or Array of bool, optional
        A second mask, to be compared.
    head, sample : int
        Of a mask that depends on them.
    block : tuple of int, optional
        Queries and keys of a block; by default the most that one head has in the NumPy backend.
    title : str

    Returns
    -------
    View

    Examples
    --------
    >>> from attention_core.masks import Causal
    >>> print(view_mask(Causal(), 4, 4))
    Mask: 4 queries × 4 keys, 10 of 16 pairs allowed
    █···
    ██··
    ███·
    ████
    · masked, █ allowed
    """
    lengths = (num_queries, num_keys)
    for name, length in (("num_queries", num_queries), ("num_keys", num_keys)):
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"expected {name} as a positive integer; got {length!r}")
    for name, index in (("head", head), ("sample", sample)):
        if whole(name, index) < 0:
            raise ValueError(f"expected {name} of at least 0; got {index}")
    rules = [_rule(each) for each in (mask, *(() if other is None else (other,)))]
    for rule in rules:
        rule.check((*OPEN_AXES, None, *lengths))
    rules_at = [(rule, head, sample) for rule in rules]
    size = max(1, math.ceil(max(lengths) / MOST_ROWS))
    cell = (min(size, num_queries), min(size, num_keys))
    counts, empty, classes = _counted(rules_at, lengths, cell)
    pairs = cell_sizes(lengths, cell)
    names = ["mask"] if other is None else ["first", "second"]
    shows = [Show(name, "share") for name in names]
    notes = [_told(*each, lengths) for each in zip(names, counts, empty, strict=True)]
    part = Part(lengths)
    maps = [Map(0, 0, i, part, levels_of(share_codes(each / pairs), cell, _mean)) for i, each in enumerate(counts)]
    if classes is not None:
        shows.append(Show("difference", "class"))
        maps.append(Map(0, 0, 2, part, levels_of(classes, cell, _merged)))
        notes.append("The masks are the same." if classes.max() <= 1 else "The masks differ.")
    tuning = get_backend("numpy").tuning
    sizes = (
        _pair(block)
        if block is not None
        else (min(num_queries, tuning.queries, tuning.keys), min(num_keys, tuning.keys))
    )
    kinds = _blocks(rules[0], lengths, sizes, (head, sample))
    notes.append(
        f"Of {kinds.size} blocks of {sizes[0]} × {sizes[1]}, {int((kinds == SKIPPED).sum())} are skipped, and "
        f"{int((kinds == FULL).sum())} need no mask."
    )
    return View(title, shows, maps, blocks=Level(kinds, sizes), notes=notes)


def _pair(block: Any) -> tuple[int, int]:
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise TypeError(f"expected block as (queries, keys); got {block!r}")
    return whole("block", block[0]), whole("block", block[1])


def _rule(mask: Any) -> Mask:
    return mask if isinstance(mask, Mask) else Given(as_numpy(mask))


def _allowed(at: tuple[Mask, int, int], queries: range, num_keys: int) -> Any:
    """Which of some queries may attend to which key."""
    rule, head, sample = at
    rows = np.arange(queries.start, queries.stop, dtype=np.int32)[:, None]
    positions = Positions(np.int32(sample), np.int32(head), rows, np.arange(num_keys, dtype=np.int32))
    return _of_one(rule.allowed(positions, xp=get_backend("numpy").namespace), (head, sample), (len(rows), num_keys))


def _of_one(found: Any, at: tuple[int, int], shape: tuple[int, int]) -> Any:
    """Flags of one head and sample, out of those of all, or of what all share."""
    head, sample = at
    found = np.asarray(found)
    if found.ndim > 2:
        found = found.reshape(-1, *found.shape[-3:])
        for name, index in (("sample", sample), ("head", head)):
            if index >= len(found) != 1:
                raise ValueError(f"expected {name} in [0, {len(found)}); got {index}")
            found = found[min(index, len(found) - 1)]
    return np.broadcast_to(found, shape)


def _counted(rules: Any, lengths: tuple[int, int], cell: tuple[int, int]) -> tuple[list[Any], list[Any], Any]:
    """By mask, the allowed pairs of each cell and the fully masked rows; of two masks, the class of each cell."""
    rows, columns = lengths
    starts = np.arange(0, columns, cell[1])
    counts: list[list[Any]] = [[] for _ in rules]
    empty: list[list[int]] = [[] for _ in rules]
    both: list[Any] = []
    for first in range(0, rows, cell[0]):
        queries = range(first, min(first + cell[0], rows))
        flags = [_allowed(each, queries, columns) for each in rules]
        for i, each in enumerate(flags):
            counts[i].append(np.add.reduceat(each.sum(axis=0), starts))
            empty[i] += (first + np.flatnonzero(~each.any(axis=1))).tolist()
        if len(flags) == 2:
            kinds = np.where(flags[0], np.where(flags[1], 1, 2), np.where(flags[1], 3, 0))
            low, high = (each.reduceat(each.reduce(kinds, axis=0), starts) for each in (np.minimum, np.maximum))
            both.append(np.where(low == high, low, 4).astype(np.uint8))
    return [np.stack(each) for each in counts], empty, np.stack(both) if both else None


def _mean(first: Any, second: Any) -> Any:
    """The share of two cells, which is none or all of the pairs only if it is so in both."""
    mean = np.clip((first.astype(np.int32) + second) // 2, 1, 254)
    return np.where(first == second, first, mean).astype(np.uint8)


def _merged(first: Any, second: Any) -> Any:
    return np.where(first == second, first, 4).astype(np.uint8)


def _told(name: str, counts: Any, empty: list[int], lengths: tuple[int, int]) -> str:
    told = f"{name}: {int(counts.sum()):,} of {lengths[0] * lengths[1]:,} pairs allowed"
    if not empty:
        return f"{told}, no fully masked row"
    listed = ", ".join(map(str, empty[:8])) + (", …" if len(empty) > 8 else "")
    return f"{told}, fully masked rows: {len(empty)} ({listed})"


def _blocks(rule: Mask, lengths: tuple[int, int], sizes: tuple[int, int], at: tuple[int, int]) -> Any:
    """Which blocks are skipped, masked in part, or allowed as a whole, as far as the rule says."""
    if min(sizes) < 1:
        raise ValueError(f"expected block of positive numbers; got {sizes}")
    count = math.prod(-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    if count > MOST_BLOCKS:
        raise ValueError(
            f"expected block so large that there are at most {MOST_BLOCKS}; got {sizes}, which are {count}"
        )
    firsts = [np.arange(0, length, size, dtype=np.int32) for length, size in zip(lengths, sizes, strict=True)]
    lasts = [
        np.minimum(first + (size - 1), length - 1).astype(np.int32)
        for first, length, size in zip(firsts, lengths, sizes, strict=True)
    ]
    query = Spans(firsts[0][:, None], lasts[0][:, None], sizes[0])
    key = Spans(firsts[1], lasts[1], sizes[1])
    shape = (len(firsts[0]), len(firsts[1]))
    some, every = (_of_one(each, at, shape) for each in rule.blocks(query, key, xp=get_backend("numpy").namespace))
    return np.where(some, np.where(every, FULL, PARTIAL), SKIPPED).astype(np.uint8)
