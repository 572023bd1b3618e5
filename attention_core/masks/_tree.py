"""Checks of the arrays of masks, and what is known of their classes."""

from __future__ import annotations

from typing import Any

from .._arrays import OURS, Array, shape_text, sizes
from .._checks import check_device
from .._trees import classes, flatten, leaves
from ._mask import Mask, Sizes, as_mask
from ._rules import MaskFunction


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
