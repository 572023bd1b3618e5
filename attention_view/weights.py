"""Views of weights: of text, of pictures, of long sequences, and of two attentions compared."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from attention_view.codes import DECADES, encode, levels_of, mean_levels
from attention_view.details import DETAIL_CODES, Kept, cells_of_window
from attention_view.images import picture_of
from attention_view.model import Map, Show
from attention_view.sources import Source, reduced, sources_of
from attention_view.views import View

__all__ = ["view"]

REDUCTIONS = ("max", "mean")
EXACT_CODES = 2**22
"""Up to so many weights in all are kept one by one in 16 bits; more are kept in 8."""
MOST_CODES = 2**23
"""Of more, one number of each block is kept, in blocks so large that there are no more than this."""
MOST_ROWS = 2048
SPECIAL = re.compile(r"\[(CLS|SEP|PAD)\]|</?s>|<(pad|bos|eos)>|<\|[^|]*\|>")


def view(
    attention: Any,
    /,
    *,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    padding: Any = None,
    image: Any = None,
    grid: tuple[int, int] | None = None,
    key_grid: tuple[int, int] | None = None,
    prefix: int = 0,
    other: Any = None,
    sample: int = 0,
    heads: Sequence[int] | None = None,
    reduction: str = "max",
    exact: tuple[slice, slice] | None = None,
    title: str = "Attention",
) -> View:
    """Make a view of weights: of one layer or several, of text, of a picture, or of a long sequence.

    Long sequences are kept as the largest weight or the mean of each block, at several resolutions; some blocks are
    also kept weight by weight. Recorded calls and `Computed` compute these without M × N numbers at a time.

    Parameters
    ----------
    attention : Array, RecordedAttention, Computed, or a sequence of them
        Weights (..., H, M, N) of any library, or what computes them; a list or tuple has one for each layer.
    tokens, key_tokens : sequence of str, optional
        Of queries and of keys; of both, if there are as many keys. Special tokens are dimmed.
    padding : Array of bool, shape (N,), optional
        ``True`` at padding, which is dimmed.
    image : path or Array of shape (height, width), (height, width, 3) or (height, width, 4), optional
        What queries and keys are patches of. Floats are in [0, 1].
    grid, key_grid : tuple of int, optional
        Rows and columns of queries and of keys on the picture; by default as square as the picture.
    prefix : int
        Queries and keys before the patches, such as a class token.
    other : optional
        A second attention of the same shapes, to be compared.
    sample : int
        Of the batch.
    heads : sequence of int, optional
        By default all.
    reduction : {"max", "mean"}
        What a cell shows that stands for several weights: the largest, or their mean.
    exact : tuple of slice, optional
        Queries and keys of a long sequence whose blocks are kept weight by weight, up to 2 million weights in all. By
        default, these are blocks with the largest cells, as many for every query.
    title : str

    Returns
    -------
    View

    Raises
    ------
    TypeError, ValueError
        When arguments do not fit each other.

    Examples
    --------
    >>> import numpy as np
    >>> view(np.full((1, 2, 2), 0.5), tokens=["a", "b"])
    View('Attention', 1 maps of 2 × 2)
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"expected reduction out of {', '.join(REDUCTIONS)}; got {reduction!r}")
    sources = sources_of(attention, sample, heads)
    others = None if other is None else sources_of(other, sample, heads)
    lengths = (sources[0].rows, sources[0].columns)
    _check_other(sources, others)
    named = _tokens(tokens, key_tokens, lengths)
    count = (1 if others is None else 3) * sum(len(each.heads) for each in sources)
    bits, block = _resolution(lengths, count)
    if image is not None and block != (1, 1):
        limit = f"at most {MOST_CODES} weights with an image"
        raise ValueError(
            f"expected {limit}; got {count} maps of {lengths[0]} × {lengths[1]}: choose heads, or downsample"
        )
    window = None if exact is None or block == (1, 1) else cells_of_window(exact, lengths, block, count)
    per_row = DETAIL_CODES // (count * -(-lengths[0] // block[0]) * math.prod(block))
    maps: list[Map] = []

    def add(layer: int, show: int, some: Any) -> None:
        kept = None if block == (1, 1) else Kept(block, lengths, per_row)
        found = reduced(some, sources[layer].shape, block, reduction, kept if window is None else None)
        if kept is not None and window is not None:
            kept.add_window(some, *window)
        details = kept.details(len(found)) if kept is not None else [None] * len(found)
        for head, each, some_blocks in zip(sources[layer].heads, found, details, strict=True):
            mean = reduction == "mean"
            levels = mean_levels(each, bits, block, lengths) if mean else levels_of(encode(each, bits), block)
            maps.append(Map(layer, head, show, levels, some_blocks))

    for layer, source in enumerate(sources):
        add(layer, 0, source.some)
        if others is not None:
            add(layer, 1, others[layer].some)
            add(layer, 2, _difference(source, others[layer]))
    names = ["weights"] if others is None else ["first", "second", "difference"]
    shows = [Show(name, "difference" if name == "difference" else "weights", bits, DECADES[bits]) for name in names]
    kind = "mean" if reduction == "mean" else "largest"
    notes = [] if block == (1, 1) else [f"Each cell is the {kind} of at most {block[0]} × {block[1]} weights."]
    if any(each.details is not None and len(each.details.places) for each in maps):
        told = "those with the largest" if exact is None else f"queries {_told(exact[0])} and keys {_told(exact[1])}"
        notes.append(f"Some blocks show each weight when zoomed in: {told}.")
    picture = None
    if image is not None:
        picture = picture_of(image, lengths, (grid, key_grid), prefix)
    dimmed = _dimmed(named, padding, lengths)
    return View(title, lengths, shows, maps, named, dimmed, picture, notes=notes, reduction=reduction)


def _told(chosen: slice) -> str:
    return f"{'' if chosen.start is None else chosen.start}:{'' if chosen.stop is None else chosen.stop}"


def _difference(first: Source, second: Source) -> Any:
    """A function that gives absolute differences; NaN in one alone is NaN, in both no difference."""

    def some(queries: range) -> Any:
        pair = [each.some(queries).astype(np.float64) for each in (first, second)]
        both = np.isnan(pair[0]) & np.isnan(pair[1])
        return np.where(both, 0.0, abs(pair[0] - pair[1]))

    return some


def _resolution(lengths: tuple[int, int], count: int) -> tuple[int, tuple[int, int]]:
    """Bits of a code, and the block of queries × keys behind each code of the finest level."""
    codes = lengths[0] * lengths[1] * count
    if codes <= MOST_CODES:
        return 16 if codes <= EXACT_CODES else 8, (1, 1)
    sizes = [-(-length // MOST_ROWS) for length in lengths]
    cells = count * math.prod(-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    more = math.sqrt(max(1, cells / MOST_CODES))
    rows, columns = (min(length, math.ceil(size * more)) for length, size in zip(lengths, sizes, strict=True))
    return 8, (rows, columns)


def _check_other(sources: list[Source], others: list[Source] | None) -> None:
    if others is None:
        return
    told = [[(len(each.heads), each.rows, each.columns) for each in several] for several in (sources, others)]
    if told[0] != told[1]:
        raise ValueError(f"expected other of layers (heads, queries, keys) {told[0]}; got {told[1]}")


def _tokens(first: Any, second: Any, lengths: tuple[int, int]) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    if second is None and lengths[0] == lengths[1]:
        second = first
    for name, found, length in (("tokens", first, lengths[0]), ("key_tokens", second, lengths[1])):
        if isinstance(found, str | os.PathLike) or not (found is None or hasattr(found, "__len__")):
            raise TypeError(f"expected {name} as a sequence of str; got a {type(found).__name__}")
        if found is not None and len(found) != length:
            raise ValueError(f"expected {length} {name}, one for each; got {len(found)}")
    told = [None if found is None else [str(token) for token in found] for found in (first, second)]
    return told[0], told[1]


def _dimmed(tokens: Any, padding: Any, lengths: tuple[int, int]) -> tuple[Sequence[int], Sequence[int]]:
    found = [{i for i, token in enumerate(each or ()) if SPECIAL.fullmatch(token)} for each in tokens]
    if padding is not None:
        flags = np.asarray(padding)
        if flags.dtype != np.bool_ or flags.shape != (lengths[1],):
            raise ValueError(f"expected padding ({lengths[1]},) of bool; got {flags.shape} of {flags.dtype}")
        hidden = set(np.flatnonzero(flags).tolist())
        found[1] |= hidden
        if lengths[0] == lengths[1]:
            found[0] |= hidden
    return sorted(found[0]), sorted(found[1])
