"""Shapes as one line for each function, and what binds its letters and words the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attention_core._arrays import Array, shape_text, shapes_differ, sizes, sizes_differ
from attention_core._checks.arguments import (
    HEADS_FIRST,
    ORDER,
    check_bias,
    check_boolean,
    check_broadcastable,
    check_device,
    check_floating,
    check_integer,
    check_like,
    check_rank,
)

KINDS: dict[str, Any] = {"floating": check_floating, "integer": check_integer, "boolean": check_boolean}
WORDS = ("optional", "to", *KINDS)  # "to": it broadcasts to these axes
Known = dict[str, Any]
Hint = Callable[[str, Any, Known], str]


class Shape(NamedTuple):
    """The shape of one argument: letters are sizes, alike wherever they stand; ``...`` are the leading axes.

    ``H/G`` is a G that divides H. ``like`` names the argument whose dtype and device it has, ``on`` that of the device.
    """

    name: str
    has_leading: bool
    axes: tuple[str, ...]
    words: tuple[str, ...]
    like: str
    on: str


def shapes_of(line: str) -> tuple[Shape, ...]:
    """Read a line such as ``"query: ... H M D floating, key: ... H/G N D like query"``."""
    found = []
    for each in line.split(","):
        name, _, text = each.strip().partition(": ")
        text, _, on = text.partition(" on ")
        text, _, like = text.partition(" like ")
        marks = text.split()
        axes = tuple(mark for mark in marks if mark not in (*WORDS, "..."))
        found.append(Shape(name, "..." in marks, axes, tuple(mark for mark in marks if mark in WORDS), like, on))
    return tuple(found)


def check_shapes(
    shapes: tuple[Shape, ...], arrays: Mapping[str, Any], known: Known | None = None, hint: Hint | None = None
) -> Known:
    """Raise unless arrays have the shapes of a line; return the size of each letter."""
    known = {} if known is None else known
    for shape in shapes:
        array = arrays[shape.name]
        if array is None and "optional" in shape.words:
            continue
        is_spread = "to" in shape.words
        check_rank(shape.name, array, 0 if is_spread else len(shape.axes), _text(shape, {}))
        for word in shape.words:
            if word in KINDS:
                KINDS[word](shape.name, array)
        if shape.like:
            check_like(shape.name, array, shape.like, arrays[shape.like])
        if shape.on:
            check_device(shape.name, array, shape.on, arrays[shape.on])
        dims = sizes(array)
        if is_spread:
            check_broadcastable(shape.name, array, (*known.get("...", ()), *(known[axis] for axis in shape.axes)))
        elif _differs(dims, shape, known):
            model = f" to match {shape.like} {shape_text(arrays[shape.like])}" if shape.like else ""
            why = _swapped_hint(dims, shape, shapes, known) or ("" if hint is None else hint(shape.name, array, known))
            raise ValueError(f"expected {shape.name} {_text(shape, known)}{model}; got {shape_text(array)}{why}")
        else:
            count = len(dims) - len(shape.axes)
            known |= {axis.rpartition("/")[2]: dim for axis, dim in zip(shape.axes, dims[count:], strict=True)}
            known |= {"...": dims[:count]} if shape.has_leading else {}
    return known


def _differs(dims: tuple[int | None, ...], shape: Shape, known: Known) -> bool:
    count = len(dims) - len(shape.axes)
    leading = known.get("...", dims[:count]) if shape.has_leading else ()
    goal = [_size(axis, dim, known) for axis, dim in zip(shape.axes, dims[count:], strict=True)]
    return shapes_differ(dims, (*leading, *goal))


def _size(axis: str, dim: int | None, known: Known) -> int | None:
    """What an axis has to have, which is what it has where that is free."""
    whole, _, letter = axis.rpartition("/")
    if letter in known:
        size: int | None = known[letter]
        return size
    heads = known.get(whole)
    is_free = heads is None or dim is None or dim == heads or (0 < dim <= heads and heads % dim == 0)
    return dim if is_free else heads


def _text(shape: Shape, known: Known) -> str:
    texts = [*known.get("...", ["..."])] if shape.has_leading else []
    for axis in shape.axes:
        whole, _, letter = axis.rpartition("/")
        is_part = letter not in known and known.get(whole)
        texts.append(f"heads that divide {known[whole]}" if is_part else known.get(letter, known.get(whole, letter)))
    inside = ", ".join("?" if each is None else str(each) for each in texts)
    return f"({inside},)" if len(texts) == 1 and shape.axes else f"({inside})"


def _swapped_hint(dims: tuple[int | None, ...], shape: Shape, shapes: tuple[Shape, ...], known: Known) -> str:
    """What to write where heads come after positions, in this array alone or in that which it is like, too."""
    if len(dims) < 3 or len(shape.axes) < 3:
        return ""
    swapped = (*dims[:-3], dims[-2], dims[-3], dims[-1])
    if not _differs(swapped, shape, known):
        return HEADS_FIRST.format(shape.name)
    first, second = next((each.axes[-3:-1] for each in shapes if each.name == shape.like), ("", ""))
    if "/" in first or not {first, second} <= set(known) or "/" not in shape.axes[-3]:
        return ""
    changed = known | {first: known[second], second: known[first]}
    return "" if _differs(swapped, shape, changed) else HEADS_FIRST.format(f"{shape.like} and {shape.name}")


_ATTENTION = shapes_of("query: ... H M D floating, key: ... H/G N D like query, value: ... G N E like key")


def check_attention(query: Array, key: Array, value: Array, bias: Array | None) -> None:
    """Raise unless query, key, value and bias fit together; where key and value changed places, say so."""

    def hint(name: str, array: Array, known: Known) -> str:
        if name == "key":
            return ORDER if sizes(value)[-1:] == (known["D"],) != sizes(key)[-1:] else ""
        lengths, widths = zip(sizes(array)[-2:], sizes(key)[-2:], strict=True)
        return ORDER if sizes_differ(*lengths) and not sizes_differ(*widths) else ""

    known = check_shapes(_ATTENTION, {"query": query, "key": key, "value": value}, hint=hint)
    if bias is not None:
        check_bias(bias, query, (*known["..."], known["H"], known["M"], known["N"]))
