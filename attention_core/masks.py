"""Which query may attend which key: True = may attend, everywhere.

A mask is a boolean array, or one of the structured masks here, combined with ``&``, ``|`` and ``~``. A structured mask
is a rule about positions: it needs no more memory than its own arrays, and it can tell a block of positions that is
attended nowhere, or everywhere, from one that must be looked at.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from attention_core._checks import (
    check_boolean,
    check_broadcastable,
    check_device,
    check_floating,
    check_function,
    check_integer,
    check_number,
    check_positive,
    check_rank,
    shape_text,
    sizes,
)
from attention_core._namespace import array_namespace, beside, dtype_name, index_dtype, is_concrete, rows_at, shape
from attention_core._typing import Array, Namespace

__all__ = [
    "Causal",
    "KeyLengths",
    "Mask",
    "MaskFunction",
    "Positions",
    "Segments",
    "SlidingWindow",
    "Spans",
    "mask_from_additive",
    "mask_from_ignore",
    "mask_from_integers",
    "mask_from_lengths",
    "mask_from_padding",
    "mask_from_query_key",
]

Sizes = tuple[int | None, ...]
_FAR = 2**29  # beyond all positions, and three times as far still fits their type


class Positions(NamedTuple):
    """Where scores stand: int32 arrays that broadcast against each other to the shape of the scores.

    Attributes
    ----------
    batch : Array
        Counted over all leading axes as one, in row-major order; of shape (..., 1, 1, 1), or () for a single entry.
    head : Array
        Of the query, as a column before the last two axes.
    query : Array, shape (M, 1)
    key : Array, shape (N,)
    """

    batch: Array
    head: Array
    query: Array
    key: Array


class Spans(NamedTuple):
    """Runs of positions, one for each block: the first and the last position, and how many fit in a block.

    Attributes
    ----------
    first, last : Array of int32, shape (blocks, 1) for queries and (blocks,) for keys
    size : int
    """

    first: Array
    last: Array
    size: int


class Mask(ABC):
    """A rule about positions that says which query may attend which key.

    A rule of your own is a frozen dataclass (``eq=False``) that derives from this class. Its fields, all of them
    positional, are numbers, arrays and other rules; `axes` names those whose arrays have axes after the leading ones.
    """

    axes: ClassVar[dict[str, int]] = {}

    @abstractmethod
    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        """Apply the rule to positions.

        Parameters
        ----------
        at : Positions
        xp : array namespace

        Returns
        -------
        Array of bool, broadcastable to (..., H, M, N)
        """

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array | bool, Array | bool]:
        """Tell from the ends of blocks in which of them something may be allowed, and in which everything is.

        Where that cannot be told, something may be allowed and not everything is.

        Returns
        -------
        some, every : Array of bool, broadcastable to (..., H, query blocks, key blocks), or bool
        """
        return True, False

    def reach(self) -> tuple[float, float]:
        """Between which limits ``key - query`` of an allowed pair lies, as far as is known without arrays."""
        return -math.inf, math.inf

    def is_relative(self) -> bool:
        """Whether the rule is known to look at ``key - query`` alone; a rule derived from another is not."""
        return False

    def check(self, target: Sizes, /) -> None:  # noqa: B027 (a rule without arrays fits everywhere)
        """Raise unless the arrays of the rule fit scores of shape (..., H, M, N)."""

    def to_array(self, num_queries: int, num_keys: int, /, *, like: Array | None = None, xp: Namespace) -> Array:
        """The rule as a boolean array, broadcastable to (..., H, M, N), for rules that do not ask for batch or head.

        Examples
        --------
        >>> import array_api_strict as xp
        >>> SlidingWindow(left=1, right=0).to_array(3, 3, xp=xp)
        Array([[ True, False, False],
               [ True,  True, False],
               [False,  True,  True]], dtype=array_api_strict.bool)
        """
        place = {} if like is None else beside(like)
        rows, columns = (xp.arange(length, dtype=xp.int32, **place) for length in (num_queries, num_keys))
        zero = xp.zeros((), dtype=xp.int32, **place)
        return self.allowed(Positions(zero, zero, xp.expand_dims(rows, axis=-1), columns), xp=xp)

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
    >>> Causal().to_array(2, 3, xp=xp)
    Array([[ True, False, False],
           [ True,  True, False]], dtype=array_api_strict.bool)
    """

    offset: Any = 0

    def __post_init__(self) -> None:
        _check_integral("offset", self.offset)

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return xp.less_equal(at.key, _shifted(at.query, self.offset, xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        some = xp.less_equal(key.first, _shifted(query.last, self.offset, xp))
        return some, xp.less_equal(key.last, _shifted(query.first, self.offset, xp))

    def reach(self) -> tuple[float, float]:
        return -math.inf, self.offset if isinstance(self.offset, int) else math.inf

    def is_relative(self) -> bool:
        return type(self) is Causal and isinstance(self.offset, int)

    def check(self, target: Sizes, /) -> None:
        _check_leading("offset", self.offset, target)


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
    >>> SlidingWindow(left=1, right=0).to_array(3, 3, xp=xp)
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

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return self._within(
            at.key, at.key, _shifted(at.query, self.offset, xp), _shifted(at.query, self.offset, xp), xp
        )

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        first, last = _shifted(query.first, self.offset, xp), _shifted(query.last, self.offset, xp)
        return self._within(key.first, key.last, first, last, xp), self._within(key.last, key.first, last, first, xp)

    def reach(self) -> tuple[float, float]:
        if not isinstance(self.offset, int):
            return -math.inf, math.inf
        left, right = (math.inf if reach is None else reach for reach in (self.left, self.right))
        return self.offset - left, self.offset + right

    def is_relative(self) -> bool:
        return type(self) is SlidingWindow and isinstance(self.offset, int)

    def _within(self, early: Array, late: Array, first: Array, last: Array, xp: Namespace) -> Array:
        """Whether an early key is within reach of the last position, and a late one within that of the first."""
        limits = []
        if self.right is not None:
            limits.append(xp.less_equal(early, xp.add(last, _limited(self.right))))
        if self.left is not None:
            limits.append(xp.greater_equal(late, xp.subtract(first, _limited(self.left))))
        if not limits:
            return xp.ones_like(xp.add(early, last), dtype=xp.bool)
        return limits[0] if len(limits) == 1 else xp.logical_and(*limits)

    def check(self, target: Sizes, /) -> None:
        _check_leading("offset", self.offset, target)


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
    >>> KeyLengths(2).to_array(1, 3, xp=xp)
    Array([ True,  True, False], dtype=array_api_strict.bool)
    """

    lengths: Any

    def __post_init__(self) -> None:
        _check_integral("lengths", self.lengths)
        least = _least(self.lengths)
        if least is not None and least < 0:
            raise ValueError(f"expected lengths >= 0; got {least}")

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return xp.less(at.key, _per_sample(self.lengths, at.key, xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        lengths = _per_sample(self.lengths, key.first, xp)
        return xp.less(key.first, lengths), xp.less(key.last, lengths)

    def check(self, target: Sizes, /) -> None:
        _check_leading("lengths", self.lengths, target)


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
    >>> Segments(ids, ids).to_array(3, 3, xp=xp)
    Array([[ True,  True, False],
           [ True,  True, False],
           [False, False,  True]], dtype=array_api_strict.bool)
    """

    query_ids: Array
    key_ids: Array
    axes: ClassVar[dict[str, int]] = {"query_ids": 1, "key_ids": 1}

    def __post_init__(self) -> None:
        for name, ids in (("query_ids", self.query_ids), ("key_ids", self.key_ids)):
            check_rank(name, ids, 1, "(..., length)")
            check_integer(name, ids)
        if self.query_ids.dtype != self.key_ids.dtype:
            own, other = dtype_name(self.query_ids.dtype), dtype_name(self.key_ids.dtype)
            raise TypeError(f"expected key_ids of dtype {own} to match query_ids; got {other}")

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        own, other = self._ids(at.query, self.query_ids, xp), self._ids(at.key, self.key_ids, xp)
        same = xp.equal(xp.expand_dims(own, axis=-1), xp.expand_dims(other, axis=-2))
        return same if len(same.shape) == 2 else xp.expand_dims(same, axis=-3)

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        (least, most), (low, high) = (
            self._extent(span, ids, xp) for span, ids in ((query, self.query_ids), (key, self.key_ids))
        )
        least, most = xp.expand_dims(least, axis=-1), xp.expand_dims(most, axis=-1)
        low, high = xp.expand_dims(low, axis=-2), xp.expand_dims(high, axis=-2)
        some = xp.logical_and(xp.less_equal(least, high), xp.less_equal(low, most))
        every = xp.logical_and(xp.equal(least, high), xp.equal(low, most))
        return tuple(kind if len(kind.shape) == 2 else xp.expand_dims(kind, axis=-3) for kind in (some, every))

    def _ids(self, at: Array, ids: Array, xp: Namespace) -> Array:
        ids = xp.astype(ids, index_dtype(ids, xp=xp), copy=False)
        *leading, length = shape(ids, xp=xp)
        if not isinstance(length, int):  # there may turn out to be none, and then there must be something to look at
            ids = xp.concat([ids, xp.zeros((*leading, 1), dtype=ids.dtype, **beside(ids))], axis=-1)
        return rows_at(ids, xp.reshape(at, (-1,)), axis=-1, xp=xp)

    def _extent(self, span: Spans, ids: Array, xp: Namespace) -> tuple[Array, Array]:
        """The least and the greatest id of every block: two of shape (..., blocks)."""
        places = xp.add(xp.reshape(span.first, (-1, 1)), xp.arange(span.size, dtype=xp.int32, **beside(span.first)))
        places = xp.minimum(places, xp.reshape(span.last, (-1, 1)))
        *leading, _ = shape(ids, xp=xp)
        count, size = shape(places, xp=xp)
        found = xp.reshape(self._ids(places, ids, xp), (*leading, count, size))
        return xp.min(found, axis=-1), xp.max(found, axis=-1)

    def check(self, target: Sizes, /) -> None:
        *leading, _, rows, columns = target
        for name, ids, length in (("query_ids", self.query_ids, rows), ("key_ids", self.key_ids, columns)):
            check_broadcastable(name, ids, (*leading, length))
            if sizes(ids)[-1] == 1 and length not in (1, None):
                raise ValueError(f"expected {name} (..., {length}); got (..., 1)")


@dataclass(frozen=True, eq=False)
class MaskFunction(Mask):
    """What a function of positions allows.

    Parameters
    ----------
    function : callable
        ``function(batch, head, query, key, *arrays)`` gives a boolean array of positions that broadcast against each
        other (see `Positions`), or ``&``, ``|`` of such. These are the arguments of ``mask_mod`` in PyTorch's
        FlexAttention.
    arrays : tuple of Array
        What the function needs besides; passed on whole.

    Raises
    ------
    TypeError
        When the function cannot be called, or something of the arrays is none.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> MaskFunction(lambda batch, head, query, key: (query + key) % 2 == 0).to_array(2, 3, xp=xp)
    Array([[ True, False,  True],
           [False,  True, False]], dtype=array_api_strict.bool)
    """

    function: Callable[..., Array]
    arrays: tuple[Array, ...] = ()

    def __post_init__(self) -> None:
        check_function("function", self.function, self.arrays)

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return self.function(*at, *self.arrays)


@dataclass(frozen=True, eq=False)
class Given(Mask):
    """A boolean array, broadcastable to (..., H, M, N), as part of a structured mask."""

    mask: Array
    axes: ClassVar[dict[str, int]] = {"mask": 3}

    def __post_init__(self) -> None:
        check_boolean("mask", self.mask)

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        mask = self.mask
        for axis, places in ((-2, at.query), (-1, at.key)):
            size = sizes(mask)[axis] if len(mask.shape) >= -axis else 1
            if size is None:  # it may turn out to be 1
                places = xp.minimum(places, xp.subtract(shape(mask, xp=xp)[axis], 1))
            mask = mask if size == 1 else rows_at(mask, xp.reshape(places, (-1,)), axis=axis, xp=xp)
        return mask

    def check(self, target: Sizes, /) -> None:
        check_broadcastable("mask", self.mask, target)


@dataclass(frozen=True, eq=False)
class _Pair(Mask):
    first: Mask
    second: Mask

    def check(self, target: Sizes, /) -> None:
        self.first.check(target)
        self.second.check(target)

    def is_relative(self) -> bool:
        return type(self) in (And, Or) and self.first.is_relative() and self.second.is_relative()


class And(_Pair):
    """What both masks allow."""

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return xp.logical_and(self.first.allowed(at, xp=xp), self.second.allowed(at, xp=xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array | bool, Array | bool]:
        kinds = zip(self.first.blocks(query, key, xp=xp), self.second.blocks(query, key, xp=xp), strict=True)
        some, every = (_both(*each, xp) for each in kinds)
        return some, every

    def reach(self) -> tuple[float, float]:
        lows, highs = zip(self.first.reach(), self.second.reach(), strict=True)
        return max(lows), min(highs)


class Or(_Pair):
    """What one of two masks allows."""

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return xp.logical_or(self.first.allowed(at, xp=xp), self.second.allowed(at, xp=xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array | bool, Array | bool]:
        kinds = zip(self.first.blocks(query, key, xp=xp), self.second.blocks(query, key, xp=xp), strict=True)
        some, every = (_either(*each, xp) for each in kinds)
        return some, every

    def reach(self) -> tuple[float, float]:
        lows, highs = zip(self.first.reach(), self.second.reach(), strict=True)
        return min(lows), max(highs)


def is_structured(mask: Any) -> bool:
    """Whether a mask may tell of blocks, from positions alone, that they are not to be computed."""
    if isinstance(mask, And):
        return is_structured(mask.first) or is_structured(mask.second)
    if isinstance(mask, Or):
        return is_structured(mask.first) and is_structured(mask.second)
    if isinstance(mask, Not):
        return is_structured(mask.mask)
    return isinstance(mask, Mask) and type(mask).blocks is not Mask.blocks


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """What a mask does not allow."""

    mask: Mask

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return xp.logical_not(self.mask.allowed(at, xp=xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array | bool, Array | bool]:
        some, every = self.mask.blocks(query, key, xp=xp)
        return _negated(every, xp), _negated(some, xp)

    def is_relative(self) -> bool:
        return type(self) is Not and self.mask.is_relative()

    def check(self, target: Sizes, /) -> None:
        self.mask.check(target)


@dataclass(frozen=True, eq=False)
class Appended(Mask):
    """What a mask allows among the first ``length`` keys, and all keys that were appended to them.

    Parameters
    ----------
    mask : Mask
    length : int or Array of int, shape ()
        Positive.
    """

    mask: Mask
    length: Any

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        inner = self.mask.allowed(at._replace(key=self._among(at.key, xp)), xp=xp)
        return xp.logical_or(inner, xp.greater_equal(at.key, self.length))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array | bool, Array | bool]:
        among = Spans(self._among(key.first, xp), self._among(key.last, xp), key.size)
        some, every = self.mask.blocks(query, among, xp=xp)
        # Of the keys that a block has in common with the first ones, the last at least is looked at in either case.
        appended = xp.greater_equal(key.last, self.length), xp.greater_equal(key.first, self.length)
        return _either(some, appended[0], xp), _either(every, appended[1], xp)

    def _among(self, places: Array, xp: Namespace) -> Array:
        return xp.minimum(places, xp.subtract(self.length, 1) if hasattr(self.length, "dtype") else self.length - 1)

    def check(self, target: Sizes, /) -> None:
        self.mask.check((*target[:-1], self.length if isinstance(self.length, int) else None))


def _both(first: Array | bool, second: Array | bool, xp: Namespace) -> Array | bool:
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    return xp.logical_and(first, second)


def _either(first: Array | bool, second: Array | bool, xp: Namespace) -> Array | bool:
    return _negated(_both(_negated(first, xp), _negated(second, xp), xp), xp)


def _negated(kind: Array | bool, xp: Namespace) -> Array | bool:
    return not kind if isinstance(kind, bool) else xp.logical_not(kind)


class Slot(NamedTuple):
    """The place of an array in an `outline`, and how many axes it has after the leading ones."""

    place: int
    axes: int


def outline(rule: Any, arrays: list[Array], axes: int = 0, /) -> Any:
    """A rule, or another dataclass, without its arrays, as nested tuples that compare by value.

    The arrays are appended to a list.
    """
    if hasattr(rule, "dtype"):
        arrays.append(rule)
        return Slot(len(arrays) - 1, axes)
    if isinstance(rule, tuple):
        return tuple, *(outline(each, arrays, -1) for each in rule)
    if hasattr(rule, "__match_args__"):
        own = rule.axes if isinstance(rule, Mask) else {}
        return type(rule), *(outline(getattr(rule, name), arrays, own.get(name, 0)) for name in rule.__match_args__)
    return rule


def rebuilt(form: Any, arrays: Any, /) -> Any:
    """The rule of an outline, with arrays in its slots; what was checked once is not checked again."""
    if isinstance(form, Slot):
        return arrays[form.place]
    if not isinstance(form, tuple):
        return form
    kind, *fields = form
    values = [rebuilt(field, arrays) for field in fields]
    if kind is tuple:
        return tuple(values)
    rule = object.__new__(kind)
    for name, value in zip(kind.__match_args__, values, strict=True):
        object.__setattr__(rule, name, value)
    return rule


def slots(form: Any, /) -> list[Slot]:
    """The slots of an outline, in order."""
    if isinstance(form, Slot):
        return [form]
    return [slot for field in form[1:] for slot in slots(field)] if isinstance(form, tuple) else []


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
    return rule.to_array(1, key_length, like=lengths, xp=xp)


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
    for array in mask_arrays(rule):
        check_device("mask", array, "query", query)


def check_covered(mask: Mask | Array, starts: tuple[Any, Any], lengths: tuple[int | None, int | None]) -> None:
    """Raise if arrays of a mask are seen to end before the last query or key of a piece."""
    held: list[Array] = []
    form = outline(as_mask(mask), held)
    for array, slot in zip(held, slots(form), strict=True):
        for axis, start, length in zip((-2, -1), starts, lengths, strict=True):
            if slot.axes != 3 or len(array.shape) < -axis or not isinstance(start, int) or length is None:
                continue
            size = sizes(array)[axis]
            if size not in (None, 1) and size < start + length:
                raise ValueError(
                    f"expected a mask over all positions of the whole, at least {start + length} on axis {axis}; got"
                    f" {shape_text(array)}"
                )


def allowed_pairs(mask: Mask | Array, at: Positions | None, /, *, xp: Namespace) -> Array:
    """A mask of either kind as a boolean array that broadcasts to scores at these positions."""
    if isinstance(mask, Mask):
        assert at is not None
        return mask.allowed(at, xp=xp)
    return mask if len(mask.shape) else xp.reshape(mask, (1,))


def mask_arrays(mask: Mask | Array | None) -> tuple[Array | None, ...]:
    """The arrays of a mask of either kind, which take part in finding the library."""
    if not isinstance(mask, Mask):
        return (mask,)
    found: list[Array] = []
    outline(mask, found)
    return tuple(found)


def as_mask(mask: Mask | Array) -> Mask:
    """A mask of either kind as a structured one."""
    return mask if isinstance(mask, Mask) else Given(mask)


def _check_integral(name: str, value: Any) -> None:
    if hasattr(value, "dtype"):
        check_integer(name, value)
    elif isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} as an integer or an integer array; got {type(value).__name__}")


def _check_leading(name: str, value: Any, target: Sizes) -> None:
    if not isinstance(value, int):
        check_broadcastable(name, value, target[:-3])


def _least(value: Any) -> int | None:
    """The least of some integers; ``None`` where they cannot be read, or there are none."""
    if isinstance(value, int):
        return value
    if 0 in sizes(value) or not is_concrete(value):
        return None
    xp = array_namespace(value)
    return int(xp.min(xp.astype(value, index_dtype(value, xp=xp))))


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
    """The positions that queries, a column, count from: (M, 1), or (..., 1, M, 1) with an array of offsets."""
    return xp.add(query, _per_sample(offset, query, xp))
