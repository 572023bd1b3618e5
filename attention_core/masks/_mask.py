"""The base class of masks, how they combine, and boolean arrays as masks, of other conventions too."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from .._arrays import OURS, Array, Namespace, on_device_of, shape, sizes, take_rows, type_text
from .._backend import as_constant, can_be_read, common_namespace, own_namespace, without_warnings
from .._checks import (
    HEADS_FIRST,
    OPEN_AXES,
    check_allowed,
    check_boolean,
    check_broadcastable,
    check_floating,
    check_integer,
    check_number,
    check_positive,
    check_shapes,
    check_sizes,
    check_start,
    number_text,
    only_array,
)
from ._band import ALL, UNKNOWN, Band, hull, intersection

Sizes = tuple[int | None, ...]


class Positions(NamedTuple):
    """Positions of scores: int32 arrays that broadcast against each other to the shape of the scores.

    Attributes
    ----------
    batch : Array, shape (..., 1, 1, 1) or ()
        The index in the batch: all leading axes counted as one, in row-major order.
    head : Array, shape (H, 1, 1) or ()
        The query head.
    query : Array, shape (M, 1)
    key : Array, shape (N,)
    """

    batch: Array
    head: Array
    query: Array
    key: Array


class PairPositions(Positions):
    """Positions of queries and keys alone. What looks at batch or head is told so, instead of seeing the first."""

    @property
    def batch(self) -> Array:
        raise _without("batch")

    @property
    def head(self) -> Array:
        raise _without("head")


def _without(name: str) -> ValueError:
    return ValueError(
        f"expected a rule of query and key, or to_array(..., num_heads=, leading=) of one of {name}; got one of {name}"
    )


class Spans(NamedTuple):
    """The positions that blocks span along one axis: the first and the last of each, and the size of a full block.

    Attributes
    ----------
    first, last : Array of int32, shape (blocks, 1) for queries and (blocks,) for keys
    size : int
    """

    first: Array
    last: Array
    size: int


def checked(allowed: Callable[..., Array], name: str, /) -> Callable[..., Array]:
    """A method ``allowed`` of users, that raises unless its result is a boolean array for its positions."""

    @functools.wraps(allowed)
    def method(self: Mask, at: Positions, /, *, xp: Namespace) -> Array:
        result = allowed(self, at, xp=xp)
        check_allowed(name, result, at)
        return result

    return method


class Mask(ABC):
    """A rule about positions that says which query may attend to which key.

    Derive your own rule as a frozen dataclass (``eq=False``). It needs `allowed` alone, and `bounds` for speed. Its
    fields are numbers, arrays and other rules. `axes` gives, for each field that is an array, its number of axes after
    the leading ones: 0 by default, and 1 for an array of shape (..., N). An array of shape (..., H, M, N) is a mask of
    its own, to be combined with the rule by ``&`` or ``|``.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import array_api_strict as xp
    >>> from attention_core.masks import Band
    >>> @dataclass(frozen=True, eq=False)
    ... class Dilated(Mask):
    ...     step: int
    ...     def allowed(self, at, /, *, xp):
    ...         distance = xp.subtract(at.query, at.key)
    ...         is_step = xp.equal(xp.remainder(distance, self.step), 0)
    ...         return xp.logical_and(is_step, xp.greater_equal(distance, 0))
    ...     def bounds(self):  # blocks of later keys are skipped
    ...         return Band(high=0)
    >>> Dilated(2).to_array(3, 3, xp=xp)
    Array([[ True, False, False],
           [False,  True, False],
           [ True, False,  True]], dtype=array_api_strict.bool)
    """

    axes: ClassVar[dict[str, int]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("bounds", "blocks"):  # what they say is of the rule that this class, or a mixin, replaces
            if _depth(cls, "allowed") < _depth(cls, name):
                setattr(cls, name, getattr(Mask, name))
        if cls.__module__.startswith(OURS):
            return
        if 3 in cls.axes.values():
            raise TypeError(f"expected axes of 0 or 1 in {cls.__name__}, and & with an array of heads; got 3")
        if "allowed" in vars(cls):
            cls.allowed = checked(cls.allowed, f"the result of {cls.__name__}.allowed")  # type: ignore[method-assign]

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

    def bounds(self) -> Band:
        """Bounds of what the rule allows. The default is right for every rule, and skips no block.

        Blocks without an allowed pair are skipped, and the mask is not applied where all pairs are allowed. Kernels
        take what they have flags for. A rule derived from another one, with `allowed` of its own, does not inherit
        them. They are not checked: a pair outside may count as masked, even if `allowed` has it.
        """
        return UNKNOWN

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        """Classify blocks by the positions at their ends, by default from the bounds of the rule.

        A block is the scores of a run of queries against a run of keys. PyTorch's blocks on an accelerator are skipped
        by bounds alone.

        Returns
        -------
        some, every : Array of bool, broadcastable to (..., H, query blocks, key blocks)
            Whether any pair of the block may be allowed, and whether all are known to be.
        """
        band = self.bounds().over_batch(key.first, xp)
        some = band.holds((query.last, query.first), (key.first, key.last), xp)
        if not band.is_exact:
            return some, xp.zeros_like(some)
        return some, band.holds((query.first, query.last), (key.last, key.first), xp)

    def check(self, target: Sizes, /) -> None:  # noqa: B027 (a rule without arrays fits everywhere)
        """Raise unless the arrays of the rule fit scores of shape (..., H, M, N)."""

    def to_array(
        self,
        num_queries: int,
        num_keys: int,
        /,
        *,
        num_heads: int | None = None,
        leading: tuple[int, ...] | None = None,
        like: Array | None = None,
        xp: Namespace,
    ) -> Array:
        """Make a boolean array, broadcastable to (..., H, M, N).

        Parameters
        ----------
        num_queries, num_keys : int
            M, N.
        num_heads : int, optional
            H; a rule that looks at batch or head needs it.
        leading : tuple of int, optional
            The sizes of the axes before the heads; by default none.
        like : Array, optional
            On whose device to make it.
        xp : array namespace

        Raises
        ------
        ValueError
            When a rule looks at batch or head, and their number is not given.

        Examples
        --------
        >>> import array_api_strict as xp
        >>> from attention_core.masks import SlidingWindow
        >>> SlidingWindow(left=1, right=0).to_array(3, 3, xp=xp)
        Array([[ True, False, False],
               [ True,  True, False],
               [False,  True,  True]], dtype=array_api_strict.bool)
        """
        lengths = check_start("num_queries", num_queries), check_start("num_keys", num_keys)
        known = [length if isinstance(length, int) else None for length in lengths]
        xp = own_namespace(xp) if like is None else common_namespace(xp, {"like": like})
        device = {} if like is None else on_device_of(like)
        rows, columns = (xp.arange(length, dtype=xp.int32, **device) for length in lengths)
        if num_heads is not None:
            num_heads = check_positive("num_heads", num_heads)
        dims = () if leading is None else check_sizes("leading", leading)
        self.check((*(OPEN_AXES if leading is None else dims), num_heads, *known))
        batch = xp.reshape(xp.arange(math.prod(dims), dtype=xp.int32, **device), (*dims, 1, 1, 1))
        head = xp.reshape(xp.arange(num_heads or 1, dtype=xp.int32, **device), (-1, 1, 1))
        kind = PairPositions if num_heads is None else Positions
        mask: Mask = as_constant(self, rows)
        with without_warnings(rows):
            return mask.allowed(kind(batch, head, xp.expand_dims(rows, axis=-1), columns), xp=xp)

    def __and__(self, other: Mask | Array) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask | Array) -> Mask:
        return Or(self, other)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("expected masks combined by &, | and ~; got `and`, `or`, `not` or `if`, which drop one")

    __rand__ = __and__
    __ror__ = __or__
    __array_ufunc__ = None  # so that NumPy leaves `array & mask` to the mask


def _depth(kind: type, name: str) -> int:
    """How many classes are asked for a method before the one that has it."""
    return next(depth for depth, base in enumerate(kind.__mro__) if name in vars(base))


@dataclass(frozen=True, eq=False)
class Given(Mask):
    """A boolean array, broadcastable to (..., H, M, N), as part of a structured mask."""

    mask: Array
    axes: ClassVar[dict[str, int]] = {"mask": 3}

    def __post_init__(self) -> None:
        check_boolean("mask", self.mask)

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        mask = self.mask
        for axis, positions in ((-2, at.query), (-1, at.key)):
            size = sizes(mask)[axis] if len(mask.shape) >= -axis else 1
            if size is None:  # it may be 1 when the program runs
                positions = xp.minimum(positions, xp.subtract(shape(mask, xp=xp)[axis], 1))
            mask = mask if size == 1 else take_rows(mask, xp.reshape(positions, (-1,)), axis=axis, xp=xp)
        return mask

    def check(self, target: Sizes, /) -> None:
        check_broadcastable("mask", self.mask, target, _lacking_axes(sizes(self.mask), target))


def _lacking_axes(dims: Sizes, target: Sizes) -> str:
    """What to write for a mask over sequences that lacks the axis of heads, or of queries as well."""
    if len(target) == 4 and dims == (target[0], *target[2:]):
        return f": insert the axis of heads, ({dims[0]}, 1, {dims[1]}, {dims[2]})"
    if len(target) == 4 and dims == (target[0], target[3]):
        return ": mask_from_padding inserts the axes of heads and queries, as key_mask=... of a layer does"
    if len(dims) > 1 and len(target) > 2 and dims[-2:] == (target[-3],) * 2 != target[-2:]:
        return HEADS_FIRST.format("query and key")
    return ""


@dataclass(frozen=True, eq=False)
class _Compound(Mask):
    """A rule whose fields are masks: arrays are wrapped as such."""

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, as_mask(getattr(self, each.name)))

    def check(self, target: Sizes, /) -> None:
        for each in fields(self):
            getattr(self, each.name).check(target)


@dataclass(frozen=True, eq=False)
class _Pair(_Compound):
    first: Mask
    second: Mask
    operator: ClassVar[str]
    of_bands: ClassVar[Any]

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return getattr(xp, self.operator)(self.first.allowed(at, xp=xp), self.second.allowed(at, xp=xp))

    def bounds(self) -> Band:
        band: Band = self.of_bands(self.first.bounds(), self.second.bounds())
        return band

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        pairs = zip(self.first.blocks(query, key, xp=xp), self.second.blocks(query, key, xp=xp), strict=True)
        return tuple(getattr(xp, self.operator)(*pair) for pair in pairs)


@dataclass(frozen=True, eq=False)
class And(_Pair):
    """The pairs that both masks allow."""

    operator, of_bands = "logical_and", staticmethod(intersection)


@dataclass(frozen=True, eq=False)
class Or(_Pair):
    """The pairs that at least one of two masks allows."""

    operator, of_bands = "logical_or", staticmethod(hull)


@dataclass(frozen=True, eq=False)
class Not(_Compound):
    """The pairs that a mask does not allow."""

    mask: Mask

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        return xp.logical_not(self.mask.allowed(at, xp=xp))

    def blocks(self, query: Spans, key: Spans, /, *, xp: Namespace) -> tuple[Array, Array]:
        some, every = self.mask.blocks(query, key, xp=xp)
        return xp.logical_not(every), xp.logical_not(some)


def as_mask(mask: Mask | Array) -> Mask:
    """Wrap a boolean array as a structured mask; return a structured mask as it is."""
    return mask if isinstance(mask, Mask) else Given(mask)


def bounds_of(mask: Any) -> Band:
    """The bounds of a mask, of which some may be arrays; all pairs where there is no mask."""
    return ALL if mask is None else mask.bounds() if isinstance(mask, Mask) else UNKNOWN


def band_of(mask: Any) -> Band:
    """The band of a rule of numbers; no more than is known of any mask for others, and for arrays."""
    return bounds_of(mask).numbers()[0]


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
