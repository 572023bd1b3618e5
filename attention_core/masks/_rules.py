"""The structured masks: causal, windows, lengths, segments, and functions.

A new rule is a class here, by the description of `Mask`, and an import and a name in `attention_core.masks`, which
registers it. A band that says more than the rule allows is not exact. PyTorch's kernel takes the rule as an array where
that is small. Others refuse it until ``RULES`` of `attention_torch.flex`, `flex_functions` and the guards know it. In
the kit, `problem.py`, `oracle/positions.py`, `drawn.py`, `ranks.py` and `sharded.py` know rules by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from attention_core._arrays import (
    Array,
    Namespace,
    dtype_name,
    dtypes_differ,
    index_dtype,
    on_device_of,
    shape,
    shape_text,
    sizes,
    sizes_differ,
    take_rows,
)
from attention_core._backend import array_namespace, can_be_read
from attention_core._checks import (
    check_allowed,
    check_arity,
    check_broadcastable,
    check_function,
    check_integer,
    check_offset,
    check_rank,
    number_text,
    plain_integer,
    result_of,
)
from attention_core.masks._mask import (
    LIMIT,
    UNKNOWN,
    And,
    Band,
    Mask,
    PairPositions,
    Positions,
    Sizes,
    Spans,
)


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Keys up to the position of the query: ``key <= query + offset``.

    Parameters
    ----------
    offset : int or Array of int, shape (...)
        Added to the query's position: 0 is top-left; with P keys in a cache it is P. It may be negative, and may differ
        along the leading axes (those before the heads). It is not the length, of which no mask has to know.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> Causal().to_array(2, 3, xp=xp)
    Array([[ True, False, False],
           [ True,  True, False]], dtype=array_api_strict.bool)
    """

    offset: Any = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", check_offset("offset", self.offset))

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return xp.less_equal(at.key, _with_offset(at.query, self.offset, xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        some = xp.less_equal(key.first, _with_offset(query.last, self.offset, xp))
        return some, xp.less_equal(key.last, _with_offset(query.first, self.offset, xp))

    def bands(self, leading: tuple[int, ...] | None = None, /) -> list[Band]:
        offsets = _integers(self.offset, leading)
        return [UNKNOWN] if offsets is None else [Band(high=at, is_exact=True) for at in offsets]

    def check(self, target: Sizes, /) -> None:
        _check_leading("offset", self.offset, target)


@dataclass(frozen=True, eq=False)
class SlidingWindow(Mask):
    """Keys near the position of the query: ``p - left <= key <= p + right`` with ``p = query + offset``.

    Parameters
    ----------
    left, right : int, optional
        Number of positions before and after, by name; ``None`` is without limit.
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

    left: int | None = field(default=None, kw_only=True)
    right: int | None = field(default=None, kw_only=True)
    offset: Any = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name, reach in (("left", self.left), ("right", self.right)):
            reach = plain_integer(reach)
            if reach is not None and (isinstance(reach, bool) or not isinstance(reach, int)):
                raise TypeError(f"expected {name} as an integer or None; got {type(reach).__name__}")
            if reach is not None and reach < 0:
                raise ValueError(f"expected {name} >= 0; got {number_text(reach)}")
            object.__setattr__(self, name, reach)
        object.__setattr__(self, "offset", check_offset("offset", self.offset))

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        query = _with_offset(at.query, self.offset, xp)
        return self._within(Spans(query, query, 1), at.key, at.key, xp)

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        first, last = _with_offset(query.first, self.offset, xp), _with_offset(query.last, self.offset, xp)
        some = self._within(Spans(first, last, query.size), key.first, key.last, xp)
        return some, self._within(Spans(last, first, query.size), key.last, key.first, xp)

    def bands(self, leading: tuple[int, ...] | None = None, /) -> list[Band]:
        offsets = _integers(self.offset, leading)
        if offsets is None:
            return [UNKNOWN]
        left, right = (2 * LIMIT if reach is None else _clamped(reach) for reach in (self.left, self.right))
        return [Band(_clamped(at - left), _clamped(at + right), is_exact=True) for at in offsets]

    def _within(self, query: Spans, lower: Array, upper: Array, xp: Namespace) -> Array:
        """Whether ``lower <= query.last + right`` and ``upper >= query.first - left``."""
        limits = []
        if self.right is not None:
            limits.append(xp.less_equal(lower, xp.add(query.last, _clamped(self.right))))
        if self.left is not None:
            limits.append(xp.greater_equal(upper, xp.subtract(query.first, _clamped(self.left))))
        if not limits:
            return xp.ones_like(xp.add(lower, query.last), dtype=xp.bool)
        return limits[0] if len(limits) == 1 else xp.logical_and(*limits)

    def check(self, target: Sizes, /) -> None:
        _check_leading("offset", self.offset, target)


@dataclass(frozen=True, eq=False)
class KeyLengths(Mask):
    """The first ``lengths`` keys: ``key < lengths``, for sequences with padding at the end.

    Parameters
    ----------
    lengths : int, or Array of int, shape (...)
        Not negative; one for each sequence of the batch (the axes before the heads). One beyond the keys hides none.

    Raises
    ------
    TypeError, ValueError
        When lengths are not integers, or negative (if their values can be read).

    Examples
    --------
    >>> import array_api_strict as xp
    >>> KeyLengths(2).to_array(1, 3, xp=xp)
    Array([ True,  True, False], dtype=array_api_strict.bool)
    """

    lengths: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", check_offset("lengths", self.lengths))
        least = _minimum(self.lengths)
        if least is not None and least < 0:
            raise ValueError(f"expected lengths >= 0; got {number_text(least)}")

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return xp.less(at.key, _over_batch(self.lengths, at.key, xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        lengths = _over_batch(self.lengths, key.first, xp)
        return xp.less(key.first, lengths), xp.less(key.last, lengths)

    def bands(self, leading: tuple[int, ...] | None = None, /) -> list[Band]:
        lengths = _integers(self.lengths, leading)
        return [UNKNOWN] if lengths is None else [Band(stop=length, is_exact=True) for length in lengths]

    def check(self, target: Sizes, /) -> None:
        _check_leading("lengths", self.lengths, target)


@dataclass(frozen=True, eq=False)
class Segments(Mask):
    """Keys of the same segment: ``query_ids == key_ids``, for documents packed into one sequence.

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
        if dtypes_differ(self.query_ids, self.key_ids):
            expected, got = dtype_name(self.query_ids.dtype), dtype_name(self.key_ids.dtype)
            raise TypeError(f"expected key_ids of dtype {expected} to match query_ids; got {got}")
        first, second = (sizes(ids)[:-1] for ids in (self.query_ids, self.key_ids))
        if any(1 not in pair and sizes_differ(*pair) for pair in zip(reversed(first), reversed(second), strict=False)):
            expected, got = shape_text(self.query_ids), shape_text(self.key_ids)
            raise ValueError(f"expected key_ids of the batch of query_ids {expected}; got {got}")

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        query_ids, key_ids = self._ids(at.query, self.query_ids, xp), self._ids(at.key, self.key_ids, xp)
        same = xp.equal(xp.expand_dims(query_ids, axis=-1), xp.expand_dims(key_ids, axis=-2))
        return same if len(same.shape) == 2 else xp.expand_dims(same, axis=-3)

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        (least, most), (low, high) = (
            self._extent(span, ids, xp) for span, ids in ((query, self.query_ids), (key, self.key_ids))
        )
        least, most = xp.expand_dims(least, axis=-1), xp.expand_dims(most, axis=-1)
        low, high = xp.expand_dims(low, axis=-2), xp.expand_dims(high, axis=-2)
        some = xp.logical_and(xp.less_equal(least, high), xp.less_equal(low, most))
        every = xp.logical_and(xp.equal(least, high), xp.equal(low, most))
        return tuple(flags if len(flags.shape) == 2 else xp.expand_dims(flags, axis=-3) for flags in (some, every))

    def _ids(self, at: Array, ids: Array, xp: Namespace) -> Array:
        ids = xp.astype(ids, index_dtype(ids, xp=xp), copy=False)
        *leading, length = shape(ids, xp=xp)
        if not isinstance(length, int):  # it may be 0 when the program runs, and `take` needs an element
            ids = xp.concat([ids, xp.zeros((*leading, 1), dtype=ids.dtype, **on_device_of(ids))], axis=-1)
        return take_rows(ids, xp.reshape(at, (-1,)), axis=-1, xp=xp)

    def _extent(self, span: Spans, ids: Array, xp: Namespace) -> tuple[Array, Array]:
        """The least and the greatest id of each block: two arrays of shape (..., blocks)."""
        positions = span.at
        if positions is None:
            counted = xp.arange(span.size, dtype=xp.int32, **on_device_of(span.first))
            positions = xp.add(xp.reshape(span.first, (-1, 1)), counted)
            positions = xp.minimum(positions, xp.reshape(span.last, (-1, 1)))
        *leading, _ = shape(ids, xp=xp)
        count, size = shape(positions, xp=xp)
        ids = xp.reshape(self._ids(positions, ids, xp), (*leading, count, size))
        return xp.min(ids, axis=-1), xp.max(ids, axis=-1)

    def check(self, target: Sizes, /) -> None:
        *leading, _, rows, columns = target
        for name, ids, length in (("query_ids", self.query_ids, rows), ("key_ids", self.key_ids, columns)):
            check_broadcastable(name, ids, (*leading, length))
            if sizes(ids)[-1] == 1 and length not in (1, None):
                raise ValueError(f"expected {name} (..., {length}); got (..., 1)")


@dataclass(frozen=True, eq=False)
class MaskFunction(Mask):
    """The pairs for which a function of positions is true.

    Parameters
    ----------
    function : callable
        ``function(batch, head, query, key, *arrays)`` returns a boolean array. As in ``mask_mod`` of PyTorch's
        FlexAttention, its arguments are positions that broadcast against each other (see `Positions`).
    arrays : tuple of Array
        Further arrays of the function, passed on whole.

    Raises
    ------
    TypeError
        When the function cannot be called, or one of the arrays is not an array.

    Notes
    -----
    JAX compiles blocks once for each function, as ``jax.jit`` does, and so does ``torch.compile``: neither sees that
    what the function reads has changed. Arrays that change belong among ``arrays``.

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
        check_arity("function", self.function, "batch, head, query, key and its arrays", 4 + len(self.arrays))

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        result = result_of("the function of a MaskFunction", self.function, *at, *self.arrays)
        check_allowed("the result of a MaskFunction", result, at)
        if isinstance(at, PairPositions) and len(result.shape) > 2:
            _ = at.head  # raises: an axis more than those of queries and keys comes from batch or head
        return result


def is_top_left_causal(mask: Any, /) -> bool:
    """Whether a mask is `Causal` with the offset 0, for which libraries have a flag of their kernels.

    Examples
    --------
    >>> is_top_left_causal(Causal()), is_top_left_causal(Causal(offset=2))
    (True, False)
    """
    return type(mask) is Causal and isinstance(mask.offset, int) and mask.offset == 0


def _check_leading(name: str, value: Any, target: Sizes) -> None:
    if not isinstance(value, int):
        check_broadcastable(name, value, target[:-3])


def _minimum(value: Any) -> int | None:
    """The least of some integers; ``None`` if they cannot be read without waiting, or there are none."""
    if isinstance(value, int):
        return value
    if 0 in sizes(value) or not can_be_read(value):
        return None
    xp = array_namespace(value)
    return int(xp.min(xp.astype(value, index_dtype(value, xp=xp))))


def rule_of(band: Band) -> Mask | None:
    """The rule that allows all pairs of a band, and no others; ``None`` if these are all pairs."""
    low, high, stop, _ = band
    if low > high:
        return KeyLengths(0)
    left = min(high - low, LIMIT)
    window = (
        Causal(offset=high) if low == -LIMIT else SlidingWindow(left=left, right=high - low - left, offset=low + left)
    )
    rules: list[Mask] = [] if (low, high) == (-LIMIT, LIMIT) else [window]
    rules += [] if stop == LIMIT else [KeyLengths(stop)]
    return And(*rules) if len(rules) > 1 else next(iter(rules), None)


def _integers(value: Any, leading: tuple[int, ...] | None) -> list[int] | None:
    """Integers of the batch, one for all or one for each sample; ``None`` if they cannot be read without waiting."""
    if isinstance(value, int):
        return [_clamped(value)]
    if leading is None or 0 in leading or not can_be_read(value):
        return None
    if not len(value.shape):
        return [_clamped(int(value))]
    flat = value
    if tuple(value.shape) != leading or len(leading) != 1:
        xp = array_namespace(value)
        flat = xp.reshape(xp.broadcast_to(value, leading), (-1,))
    numbers = flat.tolist() if hasattr(flat, "tolist") else map(int, flat)
    return [_clamped(number) for number in numbers]


def _over_batch(value: Any, like: Array, xp: Namespace) -> Any:
    """Clamp integers to the positions, and give an array (...) axes for heads, queries and keys: (..., 1, 1, 1)."""
    if isinstance(value, int):
        return _clamped(value)
    if dtype_name(value.dtype) in ("int32", "uint32", "int64", "uint64"):
        value = xp.clip(xp.astype(value, index_dtype(value, xp=xp)), -LIMIT, LIMIT)
    value = xp.astype(value, like.dtype)
    for _ in range(3 if len(value.shape) else 0):
        value = xp.expand_dims(value, axis=-1)
    return value


def _clamped(value: int) -> int:
    return max(-LIMIT, min(value, LIMIT))


def _with_offset(query: Array, offset: Any, xp: Namespace) -> Array:
    """Add the offset to query positions (M, 1): (M, 1), or (..., 1, M, 1) with an array of offsets."""
    return xp.add(query, _over_batch(offset, query, xp))
