"""Views of weights: of text, of pictures, of long sequences, and of two attentions compared."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from attention_view.codes import DECADES, encode, levels_of
from attention_view.model import Map, Part, Picture, Show
from attention_view.places import picture_of
from attention_view.sources import Source, reduced, sources_of, whole
from attention_view.views import View

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
    class_tokens: int = 0,
    query: Any = None,
    other: Any = None,
    sample: int = 0,
    heads: Sequence[int] | None = None,
    title: str = "Attention",
) -> View:
    """Make a view of weights: of one layer or several, of text, of a picture, or of a long sequence.

    Long sequences are kept as the largest weight of each block, at several resolutions. Of a large picture,
    some queries are kept, in rows and columns. Recorded calls and `Computed` compute these without M × N numbers at a
    time.

    Parameters
    ----------
    attention : Array, Attention, RecordedAttention, Computed, or a sequence of them
        Weights (..., H, M, N) of any library, or what has or computes them. A list or tuple has one for each layer, of
        any lengths. One of lists or tuples has the layers of each step, as ``generate`` of transformers returns them.
    tokens, key_tokens : sequence of str, optional
        Of queries and of keys; of both, if there are as many keys. Special tokens are dimmed. Layers of several lengths
        take those that have their lengths.
    padding : Array of bool, shape (N,), optional
        ``True`` at padding, which is dimmed.
    image : path or Array of shape (height, width), (height, width, 3) or (height, width, 4), optional
        What queries and keys are patches of. Floats are in [0, 1].
    grid, key_grid : tuple of int, optional
        Rows and columns of queries and of keys on the picture; by default as square as the picture.
    class_tokens : int
        Queries and keys before the patches, such as 1 for a class token.
    query : int, tuple of int, or a list of them, optional
        The query that is looked at first: its number, or its row and column on the picture, by default in the middle.
        Of a list, these alone are kept, or are the queries that ``attention`` has.
    other : optional
        A second attention of the same shapes, to be compared.
    sample : int
        Of the batch.
    heads : sequence of int, optional
        By default all.
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
    sources = sources_of(attention, sample, heads)
    others = None if other is None else sources_of(other, sample, heads)
    _check_other(sources, others)
    picture, first = None, 0
    notes: list[str] = []
    if image is not None:
        count = sum(len(each.heads) for each in sources) * (1 if others is None else 3)
        grids = {"grids": (grid, key_grid), "class_tokens": class_tokens, "query": query}
        picture, first, notes = _on_picture(image, [*sources, *(others or ())], count, **grids)
    elif query is not None:
        if isinstance(query, tuple | list):
            raise TypeError(f"expected image with rows, columns or several queries; got query {query} without one")
        first = whole("query", query)
        if not 0 <= first < sources[0].rows:
            raise ValueError(f"expected query in [0, {sources[0].rows}); got {query}")
    layers = [
        _Layer(i, source, [source.some] if each is None else [source.some, each.some, _difference(source, each)])
        for i, (source, each) in enumerate(itertools.zip_longest(sources, others or ()))
    ]
    parts: dict[tuple[int, int], list[_Layer]] = {}
    for layer in layers:
        parts.setdefault((layer.source.rows, layer.source.columns), []).append(layer)
    _check_names(tokens, key_tokens, padding, list(parts))
    counts = [sum(len(each.source.heads) * len(each.shows) for each in chosen) for chosen in parts.values()]
    codes = sum(count * math.prod(lengths) for count, lengths in zip(counts, parts, strict=True))
    bits = 16 if codes <= min(EXACT_CODES, MOST_CODES) else 8
    most = MOST_CODES if codes <= MOST_CODES else MOST_CODES // len(parts)
    maps: list[Map] = []
    for (lengths, chosen), count in zip(parts.items(), counts, strict=True):
        part = _part(lengths, tokens, key_tokens, padding)
        block = _block(lengths, count, most)
        maps += [each for layer in chosen for each in _maps(part, block, bits, layer)]
        if block != (1, 1):
            notes.append(f"Each cell is the largest of at most {block[0]} × {block[1]} weights.")
    maps.sort(key=lambda each: each.layer)
    names = ["weights"] if others is None else ["first", "second", "difference"]
    shows = [Show(name, "difference" if name == "difference" else "weights", bits, DECADES[bits]) for name in names]
    return View(title, shows, maps, first, picture, notes=list(dict.fromkeys(notes)))


class _Layer(NamedTuple):
    """A layer: its number, where its weights come from, and a function of queries for each kind of map."""

    number: int
    source: Source
    shows: Sequence[Any]


def _maps(part: Part, block: tuple[int, int], bits: int, layer: _Layer) -> Iterator[Map]:
    """The maps of a layer."""
    for show, some in enumerate(layer.shows):
        found = reduced(some, layer.source.shape, block)
        for head, each in zip(layer.source.heads, found, strict=True):
            yield Map(layer.number, head, show, part, levels_of(encode(each, bits), block))


def _difference(first: Source, second: Source) -> Any:
    """A function that gives absolute differences; NaN in one alone is NaN, in both no difference."""

    def some(queries: range) -> Any:
        pair = [each.some(queries).astype(np.float64) for each in (first, second)]
        both = np.isnan(pair[0]) & np.isnan(pair[1])
        return np.where(both, 0.0, abs(pair[0] - pair[1]))

    return some


def _block(lengths: tuple[int, int], count: int, most: int) -> tuple[int, int]:
    """The block of queries × keys behind each code of the finest level."""
    if lengths[0] * lengths[1] * count <= most:
        return 1, 1
    sizes = [-(-length // MOST_ROWS) for length in lengths]
    cells = count * math.prod(-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    more = math.sqrt(max(1, cells / most))
    rows, columns = (min(length, math.ceil(size * more)) for length, size in zip(lengths, sizes, strict=True))
    return rows, columns


def _on_picture(
    image: Any, sources: Sequence[Source], count: int, *, grids: Any, class_tokens: int, query: Any
) -> tuple[Picture, int, list[str]]:
    """A picture of ``count`` maps, the row of its query, and a note; sources keep what there is room for."""
    lengths = {(each.rows, each.columns) for each in sources}
    if len(lengths) > 1:
        raise ValueError(f"expected layers of the same lengths with an image; got {sorted(lengths)}")
    ((rows, columns),) = lengths
    most = MOST_CODES // (columns * count)
    picture, kept, first = picture_of(image, (rows, columns), grids, class_tokens=class_tokens, query=query, most=most)
    if kept is None:
        return picture, first, []
    for each in sources:
        each.keep(kept)
    return picture, first, [f"{len(kept):,} of {rows:,} queries are kept."]


def _check_other(sources: list[Source], others: list[Source] | None) -> None:
    if others is None:
        return
    told = [[(len(each.heads), each.rows, each.columns) for each in several] for several in (sources, others)]
    if told[0] != told[1]:
        raise ValueError(f"expected other of layers (heads, queries, keys) {told[0]}; got {told[1]}")


def _check_names(tokens: Any, key_tokens: Any, padding: Any, lengths: Sequence[tuple[int, int]]) -> None:
    """Refuse tokens and padding where no layer has as many queries or keys."""
    rows, columns = (sorted(set(each)) for each in zip(*lengths, strict=True))
    for name, found, wanted in (("tokens", tokens, rows), ("key_tokens", key_tokens, columns)):
        if isinstance(found, str | os.PathLike) or not (found is None or hasattr(found, "__len__")):
            raise TypeError(f"expected {name} as a sequence of str; got a {type(found).__name__}")
        if found is not None and len(found) not in wanted:
            raise ValueError(f"expected {' or '.join(map(str, wanted))} {name}, one for each; got {len(found)}")
    flags = np.zeros(columns[0], bool) if padding is None else np.asarray(padding)
    if flags.dtype != np.bool_ or flags.ndim != 1 or len(flags) not in columns:
        shapes = " or ".join(f"({each},)" for each in columns)
        raise ValueError(f"expected padding {shapes} of bool; got {flags.shape} of {flags.dtype}")


def _part(lengths: tuple[int, int], tokens: Any, key_tokens: Any, padding: Any) -> Part:
    """Queries and keys of some lengths, with the tokens and the padding that are as many."""
    names: list[Sequence[str] | None] = []
    dimmed: list[Sequence[int]] = []
    for length, candidates in zip(lengths, ((tokens, key_tokens), (key_tokens, tokens)), strict=True):
        found = next((each for each in candidates if each is not None and len(each) == length), None)
        names.append(None if found is None else [str(token) for token in found])
        hidden = {i for i, token in enumerate(names[-1] or ()) if SPECIAL.fullmatch(token)}
        if padding is not None and len(padding) == length:
            hidden |= set(np.flatnonzero(padding).tolist())
        dimmed.append(sorted(hidden))
    return Part(lengths, (names[0], names[1]), (dimmed[0], dimmed[1]))
