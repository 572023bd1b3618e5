"""Shapes as one line for each function, and what binds its letters and words the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._arrays import Array, named_branches, shape_text, shapes_differ, sizes, sizes_differ
from .._keywords import kept
from .arguments import (
    HEADS_FIRST,
    ORDER,
    check_added_dtype,
    check_boolean,
    check_broadcastable,
    check_device,
    check_floating,
    check_integer,
    check_like,
    check_rank,
)

KINDS: dict[str, Any] = {"floating": check_floating, "integer": check_integer, "boolean": check_boolean}
WORDS = ("optional", "to", "...", *KINDS)  # "to": it broadcasts to these axes
Known = dict[str, Any]
Hint = Callable[[str, Any, Known], str]


class Axis(NamedTuple):
    """A letter, and the heads that it divides (``/``), or that have so many channels each (``*``)."""

    heads: str
    mark: str
    letter: str


class Shape(NamedTuple):
    """The shape of one argument: letters are sizes, alike wherever they stand; ``...`` are the leading axes.

    ``H/G`` is a G that divides H, and ``H*D`` the channels of H heads of width D. ``like`` names the argument whose
    dtype and device it has, ``on`` that of the device, and ``adds to`` that to whose scores it is added.
    """

    name: str
    axes: tuple[Axis, ...]
    words: tuple[str, ...]
    like: str
    on: str
    adds_to: str
    text: str


@kept
def shapes_of(line: str) -> tuple[Shape, ...]:
    """Read a line such as ``"query: ... H M D floating, key: ... H/G N D like query"``."""
    found = []
    for each in line.split(", "):
        name, _, text = each.partition(": ")
        text, _, adds_to = text.partition(" adds to ")
        text, _, on = text.partition(" on ")
        text, _, like = text.partition(" like ")
        marks = text.split()
        axes = tuple(Axis(*mark.rpartition("*" if "*" in mark else "/")) for mark in marks if mark not in WORDS)
        shape = Shape(name, axes, tuple(mark for mark in marks if mark in WORDS), like, on, adds_to, "")
        found.append(shape._replace(text=_text(shape, {})))
    return tuple(found)


def linear_shapes(name: str, x: str, to: str, like: str = "") -> str:
    """The line of a linear map to some channels, and of what it takes, or of the letter of its channels alone."""
    like, weight = f" like {like}" if like else "", f"{name}.weight"
    taken = f", {x} like {weight}" if ":" in x else ""
    return f"{weight}: {x.split()[-1]} {to}{like}{taken}, {name}.bias: optional {to} like {weight}"


def check_shapes(line: str, arrays: Mapping[str, Any], known: Known | None = None, hint: Hint | None = None) -> Known:
    """Raise unless arrays, or those in trees, have the shapes of a line; return the size of each letter."""
    known, shapes, arrays = {} if known is None else known, shapes_of(line), _named(arrays)
    origins: dict[str, str] = {}
    for shape in shapes:
        name, array = shape.name, arrays.get(shape.name)
        if array is None and "optional" in shape.words:
            continue
        is_spread = "to" in shape.words
        check_rank(name, array, 0 if is_spread else len(shape.axes), shape.text)
        for word in shape.words:
            if word in KINDS:
                KINDS[word](name, array)
        if shape.like:
            check_like(name, array, shape.like, arrays[shape.like])
        if shape.adds_to:
            check_added_dtype(name, array, arrays[shape.adds_to])
        if model := shape.on or shape.adds_to:
            check_device(name, array, model, arrays[model])
        dims = sizes(array)
        if is_spread:
            check_broadcastable(name, array, (*known.get("...", ()), *(known[axis.letter] for axis in shape.axes)))
            continue
        axis = _difference(dims, shape, known)
        if axis is not None:
            model = origins.get(axis.letter) or origins.get(axis.heads) or shape.like
            model = f" to match {model} {shape_text(arrays[model])}" if model not in ("", name) else ""
            are_arrays = all(hasattr(arrays.get(each.name), "shape") for each in shapes if "optional" not in each.words)
            why = _swapped_hint(dims, shape, shapes, known)
            why = why or (hint(name, array, known) if hint is not None and are_arrays else "")
            raise ValueError(f"expected {name} {_text(shape, known)}{model}; got {shape_text(array)}{why}")
        count = len(dims) - len(shape.axes)
        found: Known = {"...": dims[:count]} if "..." in shape.words else {}
        for axis, dim in zip(shape.axes, dims[count:], strict=True):
            found[axis.letter] = dim // known[axis.heads] if axis.mark == "*" and dim is not None else dim
        for letter, size in found.items():
            origins.setdefault(letter, "" if letter in known else name)
            if known.get(letter) is None:
                known[letter] = size
    return known


def _named(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by the names of a line; those of parameters have the names of their fields.

    A tree has its own name, too, as one in the place of an array is not a missing one.
    """
    found = dict(arrays)
    for name, value in arrays.items():
        is_array = hasattr(value, "dtype")  # as `PreparedWeight` is
        if isinstance(value, tuple) and hasattr(value, "_fields") and not is_array:
            found |= _named(dict(named_branches(value, name)))
    return found


LEADING = Axis("", "", "...")


def _difference(dims: tuple[int | None, ...], shape: Shape, known: Known) -> Axis | None:
    """The first axis that does not fit what is known; `LEADING` for those of the batch."""
    count = len(dims) - len(shape.axes)
    if shapes_differ(dims[:count], known.get("...", dims[:count]) if "..." in shape.words else ()):
        return LEADING if "..." in shape.words or not shape.axes else shape.axes[0]  # of too many
    for axis, dim in zip(shape.axes, dims[count:], strict=True):
        if sizes_differ(dim, _size(axis, dim, known)):
            return axis
    return None


def _size(axis: Axis, dim: int | None, known: Known) -> Any:
    """What an axis has to have, which is what it has where that is free."""
    heads, mark, letter = axis
    size, count = known.get(letter), known.get(heads)
    if letter in known:
        return count * size if mark == "*" and size is not None else size
    if count is None or dim is None or dim == count:
        return dim
    is_free = dim % count == 0 if mark == "*" else 0 < dim <= count and count % dim == 0
    return dim if is_free else count


def _text(shape: Shape, known: Known) -> str:
    texts = [*known.get("...", ["..."])] if "..." in shape.words else []
    for axis in shape.axes:
        heads, mark, letter = axis
        if letter in known:
            texts.append(_size(axis, None, known))
        elif known.get(heads):
            texts.append(f"heads that divide {known[heads]}" if mark == "/" else f"channels of {known[heads]} heads")
        else:
            texts.append(known.get(heads, letter if mark == "/" else "".join(axis)))
    inside = ", ".join("?" if each is None else str(each) for each in texts)
    return f"({inside},)" if len(texts) == 1 and texts != ["..."] else f"({inside})"


def _swapped_hint(dims: tuple[int | None, ...], shape: Shape, shapes: tuple[Shape, ...], known: Known) -> str:
    """What to write where heads come after positions, in this array alone or in that which it is like, too."""
    if len(dims) < 3 or len(shape.axes) < 3:
        return ""
    models = [each.axes for each in shapes if each.name == shape.like and len(each.axes) > 2]
    swapped = (*dims[:-3], dims[-2], dims[-3], dims[-1])
    if _difference(swapped, shape, known) is None:
        return HEADS_FIRST.format(shape.name)
    first, second = (axis.letter for axis in models[0][-3:-1]) if models else ("", "")
    if not {first, second} <= set(known) or shape.axes[-3].mark != "/":
        return ""
    changed = known | {first: known[second], second: known[first]}
    fits = _difference(swapped, shape, changed) is None
    return HEADS_FIRST.format(f"{shape.like} and {shape.name}") if fits else ""


_ATTENTION = (
    "query: ... H M D floating, key: ... H/G N D like query, value: ... G N E like key,"
    " bias: optional to ... H M N adds to query"
)


def check_attention(query: Array, key: Array, value: Array, bias: Array | None) -> None:
    """Raise unless query, key, value and bias fit together; where key and value changed places, say so."""

    def hint(name: str, array: Array, known: Known) -> str:
        if name == "key":
            return ORDER if sizes(value)[-1:] == (known["D"],) != sizes(key)[-1:] else ""
        lengths, widths = zip(sizes(array)[-2:], sizes(key)[-2:], strict=True)
        return ORDER if sizes_differ(*lengths) and not sizes_differ(*widths) else ""

    check_shapes(_ATTENTION, {"query": query, "key": key, "value": value, "bias": bias}, hint=hint)


def check_bias(bias: Array, query: Array, target: tuple[int | None, ...]) -> None:
    """Raise unless a bias is of the query's type, or that of the computation, and broadcasts to scores."""
    check_shapes("bias: to ... adds to query", {"bias": bias, "query": query}, {"...": target})
