"""Views of weights: of text, of pictures, of long sequences, and of two attentions compared."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from attention_view.codes import DECADES, encode, levels_of, mean_levels
from attention_view.images import picture_of
from attention_view.model import Map, Show, View
from attention_view.sources import Source, reduced, sources_of

__all__ = ["view"]

REDUCTIONS = ("max", "mean")
EXACT_CODES = 2**22
"""Up to so many weights in all are kept one by one in 16 bits; more are kept in 8."""
MOST_CODES = 2**23
"""Of more, one number of each block is kept, in blocks so large that there are no more than this."""
MOST_ROWS = 2048
SPECIAL = frozenset({"[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<|endoftext|>"})


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
    title: str = "Attention",
) -> View:
    """Make a view of weights: of one layer or several, of text, of a picture, or of a long sequence.

    Long sequences are kept as the largest weight or the mean of each block, at several resolutions. Recorded calls and
    `Computed` compute these without M × N numbers at a time.

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
    shows_count = 1 if others is None else 3
    bits, block = _resolution(lengths, shows_count * sum(len(each.heads) for each in sources))
    if image is not None and block != (1, 1):
        limit = f"at most {MOST_CODES} weights and {MOST_ROWS} positions"
        raise ValueError(
            f"expected {limit} with an image; got {lengths[0]} × {lengths[1]}: choose heads, or downsample"
        )
    maps: list[Map] = []

    def add(layer: int, show: int, found: Any) -> None:
        for head, each in zip(sources[layer].heads, found, strict=True):
            mean = reduction == "mean"
            levels = mean_levels(each, bits, block, lengths) if mean else levels_of(encode(each, bits), block)
            maps.append(Map(layer, head, show, levels))

    for layer, source in enumerate(sources):
        add(layer, 0, source.reduced(block, reduction))
        if others is not None:
            second = others[layer]
            add(layer, 1, second.reduced(block, reduction))
            add(layer, 2, _difference(source, second, block, reduction))
    names = ["weights"] if others is None else ["first", "second", "difference"]
    shows = [Show(name, "difference" if name == "difference" else "weights", bits, DECADES[bits]) for name in names]
    kind = "mean" if reduction == "mean" else "largest"
    notes = [] if block == (1, 1) else [f"Each cell is the {kind} of at most {block[0]} × {block[1]} weights."]
    picture = None
    if image is not None:
        picture = picture_of(image, lengths, (grid, key_grid), prefix)
    dimmed = _dimmed(named, padding, lengths)
    return View(title, lengths, shows, maps, named, dimmed, picture, notes=notes, reduction=reduction)


def _difference(first: Source, second: Source, block: tuple[int, int], reduction: str) -> Any:
    """The largest absolute difference or the mean in each block; NaN in one alone is NaN, in both no difference."""

    def some(queries: range) -> Any:
        pair = [each.some(queries).astype(np.float64) for each in (first, second)]
        both = np.isnan(pair[0]) & np.isnan(pair[1])
        return np.where(both, 0.0, abs(pair[0] - pair[1]))

    return reduced(some, (len(first.heads), first.rows, first.columns), block, reduction)


def _resolution(lengths: tuple[int, int], count: int) -> tuple[int, tuple[int, int]]:
    """Bits of a code, and the block of queries × keys behind each code of the finest level."""
    codes = lengths[0] * lengths[1] * count
    if codes <= EXACT_CODES and max(lengths) <= MOST_ROWS:
        return 16, (1, 1)
    factor = max(1, math.ceil(max(lengths) / MOST_ROWS), math.ceil(math.sqrt(codes / MOST_CODES)))
    return 8, (min(factor, lengths[0]), min(factor, lengths[1]))


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
        if isinstance(found, str | os.PathLike):
            raise TypeError(f"expected {name} as a sequence of str; got a {type(found).__name__}")
        if found is not None and len(found) != length:
            raise ValueError(f"expected {length} {name}, one for each; got {len(found)}")
    told = [None if found is None else [str(token) for token in found] for found in (first, second)]
    return told[0], told[1]


def _dimmed(tokens: Any, padding: Any, lengths: tuple[int, int]) -> tuple[Sequence[int], Sequence[int]]:
    found = [{i for i, token in enumerate(each or ()) if token in SPECIAL} for each in tokens]
    if padding is not None:
        flags = np.asarray(padding)
        if flags.dtype != np.bool_ or flags.shape != (lengths[1],):
            raise ValueError(f"expected padding ({lengths[1]},) of bool; got {flags.shape} of {flags.dtype}")
        hidden = set(np.flatnonzero(flags).tolist())
        found[1] |= hidden
        if lengths[0] == lengths[1]:
            found[0] |= hidden
    return sorted(found[0]), sorted(found[1])
