"""A mask as a static tree definition and its arrays, as in JAX's pytrees."""

from __future__ import annotations

from typing import Any, NamedTuple

from attention_core._arrays import Array, shape_text, sizes
from attention_core._checks import check_device
from attention_core.masks._mask import Mask, Sizes, as_mask


class Leaf(NamedTuple):
    """The place of an array in an `outline`, and how many axes it has after the leading ones."""

    place: int
    axes: int


def flatten(rule: Any, arrays: list[Array], axes: int = 0, /) -> Any:
    """A rule, or another dataclass, without its arrays, as nested tuples that compare by value.

    The arrays are appended to a list.
    """
    if hasattr(rule, "dtype"):
        arrays.append(rule)
        return Leaf(len(arrays) - 1, axes)
    if isinstance(rule, tuple):
        return tuple, *(flatten(each, arrays, -1) for each in rule)
    if hasattr(rule, "__match_args__"):
        own = rule.axes if isinstance(rule, Mask) else {}
        return type(rule), *(flatten(getattr(rule, name), arrays, own.get(name, 0)) for name in rule.__match_args__)
    return rule


def unflatten(form: Any, arrays: Any, /) -> Any:
    """The rule of an outline, with arrays in its slots; what was checked once is not checked again."""
    if isinstance(form, Leaf):
        return arrays[form.place]
    if not isinstance(form, tuple):
        return form
    kind, *fields = form
    values = [unflatten(field, arrays) for field in fields]
    if kind is tuple:
        return tuple(values)
    rule = object.__new__(kind)
    for name, value in zip(kind.__match_args__, values, strict=True):
        object.__setattr__(rule, name, value)
    return rule


def leaves(form: Any, /) -> list[Leaf]:
    """The slots of an outline, in order."""
    if isinstance(form, Leaf):
        return [form]
    return [slot for field in form[1:] for slot in leaves(field)] if isinstance(form, tuple) else []


def check_mask(mask: Any, target: Sizes, query: Array) -> None:
    """Raise unless a mask of either kind fits scores of shape (..., H, M, N), and lies on the device of the query."""
    rule = as_mask(mask)
    rule.check(target)
    for array in mask_arrays(rule):
        check_device("mask", array, "query", query)


def check_covered(mask: Mask | Array, starts: tuple[Any, Any], lengths: tuple[int | None, int | None]) -> None:
    """Raise if arrays of a mask are seen to end before the last query or key of a piece."""
    held: list[Array] = []
    form = flatten(as_mask(mask), held)
    for array, slot in zip(held, leaves(form), strict=True):
        for axis, start, length in zip((-2, -1), starts, lengths, strict=True):
            if slot.axes != 3 or len(array.shape) < -axis or not isinstance(start, int) or length is None:
                continue
            size = sizes(array)[axis]
            if size not in (None, 1) and size < start + length:
                raise ValueError(
                    f"expected a mask over all positions of the whole, at least {start + length} on axis {axis}; got"
                    f" {shape_text(array)}"
                )


def mask_arrays(mask: Mask | Array | None) -> tuple[Array | None, ...]:
    """The arrays of a mask of either kind, which take part in finding the library."""
    if not isinstance(mask, Mask):
        return (mask,)
    found: list[Array] = []
    flatten(mask, found)
    return tuple(found)
