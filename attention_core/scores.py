"""Functions that modify scores by position: ALiBi, relative biases, and your own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._arrays import Array, Namespace, index_dtype, one_program, shape, shape_text, sizes
from ._backend import array_namespace, array_of, register
from ._checks import (
    MAX_POSITIONS,
    check_arity,
    check_flags,
    check_function,
    check_offset,
    check_positive,
    check_shapes,
    number_text,
    only_array,
)
from ._keywords import publish

__all__ = ["ScoreMod", "alibi", "relative_bias"]

_ARGUMENTS = "scores, batch, head, query, key and its arrays"
MAX_HEADS = MAX_DISTANCE = 2**16  # as long are the lists of rates, and of buckets


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """A function that modifies scores by position, with the arrays that it needs; gradients flow to these.

    Parameters
    ----------
    function : callable
        ``function(scores, batch, head, query, key, *arrays)`` returns new scores, of the same shape and dtype. Its
        ``scores`` are scaled and capped; biases and masks come later. The others are int32 positions, counted from 0,
        which broadcast against the scores (see `attention_core.masks.Positions`). The function has to be elementwise:
        blockwise attention calls it with the scores and positions of one block.
    arrays : tuple of Array
        Gradients flow to those of floating-point dtypes.
    num_heads : int, optional
        The number of query heads that the function requires.

    Raises
    ------
    TypeError
        When the function cannot be called, or something is not an array.

    Notes
    -----
    In blocks, no gradient reaches arrays that the function closes over. They raise an error where that is known. A
    graph of TensorFlow does not know it, if the tape is around its call: there the gradient of such a tensor is None.
    JAX compiles blocks once for each function, as ``jax.jit`` does, and so does ``torch.compile``: neither sees that
    what the function reads has changed. In the function, ``jax_numpy_rank_promotion`` is ``"allow"``.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> def weighted(scores, batch, head, query, key, weight):
    ...     return xp.multiply(scores, weight)
    >>> zero = xp.zeros((), dtype=xp.int32)
    >>> ScoreMod(weighted, (xp.asarray([3.0]),))(xp.asarray([[2.0]]), zero, zero, zero, zero)
    Array([[6.]], dtype=array_api_strict.float64)
    """

    function: Callable[..., Array]
    arrays: tuple[Array, ...] = ()
    num_heads: int | None = None

    def __post_init__(self) -> None:
        check_function("function", self.function, self.arrays)
        check_arity("function", self.function, _ARGUMENTS, 5 + len(self.arrays))
        if self.num_heads is not None:
            object.__setattr__(self, "num_heads", check_positive("num_heads", self.num_heads))

    def __call__(self, scores: Array, batch: Array, head: Array, query: Array, key: Array) -> Array:
        return self.function(scores, batch, head, query, key, *self.arrays)


def alibi(num_heads: int, /, *, offset: Any = 0) -> ScoreMod:
    r"""Make attention with linear biases: scores fall with the distance, at a different rate in each head.

    .. math:: s_{ij} - m_h\, |i + o - j|, \qquad m_h = 2^{-8 h / H}, \qquad h = 1, …, H

    If H is not a power of two, the rates are those of the next lower power, followed by every other one of its double.

    Parameters
    ----------
    num_heads : int
        H, the number of query heads.
    offset : int or Array of int, shape () or (...)
        o, the position of the first query: the number of cached keys. It may differ along the leading axes.

    Raises
    ------
    TypeError, ValueError
        When num_heads is not a positive integer, or offset not an integer; in the call, when there are not H heads.

    References
    ----------
    O. Press, N. A. Smith, M. Lewis, "Train short, test long", 2022.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> head, query, key = xp.reshape(xp.arange(2), (2, 1, 1)), xp.reshape(xp.arange(1), (1, 1)), xp.arange(2)
    >>> alibi(2)(xp.zeros((2, 1, 2)), xp.zeros((1, 1, 1)), head, query, key)[:, 0, :]
    Array([[ 0.        , -0.0625    ],
           [ 0.        , -0.00390625]], dtype=array_api_strict.float64)
    """
    num_heads = check_positive("num_heads", num_heads, most=MAX_HEADS)
    number, arrays = _split_offset(check_offset("offset", offset))
    return ScoreMod(_Alibi(num_heads, number), arrays, num_heads)


def relative_bias(table: Array, /, *, bidirectional: bool = True, max_distance: int = 128, offset: Any = 0) -> ScoreMod:
    r"""Add a learned number to the scores for each head and bucket of distances, as T5 does.

    .. math:: s_{ij} + t_{b(j - i - o),\, h}

    Each direction has n buckets. The first e = n // 2 hold one distance each. The others hold ranges that grow
    geometrically, and the last one all distances from D on. So the bucket of a distance r >= e is

    .. math:: \min\!\left(n - 1,\; e + \left\lfloor (n - e) \frac{\log(r / e)}{\log(D / e)} \right\rfloor\right).

    If bidirectional, n is half of all buckets, and the second half is for keys after the query. Otherwise such keys
    share bucket 0 with distance 0. Buckets are found in integer arithmetic, so they are the same on all frameworks.

    Parameters
    ----------
    table : Array, shape (buckets, H)
        t; gradients flow to it.
    bidirectional : bool
        Whether keys after the query have separate buckets.
    max_distance : int
        D, more than e, at most 65536.
    offset : int or Array of int, shape () or (...)
        o, the position of the first query: the number of cached keys. It may differ along the leading axes.

    Raises
    ------
    TypeError, ValueError
        When table, distance or offset are not valid; in the call, when there are not H heads.

    References
    ----------
    C. Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer", 2020.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> table = xp.asarray([[0.0], [1.0], [2.0], [3.0]])
    >>> head, query, key = xp.zeros((1, 1, 1), dtype=xp.int32), xp.reshape(xp.arange(1), (1, 1)), xp.arange(6)
    >>> mod = relative_bias(table, bidirectional=False, max_distance=4, offset=5)
    >>> mod(xp.zeros((1, 1, 6)), head, head, query, key)[0, 0, :]
    Array([3., 3., 3., 2., 1., 0.], dtype=array_api_strict.float64)
    """
    check_flags(bidirectional=bidirectional)
    max_distance = check_positive("max_distance", max_distance, most=MAX_DISTANCE)
    offset = check_offset("offset", offset)
    buckets, heads = _table_sizes(table)
    numbers = tuple(_buckets(buckets, bidirectional, max_distance))
    number, arrays = _split_offset(offset)
    return ScoreMod(_RelativeBias(numbers, heads, number), (table, *arrays), heads)


@dataclass(frozen=True)  # compared by value: compilers do not recompile for an equal one
class _Alibi:
    heads: int
    offset: int = 0

    def listed(self, like: Array) -> Array:
        """The rates of all heads."""
        return array_of(_alibi_rates(self.heads), like.dtype, like, array_namespace(like))

    def __call__(
        self, scores: Array, batch: Array, head: Array, query: Array, key: Array, *offset: Array, listed: Any = None
    ) -> Array:
        xp, (rates, take) = array_namespace(scores), _looked_up(self, scores, listed)
        rate = take(rates, head, xp)
        distance = xp.abs(_distance(batch, query, key, number=self.offset, arrays=offset, take=take, xp=xp))
        return xp.subtract(scores, xp.multiply(rate, xp.astype(distance, scores.dtype)))


@dataclass(frozen=True)
class _RelativeBias:
    buckets: tuple[int, ...]
    heads: int
    offset: int = 0

    def listed(self, like: Array) -> Array:
        """The bucket of each distance."""
        xp = array_namespace(like)
        return array_of(list(self.buckets), xp.int32, like, xp)

    def __call__(self, scores: Array, batch: Array, head: Array, *others: Array, listed: Any = None) -> Array:
        xp, (buckets, take) = array_namespace(scores), _looked_up(self, scores, listed)
        query, key, table, *offset = others
        farthest = len(self.buckets) // 2
        distance = _distance(batch, query, key, number=self.offset, arrays=offset, take=take, xp=xp)
        index = xp.add(xp.clip(distance, -farthest, farthest), farthest)
        flat = xp.reshape(xp.astype(table, scores.dtype, copy=False), (-1,))
        return xp.add(scores, take(flat, xp.add(xp.multiply(take(buckets, index, xp), self.heads), head), xp))


register("ScoreMod", ScoreMod)
register("alibi", _Alibi)
register("relative_bias", _RelativeBias)


def _alibi_rates(heads: int) -> list[float]:
    power = 2 ** (heads.bit_length() - 1)
    rates = [2.0 ** (-8 * step / power) for step in range(1, power + 1)]
    return rates + [2.0 ** (-4 * step / power) for step in range(1, 2 * (heads - power), 2)]


def _buckets(buckets: int, bidirectional: bool, farthest: int) -> list[int]:
    """The bucket of each ``key - query`` from ``-farthest`` to ``farthest``."""
    count = buckets // 2 if bidirectional else buckets
    exact = count // 2
    if bidirectional and buckets % 2:
        raise ValueError(f"expected a table with an even number of buckets for two directions; got {buckets}")
    if not exact:
        raise ValueError(f"expected a table with at least {4 if bidirectional else 2} buckets; got {buckets}")
    if farthest <= exact:
        raise ValueError(f"expected max_distance > {exact}, the distances with a bucket each; got {farthest}")
    steps = count - exact
    firsts = [*range(1, exact + 1), *(_first_distance(step, steps, exact, farthest) for step in range(1, steps))]
    near = [0] * firsts[0]
    for bucket, (first, stop) in enumerate(zip(firsts, [*firsts[1:], farthest + 1], strict=True), start=1):
        near += [bucket] * (stop - first)
    after = [count + bucket for bucket in near] if bidirectional else [0] * (farthest + 1)
    return [*near[:0:-1], 0, *after[1:]]


def _first_distance(step: int, steps: int, exact: int, farthest: int) -> int:
    """The least r with log(r / e) / log(D / e) >= step / steps: by powers of integers where floats leave it open."""
    estimate = float(exact * (farthest / exact) ** (step / steps))
    near = math.floor(estimate + 0.5)
    if abs(estimate - near) > 1e-6:
        return math.ceil(estimate)
    divisor = math.gcd(step, steps)
    power, whole = step // divisor, steps // divisor
    return near + int(near**whole < farthest**power * exact ** (whole - power))


def _table_sizes(table: Array) -> tuple[int, int]:
    known = check_shapes("table: buckets H floating", {"table": table})
    if None in known.values():
        raise ValueError(f"expected table (buckets, H), both known; got {shape_text(table)}")
    return known["buckets"], known["H"]


def _split_offset(offset: Any) -> tuple[int, tuple[Array, ...]]:
    """The offset as a field of the function and its arrays: a number and none, or 0 and one."""
    if only_array(offset) is not None:
        return 0, (offset,)
    if abs(offset) > MAX_POSITIONS:
        raise ValueError(f"expected offset below 2**29 in magnitude; got {number_text(offset)}")
    return offset, ()


def _distance(
    batch: Array, query: Array, key: Array, /, *, number: int, arrays: Sequence[Array], take: Any, xp: Namespace
) -> Array:
    """``key - (query + offset)`` as int32; the offset is a number, or an array of shape () or (...)."""
    if not arrays:
        return xp.subtract(xp.subtract(key, query), number)
    wide = xp.astype(arrays[0], index_dtype(arrays[0], xp=xp))
    offset = xp.astype(xp.clip(wide, -MAX_POSITIONS, MAX_POSITIONS), xp.int32)
    if len(offset.shape):
        expected, got = (None if None in sizes(x) else math.prod(sizes(x)) for x in (offset, batch))  # type: ignore[arg-type]
        if None not in (expected, got) and got not in (1, expected):
            raise ValueError(f"expected scores of {expected} entries; got {got}")
        offset = take(xp.reshape(offset, (-1,)), batch, xp)
    return xp.subtract(xp.subtract(key, query), offset)


def _take(values: Array, index: Array, xp: Namespace) -> Array:
    """Elements of a 1-D array by an index array of any shape."""
    return one_program(_taken, xp)(values, index, xp=xp)


def _looked_up(function: Any, scores: Array, listed: Any) -> tuple[Array, Callable[..., Array]]:
    """The numbers that a function looks up, and how: a kernel is given them, and takes one for each single score."""
    return (function.listed(scores), _take) if listed is None else (listed, lambda values, index, xp: values[index])


def _taken(values: Array, index: Array, *, xp: Namespace) -> Array:
    flat = xp.reshape(xp.astype(index, index_dtype(index, xp=xp), copy=False), (-1,))
    return xp.reshape(xp.take(values, flat, axis=0), shape(index, xp=xp))


publish(vars(), __all__)
