"""The structured masks: causal, windows, lengths, segments, and functions.

A new rule is a class here, by the description of `Mask`, and an import and a name in `attention_core.masks`, which
registers it. Kernels take it by its bounds, where these are exact. A band that says more than the rule allows is not.
PyTorch's kernel takes others as an array where that is small; `attention_torch.kernels.flex_functions` has to know
them. A rule without a registered name is checked and judged in every call. Rules are known by name to the kit's
`oracle/positions.py` and `sharded.py`, to `tools/vectors.py`, `evidence/sharding/ranks.py`, and in the tests to
`call_table.py`, `test_masks.py` and `fuzz_problems.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .._arrays import (
    OURS,
    Array,
    Namespace,
    classes,
    flatten,
    index_dtype,
    leaves,
    on_device_of,
    shape,
    shape_text,
    sizes,
    sizes_differ,
    take_rows,
)
from .._checks import (
    check_allowed,
    check_arity,
    check_broadcastable,
    check_device,
    check_function,
    check_offset,
    check_shapes,
    number_text,
    plain_integer,
    result_of,
)
from ._band import CAUSAL, FREE, Band, exact_band, integers
from ._mask import Mask, PairPositions, Positions, Sizes, Spans, as_mask, bounds_of


class _BandRule(Mask):
    """A rule that is a band; one derived from it, with `allowed` of its own, has no bounds.

    Of its arrays, those in the fields ``lengths``, ``stop`` and ``offset`` are checked.
    """

    @abstractmethod
    def _band(self) -> Band: ...

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return self._band().over_batch(at.key, xp).holds((at.query, at.query), (at.key, at.key), xp)

    def bounds(self) -> Band:
        return self._band()

    def check(self, target: Sizes, /) -> None:
        for name in ("lengths", "stop", "offset"):
            value = getattr(self, name, 0)
            if not isinstance(value, int):
                check_broadcastable(name, value, target[:-3])


@dataclass(frozen=True, eq=False)
class Causal(_BandRule):
    """Keys up to the position of the query: ``key <= query + offset``.

    Parameters
    ----------
    offset : int or Array of int, shape (...)
        Added to the query's position: 0 is top-left; with P keys in a cache it is P. It may be negative, and may differ
        along the leading axes (those before the heads). No mask needs the number of queries or keys.

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

    def _band(self) -> Band:
        return exact_band(high=0, offset=self.offset)


@dataclass(frozen=True, eq=False)
class SlidingWindow(_BandRule):
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

    def _band(self) -> Band:
        return exact_band(None if self.left is None else -self.left, self.right, offset=self.offset)


@dataclass(frozen=True, eq=False)
class KeyLengths(_BandRule):
    """The first ``lengths`` keys: ``key < lengths``, for sequences with padding at the end.

    Parameters
    ----------
    lengths : int, or Array of int, shape (...)
        Not negative; one for each sequence of the batch (the axes before the heads). A length above N hides no key.

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
        found = integers(self.lengths, () if isinstance(self.lengths, int) else sizes(self.lengths))
        if found and min(found) < 0:
            raise ValueError(f"expected lengths >= 0; got {number_text(min(found))}")

    def _band(self) -> Band:
        return exact_band(stop=self.lengths)


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
        ids = {"query_ids": self.query_ids, "key_ids": self.key_ids}
        first, second = (check_shapes(f"{name}: ... length integer like query_ids", ids)["..."] for name in ids)
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
        if not (isinstance(length, int) and length):  # 0, perhaps when the program runs: `take` needs an element
            ids = xp.concat([ids, xp.zeros((*leading, 1), dtype=ids.dtype, **on_device_of(ids))], axis=-1)
        return take_rows(ids, xp.reshape(at, (-1,)), axis=-1, xp=xp)

    def _extent(self, span: Spans, ids: Array, xp: Namespace) -> tuple[Array, Array]:
        """The least and the greatest id of each block: two arrays of shape (..., blocks)."""
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


@dataclass(frozen=True, eq=False)
class Banded(_BandRule):
    """The pairs of an exact band, and no others."""

    low: int
    high: int
    stop: Any
    offset: Any = 0

    def _band(self) -> Band:
        return Band(self.low, self.high, self.stop, True, self.offset)


def rule_of(band: Band) -> Mask | None:
    """The rule that allows all pairs of a band, and no others; ``None`` if these are all pairs."""
    is_all = band.ends == FREE and not band.has_stop
    return None if is_all else Banded(band.low, band.high, band.stop, band.offset)


def is_top_left_causal(mask: Any, /) -> bool:
    """Whether a mask allows what `Causal` with the offset 0 does, for which libraries have a flag of their kernels.

    Examples
    --------
    >>> is_top_left_causal(Causal()), is_top_left_causal(Causal(offset=2))
    (True, False)
    """
    band = bounds_of(mask)
    return band.is_relative and band.ends == CAUSAL


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
    for array in flatten(rule)[1]:
        check_device("mask", array, "query", query)


def check_covered(mask: Mask | Array, starts: tuple[Any, Any], lengths: tuple[int | None, int | None]) -> None:
    """Raise if arrays of a mask are known to end before the last query or key of a piece."""
    treedef, arrays = flatten(as_mask(mask))
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
