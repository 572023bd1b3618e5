"""Masks of other conventions as boolean arrays whose True means *may attend*."""

from __future__ import annotations

from .._arrays import Array, Namespace, type_text
from .._backend import can_be_read, common_namespace
from .._checks import (
    check_boolean,
    check_floating,
    check_integer,
    check_number,
    check_shapes,
    number_text,
    only_array,
)


def mask_from_ignore(mask: Array, /, *, xp: Namespace | None = None) -> Array:
    """Turn a mask whose True means *ignore* (PyTorch's ``key_padding_mask``) into one whose True means *may attend*.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_ignore(xp.asarray([False, True]))
    Array([ True, False], dtype=array_api_strict.bool)
    """
    xp = common_namespace(xp, {"mask": mask})
    check_boolean("mask", mask)
    return xp.logical_not(mask)


def mask_from_integers(mask: Array, /, *, xp: Namespace | None = None) -> Array:
    """Turn a mask of integers (a tokenizer's ``attention_mask``: 1 = may attend, 0 = ignore) into a boolean one.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_integers(xp.asarray([1, 0]))
    Array([ True, False], dtype=array_api_strict.bool)
    """
    xp = common_namespace(xp, {"mask": mask})
    check_integer("mask", mask)
    others = xp.logical_and(xp.not_equal(mask, 0), xp.not_equal(mask, 1))
    _check_none(others, mask, "of 0 and 1", xp)
    return xp.not_equal(mask, 0)


def mask_from_additive(mask: Array, /, *, threshold: float = -1000.0, xp: Namespace | None = None) -> Array:
    """Turn a mask that is added to scores (0 = may attend; -10000 or -inf = ignore) into a boolean one.

    Parameters
    ----------
    mask : Array of floating point
    threshold : float
        Below 0. Keys whose number is not above it are ignored.
    xp : array namespace, optional

    Raises
    ------
    TypeError, ValueError
        When the mask is not of floating point, or has other numbers. While a compiler traces, numbers are not checked.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_additive(xp.asarray([0.0, -10000.0]))
    Array([ True, False], dtype=array_api_strict.bool)
    """
    xp = common_namespace(xp, {"mask": mask})
    check_floating("mask", mask)
    check_number("threshold", threshold)
    if only_array(threshold) is not None:
        raise TypeError(f"expected threshold as a number; got {type_text(threshold)}")
    if not threshold < 0:
        raise ValueError(f"expected threshold < 0; got {number_text(threshold)}")
    others = xp.logical_not(xp.logical_or(xp.equal(mask, 0), xp.less_equal(mask, float(threshold))))
    _check_none(others, mask, f"of 0 and numbers of at most {threshold}: other biases are for bias=", xp)
    return xp.greater(mask, float(threshold))


def _check_none(others: Array, mask: Array, expected: str, xp: Namespace) -> None:
    """Raise if numbers of a mask can be read without waiting, and some mean neither."""
    if can_be_read(mask) and bool(xp.any(others)):
        first = float(xp.min(xp.where(others, mask, xp.max(mask))))
        raise ValueError(f"expected mask {expected}; got {first:g}")


def mask_from_padding(mask: Array, /, *, xp: Namespace | None = None) -> Array:
    """Turn a boolean mask over keys, (..., N), into one for attention, (..., 1, 1, N).

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_padding(xp.ones((2, 5), dtype=xp.bool)).shape
    (2, 1, 1, 5)
    """
    xp = common_namespace(xp, {"mask": mask})
    check_shapes("mask: ... N boolean", {"mask": mask})
    return xp.expand_dims(xp.expand_dims(mask, axis=-2), axis=-2)
