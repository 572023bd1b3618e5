"""Masks as pytrees: a static tree definition, and the arrays at its leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from attention_core._arrays import OURS, Array, shape_text, sizes
from attention_core._checks import check_device
from attention_core._keywords import untraced
from attention_core.masks._mask import Mask, Sizes, as_mask
from attention_core.masks._rules import MaskFunction


class Leaf(NamedTuple):
    """An array of a tree: its index among the arrays, and how many axes it has after the leading ones.

    An array within a tuple is passed on whole: its ``axes`` are -1.
    """

    place: int
    axes: int


def flatten(rule: Any, arrays: list[Array], axes: int = 0, /) -> Any:
    """Append the arrays of a rule, or of another dataclass, to a list, and return the tree definition.

    The definition is nested tuples ``(class, *fields)`` with a `Leaf` for each array. It compares by value.
    """
    if rule is None or isinstance(rule, int) or type(rule) is float:  # of a symbol of torch.compile nothing is asked
        return rule
    if hasattr(rule, "dtype"):
        arrays.append(rule)
        return Leaf(len(arrays) - 1, axes)
    if isinstance(rule, tuple):
        return tuple, *(flatten(item, arrays, -1) for item in rule)
    if is_dataclass(rule):
        axes_of: dict[str, int] = rule.axes if isinstance(rule, Mask) else {}
        names = [field.name for field in fields(rule)]
        return type(rule), *(flatten(getattr(rule, name), arrays, axes_of.get(name, 0)) for name in names)
    return rule


def unflatten(treedef: Any, arrays: Any, /) -> Any:
    """Build the rule of a tree definition, with these arrays as its leaves."""
    if isinstance(treedef, Leaf):
        return arrays[treedef.place]
    if not isinstance(treedef, tuple):
        return treedef
    kind, *branches = treedef
    values = [unflatten(branch, arrays) for branch in branches]
    return tuple(values) if kind is tuple else _unchecked(kind, values)


@untraced
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple([field.name for field in fields(kind)])


def _unchecked(kind: type[Any], values: list[Any]) -> Any:
    """A frozen dataclass with these fields, without ``__post_init__``: traced arrays cannot be checked again."""
    rule = object.__new__(kind)
    for name, value in zip(_field_names(kind), values, strict=True):
        object.__setattr__(rule, name, value)
    return rule


def leaves(treedef: Any, /) -> list[Leaf]:
    """The leaves of a tree definition, in order."""
    if isinstance(treedef, Leaf):
        return [treedef]
    return [leaf for branch in treedef[1:] for leaf in leaves(branch)] if isinstance(treedef, tuple) else []


def classes(treedef: Any, /) -> Iterator[type]:
    """The classes of a tree definition, in order."""
    if isinstance(treedef, type) and treedef is not tuple:
        yield treedef
    elif isinstance(treedef, tuple):
        for branch in treedef:
            yield from classes(branch)


def is_of_users(kind: type, /) -> bool:
    """Whether a class of masks is none of ours, so that nothing is known of what it looks at."""
    return not kind.__module__.startswith(OURS)


def may_count(treedef: Any, /) -> bool:
    """Whether a rule may look at batch and head, as one of a function or of a class of users does."""
    return any(kind is MaskFunction or is_of_users(kind) for kind in classes(treedef))


def check_mask(mask: Any, target: Sizes, query: Array) -> None:
    """Raise unless a mask fits scores of shape (..., H, M, N) and lies on the device of the query."""
    rule = as_mask(mask)
    rule.check(target)
    for array in mask_arrays(rule).values():
        check_device("mask", array, "query", query)


def check_covered(mask: Mask | Array, starts: tuple[Any, Any], lengths: tuple[int | None, int | None]) -> None:
    """Raise if arrays of a mask are known to end before the last query or key of a piece."""
    arrays: list[Array] = []
    treedef = flatten(as_mask(mask), arrays)
    for array, leaf in zip(arrays, leaves(treedef), strict=True):
        for axis, start, length in zip((-2, -1), starts, lengths, strict=True):
            if leaf.axes != 3 or len(array.shape) < -axis or not isinstance(start, int) or length is None:
                continue
            size = sizes(array)[axis]
            if size not in (None, 1) and size < start + length:
                raise ValueError(
                    f"expected a mask over all positions of the whole, at least {start + length} on axis {axis}; got"
                    f" {shape_text(array)}"
                )


def mask_arrays(mask: Mask | Array | None) -> dict[str, Array]:
    """The arrays of a mask by name, by which its library is found."""
    arrays: list[Array] = []
    flatten(None if mask is None else as_mask(mask), arrays)
    return {"mask" if len(arrays) == 1 else f"mask[{index}]": array for index, array in enumerate(arrays)}
