"""Which query may attend which key: True = may attend, everywhere.

A mask is a boolean array, or one of the structured masks here, combined with ``&``, ``|`` and ``~``. A structured mask
is a rule about positions: it needs no more memory than its own arrays, and it can tell a block of positions that is
attended nowhere, or everywhere, from one that must be looked at.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any

from attention_core._checks import (
    check_boolean,
    check_broadcastable,
    check_device,
    check_floating,
    check_integer,
    check_number,
    check_positive,
    check_rank,
    shape_text,
    sizes,
)
from attention_core._namespace import array_namespace, dtype_name, index_dtype, is_concrete, positions, rows_at, shape
from attention_core._typing import Array, Namespace

__all__ = [
    "Block",
    "Causal",
    "KeyLengths",
    "Mask",
    "Segments",
    "SlidingWindow",
    "mask_from_additive",
    "mask_from_ignore",
    "mask_from_integers",
    "mask_from_lengths",
    "mask_from_padding",
    "mask_from_query_key",
]

Sizes = tuple[int | None, ...]
_FAR = 2**29  # beyond all positions, and three times as far still fits their type


class Block(Enum):
    """What a mask lets through in a block of query and key positions."""

    EMPTY = "empty"
    FULL = "full"
    MIXED = "mixed"


class Mask(ABC):
    """A rule about positions that says which query may attend which key."""

    @abstractmethod
    def allowed(self, query: Array, key: Array, /, *, xp: Namespace) -> Array:
        """Apply the rule to positions.

        Parameters
        ----------
        query : Array of int32, shape (M,)
        key : Array of int32, shape (N,)
        xp : array namespace

        Returns
        -------
        Array of bool, broadcastable to (..., H, M, N)
        """

    def block(self, query: range, key: range, /) -> Block:
        """Tell from positions alone what passes in a block; MIXED where that cannot be told."""
        return Block.MIXED

    def check(self, target: Sizes, /) -> None:  # noqa: B027 (a rule without arrays fits everywhere)
        """Raise unless the arrays of the rule fit scores of shape (..., H, M, N)."""

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that the rule holds."""
        return ()

    def __and__(self, other: Mask | Array) -> Mask:
        return And(self, as_mask(other))

    def __or__(self, other: Mask | Array) -> Mask:
        return Or(self, as_mask(other))

    def __invert__(self) -> Mask:
        return Not(self)

    __rand__ = __and__
    __ror__ = __or__
    __array_ufunc__ = None  # so that NumPy leaves `array & mask` to the mask


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Keys up to the position of the query: ``key <= query + offset``.

    Parameters
    ----------
    offset : int or Array of int, shape (...)
        Added to the query's position: 0 is top-left; with P keys in a cache it is P; it may be negative, and differ
        along the leading axes (those before the heads).

    Examples
    --------
    >>> import array_api_strict as xp
    >>> Causal().allowed(xp.arange(2), xp.arange(3), xp=xp)
    Array([[ True, False, False],
           [ True,  True, False]], dtype=array_api_strict.bool)
    """

    offset: Any = 0

    def __post_init__(self) -> None:
        _check_integral("offset", self.offset)

    def allowed(self, query: Array, key: Array, /, *, xp: Namespace) -> Array:
        return xp.less_equal(key, _shifted(query, self.offset, xp))

    def block(self, query: range, key: range, /) -> Block:
        return _window_block(query, key, self.offset, None, 0)

    def check(self, target: Sizes, /) -> None:
        _check_leading("offset", self.offset, target)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return _arrays(self.offset)


@dataclass(frozen=True, eq=False)
class SlidingWindow(Mask):
    """Keys near the position of the query: ``p - left <= key <= p + right`` with ``p = query + offset``.

    Parameters
    ----------
    left, right : int, optional
        How far before and after; ``None`` is without limit.
    offset : int or Array of int, shape (...)
        As in `Causal`.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> SlidingWindow(left=1, right=0).allowed(xp.arange(3), xp.arange(3), xp=xp)
    Array([[ True, False, False],
           [ True,  True, False],
           [False,  True,  True]], dtype=array_api_strict.bool)
    """

    left: int | None = None
    right: int | None = None
    offset: Any = 0

    def __post_init__(self) -> None:
        for name, reach in (("left", self.left), ("right", self.right)):
            if reach is not None and (isinstance(reach, bool) or not isinstance(reach, int)):
                raise TypeError(f"expected {name} as an integer or None; got {type(reach).__name__}")
            if reach is not None and reach < 0:
                raise ValueError(f"expected {name} >= 0; got {reach}")
        _check_integral("offset", self.offset)

    def allowed(self, query: Array, key: Array, /, *, xp: Namespace) -> Array:
        centre = _shifted(query, self.offset, xp)
        near = xp.ones_like(key, dtype=xp.bool)
        if self.left is not None:
            near = xp.logical_and(near, xp.greater_equal(key, xp.subtract(centre, _limited(self.left))))
        if self.right is not None:
            near = xp.logical_and(near, xp.less_equal(key, xp.add(centre, _limited(self.right))))
        return near

    def block(self, query: range, key: range, /) -> Block:
        return _window_block(query, key, self.offset, self.left, self.right)

    def check(self, target: Sizes, /) -> None:
        _check_leading("offset", self.offset, target)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return _arrays(self.offset)


@dataclass(frozen=True, eq=False)
class KeyLengths(Mask):
    """The first ``lengths`` keys: ``key < lengths``, as padding at the end asks for.

    Parameters
    ----------
    lengths : int, or Array of int, shape (...)
        Not negative; one for every entry of the leading axes (those before the heads).

    Raises
    ------
    TypeError, ValueError
        When lengths are not integers, or negative (where their values can be read).

    Examples
    --------
    >>> import array_api_strict as xp
    >>> KeyLengths(2).allowed(xp.arange(1), xp.arange(3), xp=xp)
    Array([ True,  True, False], dtype=array_api_strict.bool)
    """

    lengths: Any

    def __post_init__(self) -> None:
        _check_integral("lengths", self.lengths)
        least, _ = _extent(self.lengths)
        if least is not None and least < 0:
            raise ValueError(f"expected lengths >= 0; got {least}")

    def allowed(self, query: Array, key: Array, /, *, xp: Namespace) -> Array:
        return xp.less(key, _per_sample(self.lengths, key, xp))

    def block(self, query: range, key: range, /) -> Block:
        least, most = _extent(self.lengths)
        if most is not None and key[0] >= most:
            return Block.EMPTY
        return Block.FULL if least is not None and key[-1] < least else Block.MIXED

    def check(self, target: Sizes, /) -> None:
        _check_leading("lengths", self.lengths, target)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return _arrays(self.lengths)


@dataclass(frozen=True, eq=False)
class Segments(Mask):
    """Keys of the query's own segment: ``query_ids == key_ids``, as documents packed into one sequence ask for.

    Parameters
    ----------
    query_ids : Array of int, shape (..., M)
    key_ids : Array of int, shape (..., N)

    Examples
    --------
    >>> import array_api_strict as xp
    >>> ids = xp.asarray([0, 0, 1])
    >>> Segments(ids, ids).allowed(xp.arange(3), xp.arange(3), xp=xp)
    Array([[ True,  True, False],
           [ True,  True, False],
           [False, False,  True]], dtype=array_api_strict.bool)
    """

    query_ids: Array
    key_ids: Array

    def __post_init__(self) -> None:
        for name, ids in (("query_ids", self.query_ids), ("key_ids", self.key_ids)):
            check_rank(name, ids, 1, "(..., length)")
            check_integer(name, ids)
        if self.query_ids.dtype != self.key_ids.dtype:
            own, other = dtype_name(self.query_ids.dtype), dtype_name(self.key_ids.dtype)
            raise TypeError(f"expected key_ids of dtype {own} to match query_ids; got {other}")

    def allowed(self, query: Array, key: Array, /, *, xp: Namespace) -> Array:
        query_ids, key_ids = (
            xp.astype(ids, index_dtype(ids, xp=xp), copy=False) for ids in (self.query_ids, self.key_ids)
        )
        own = xp.expand_dims(rows_at(query_ids, query, axis=-1, xp=xp), axis=-1)  # (..., M, 1)
        other = xp.expand_dims(rows_at(key_ids, key, axis=-1, xp=xp), axis=-2)  # (..., 1, N)
        same = xp.equal(own, other)
        return same if len(same.shape) == 2 else xp.expand_dims(same, axis=-3)

    def check(self, target: Sizes, /) -> None:
        *leading, _, rows, columns = target
        for name, ids, length in (("query_ids", self.query_ids, rows), ("key_ids", self.key_ids, columns)):
            check_broadcastable(name, ids, (*leading, length))
            if sizes(ids)[-1] == 1 and length not in (1, None):
                raise ValueError(f"expected {name} (..., {length}); got (..., 1)")

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.query_ids, self.key_ids


@dataclass(frozen=True, eq=False)
class Given(Mask):
    """A boolean array, broadcastable to (..., H, M, N), as part of a structured mask."""

    mask: Array

    def __post_init__(self) -> None:
        check_boolean("mask", self.mask)

    def allowed(self, query: Array, key: Array, /, *, xp: Namespace) -> Array:
        mask = self.mask
        for axis, places in ((-2, query), (-1, key)):
            size = sizes(mask)[axis] if len(mask.shape) >= -axis else 1
            if size is None:  # it may turn out to be 1
                places = xp.minimum(places, xp.subtract(shape(mask, xp=xp)[axis], 1))
            mask = mask if size == 1 else rows_at(mask, places, axis=axis, xp=xp)
        return mask

    def check(self, target: Sizes, /) -> None:
        check_broadcastable("mask", self.mask, target)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self.mask,)


@dataclass(frozen=True, eq=False)
class _Pair(Mask):
    first: Mask
    second: Mask

    def check(self, target: Sizes, /) -> None:
        self.first.check(target)
        self.second.check(target)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.first.arrays + self.second.arrays


class And(_Pair):
    """What both masks allow."""

    def allowed(self, query: Array, key: Array, /, *, xp: Namespace) -> Array:
        return xp.logical_and(self.first.allowed(query, key, xp=xp), self.second.allowed(query, key, xp=xp))

    def block(self, query: range, key: range, /) -> Block:
        kinds = {self.first.block(query, key), self.second.block(query, key)}
        return Block.EMPTY if Block.EMPTY in kinds else Block.FULL if kinds == {Block.FULL} else Block.MIXED


class Or(_Pair):
    """What one of two masks allows."""

    def allowed(self, query: Array, key: Array, /, *, xp: Namespace) -> Array:
        return xp.logical_or(self.first.allowed(query, key, xp=xp), self.second.allowed(query, key, xp=xp))

    def block(self, query: range, key: range, /) -> Block:
        kinds = {self.first.block(query, key), self.second.block(query, key)}
        return Block.FULL if Block.FULL in kinds else Block.EMPTY if kinds == {Block.EMPTY} else Block.MIXED


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """What a mask does not allow."""

    mask: Mask

    def allowed(self, query: Array, key: Array, /, *, xp: Namespace) -> Array:
        return xp.logical_not(self.mask.allowed(query, key, xp=xp))

    def block(self, query: range, key: range, /) -> Block:
        opposite = {Block.EMPTY: Block.FULL, Block.FULL: Block.EMPTY, Block.MIXED: Block.MIXED}
        return opposite[self.mask.block(query, key)]

    def check(self, target: Sizes, /) -> None:
        self.mask.check(target)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.mask.arrays


def mask_from_ignore(mask: Array, /, *, xp: Namespace | None = None) -> Array:
    """Turn a mask whose True means *ignore* (PyTorch's ``key_padding_mask``) into one whose True means *may attend*.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_ignore(xp.asarray([False, True]))
    Array([ True, False], dtype=array_api_strict.bool)
    """
    xp = array_namespace(mask) if xp is None else xp
    check_boolean("mask", mask)
    return xp.logical_not(mask)


def mask_from_integers(mask: Array, /, *, xp: Namespace | None = None) -> Array:
    """Turn a mask of integers, 1 = may attend and 0 = ignore (a tokenizer's ``attention_mask``), into a boolean one.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_integers(xp.asarray([1, 0]))
    Array([ True, False], dtype=array_api_strict.bool)
    """
    xp = array_namespace(mask) if xp is None else xp
    check_integer("mask", mask)
    return xp.not_equal(mask, 0)


def mask_from_additive(mask: Array, /, *, threshold: float = -1000.0, xp: Namespace | None = None) -> Array:
    """Turn a mask that is added to scores (0 = may attend; -10000 or -inf = ignore) into a boolean one.

    Parameters
    ----------
    mask : Array of floating point
    threshold : float
        What is not above it is ignored.
    xp : array namespace, optional

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_additive(xp.asarray([0.0, -10000.0]))
    Array([ True, False], dtype=array_api_strict.bool)
    """
    xp = array_namespace(mask) if xp is None else xp
    check_floating("mask", mask)
    check_number("threshold", threshold)
    return xp.greater(mask, float(threshold))


def mask_from_lengths(lengths: Array, key_length: int, /, *, xp: Namespace | None = None) -> Array:
    """Turn lengths of shape (...) into a boolean mask of shape (..., 1, 1, N): the first ``lengths`` of N keys.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_lengths(xp.asarray([1, 3]), 3).shape
    (2, 1, 1, 3)
    """
    xp = array_namespace(lengths) if xp is None else xp
    check_positive("key_length", key_length)
    rule = KeyLengths(lengths)
    key = positions(key_length, lengths, xp=xp)
    return rule.allowed(key, key, xp=xp)


def mask_from_padding(mask: Array, /, *, xp: Namespace | None = None) -> Array:
    """Turn a boolean mask over keys, (..., N), into one for attention, (..., 1, 1, N).

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_padding(xp.ones((2, 5), dtype=xp.bool)).shape
    (2, 1, 1, 5)
    """
    xp = array_namespace(mask) if xp is None else xp
    check_rank("mask", mask, 1, "(..., N)")
    check_boolean("mask", mask)
    return xp.expand_dims(xp.expand_dims(mask, axis=-2), axis=-2)


def mask_from_query_key(query_mask: Array, key_mask: Array, /, *, xp: Namespace | None = None) -> Array:
    """Turn a mask over queries, (..., M), and one over keys, (..., N), into their outer product, (..., 1, M, N).

    Examples
    --------
    >>> import array_api_strict as xp
    >>> mask_from_query_key(xp.ones((2, 3), dtype=xp.bool), xp.ones((2, 5), dtype=xp.bool)).shape
    (2, 1, 3, 5)
    """
    xp = array_namespace(query_mask, key_mask) if xp is None else xp
    for name, mask in (("query_mask", query_mask), ("key_mask", key_mask)):
        check_rank(name, mask, 1, "(..., length)")
        check_boolean(name, mask)
    if sizes(query_mask)[:-1] != sizes(key_mask)[:-1]:
        expected = f"the leading axes of query_mask {shape_text(query_mask)}"
        raise ValueError(f"expected key_mask with {expected}; got {shape_text(key_mask)}")
    both = xp.logical_and(xp.expand_dims(query_mask, axis=-1), xp.expand_dims(key_mask, axis=-2))
    return xp.expand_dims(both, axis=-3)


def check_mask(mask: Any, target: Sizes, query: Array) -> None:
    """Raise unless a mask of either kind fits scores of shape (..., H, M, N), and lies on the device of the query."""
    rule = as_mask(mask)
    rule.check(target)
    for array in rule.arrays:
        check_device("mask", array, "query", query)


def allowed_pairs(mask: Mask | Array, query: Array, key: Array, /, *, xp: Namespace) -> Array:
    """A mask of either kind as a boolean array that broadcasts to the scores of query and key."""
    if not isinstance(mask, Mask):
        return mask if len(mask.shape) else xp.reshape(mask, (1,))
    rows, columns = shape(query, xp=xp)[-2], shape(key, xp=xp)[-2]
    return mask.allowed(positions(rows, query, xp=xp), positions(columns, key, xp=xp), xp=xp)


def mask_arrays(mask: Mask | Array | None) -> tuple[Array | None, ...]:
    """The arrays of a mask of either kind, which take part in finding the library."""
    return mask.arrays if isinstance(mask, Mask) else (mask,)


def as_mask(mask: Mask | Array) -> Mask:
    """A mask of either kind as a structured one."""
    return mask if isinstance(mask, Mask) else Given(mask)


def _arrays(value: Any) -> tuple[Array, ...]:
    return () if isinstance(value, int) else (value,)


def _check_integral(name: str, value: Any) -> None:
    if hasattr(value, "dtype"):
        check_integer(name, value)
    elif isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} as an integer or an integer array; got {type(value).__name__}")


def _check_leading(name: str, value: Any, target: Sizes) -> None:
    if not isinstance(value, int):
        check_broadcastable(name, value, target[:-3])


def _extent(value: Any) -> tuple[int | None, int | None]:
    """The least and the largest of some integers; ``None`` where they cannot be read, or there are none."""
    if isinstance(value, int):
        return value, value
    if 0 in sizes(value) or not is_concrete(value):
        return None, None
    xp = array_namespace(value)
    value = xp.astype(value, index_dtype(value, xp=xp))
    return int(xp.min(value)), int(xp.max(value))


def _per_sample(value: Any, like: Array, xp: Namespace) -> Any:
    """An integer as it is; an array of the leading axes with axes for heads, queries and keys."""
    if isinstance(value, int):
        return _limited(value)
    if dtype_name(value.dtype) in ("uint32", "int64", "uint64"):
        value = xp.clip(xp.astype(value, index_dtype(value, xp=xp)), -_FAR, _FAR)
    value = xp.astype(value, like.dtype)
    for _ in range(3 if len(value.shape) else 0):
        value = xp.expand_dims(value, axis=-1)
    return value


def _limited(value: int) -> int:
    return max(-_FAR, min(value, _FAR))


def _shifted(query: Array, offset: Any, xp: Namespace) -> Array:
    """The position that a query counts from, as a column: (M, 1), or (..., 1, M, 1) with an array of offsets."""
    return xp.add(xp.expand_dims(query, axis=-1), _per_sample(offset, query, xp))


def _window_block(query: range, key: range, offset: Any, left: int | None, right: int | None) -> Block:
    least, most = _extent(offset)
    if least is None or most is None:
        return Block.MIXED
    before, after = math.inf if left is None else left, math.inf if right is None else right
    nearest, farthest = key[0] - (query[-1] + most), key[-1] - (query[0] + least)  # of key - p over the block
    if nearest > after or farthest < -before:
        return Block.EMPTY
    return Block.FULL if nearest >= -before and farthest <= after else Block.MIXED
