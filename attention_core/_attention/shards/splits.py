"""Which positions of a sequence a rank holds, calls by these positions, and what moves them between ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._arrays import Array, Gradients, Namespace, cast_to, clipped, is_floating, move_axis, positions, upcast
from ..._backend import Backend, Operation, array_namespace, register
from ...masks import Mask, Positions
from ...masks._band import LIMIT, Band, intersection
from ...masks._mask import as_mask, band_of, bounds_of
from ...masks._rules import rule_of
from ...scores import ScoreMod
from ..call import Call
from ..parts import Run, taken

SPLITS = {"contiguous": 1, "zigzag": 2}  # and how many chunks a rank has


class Shards(NamedTuple):
    """How a sequence is shared out to the ranks of a group.

    Attributes
    ----------
    group : group of ranks
        In PyTorch a ``ProcessGroup``, or a ``DeviceMesh`` of one axis. In JAX the name of an axis under
        `jax.shard_map`.
    split : {"zigzag", "contiguous"}
        Of R ranks, rank r holds the chunks r and 2 R - 1 - r out of 2 R, or chunk r out of R. Under a causal mask, the
        zigzag split gives all ranks equal work.
    strategy : {"auto", "gather", "heads", "ring", "merge"}
        ``"gather"`` gathers keys and values, and queries stay. ``"heads"`` exchanges positions for heads and back, and
        repeats key/value heads where the ranks do not share them out evenly. ``"ring"`` passes keys and values on from
        rank to rank. ``"auto"`` takes the ring if a window leaves fewer than half of its steps; else heads if the ranks
        divide the key/value heads; else it gathers. ``"merge"`` is for decoding: all ranks have all
        queries, and get all of the output. It has no gradient.
    length : int, optional
        The length of the whole, if `shard` padded it; under ``"merge"`` that of the keys.

    Examples
    --------
    >>> Shards("positions", length=7)
    Shards(group='positions', split='zigzag', strategy='auto', length=7)
    """

    group: Any
    split: str = "zigzag"
    strategy: str = "auto"
    length: int | None = None


class Place(NamedTuple):
    """Where a shard is: the name of the group, its size R, the rank, and the split."""

    group: str
    size: int
    rank: Any  # an integer, or a 0-d array
    split: str

    def padded(self, length: int) -> int:
        """The number of positions of all ranks together that hold so many: as many on each, and on none of them 0."""
        chunks = self.size * SPLITS[self.split]
        return max(1, -(-length // chunks)) * chunks

    def chunks(self, rows: int) -> list[tuple[Any, int]]:
        """Of each chunk of so many rows of this rank, the first position and the length."""
        count = SPLITS[self.split]
        return [(start_of(self.rank, chunk, self.size, rows // count), rows // count) for chunk in range(count)]

    def start(self, rows: int, like: Array, xp: Namespace) -> Any:
        """The first position of so many rows of this rank, if they are neighbours, or all of them."""
        chunks = self.chunks(rows)
        return chunks[0][0] if len(chunks) == 1 else self.positions(rows, like, xp)

    def positions(self, rows: int, like: Array, xp: Namespace) -> Array:
        """The positions of so many rows of this rank, (rows,)."""
        return xp.concat([xp.add(positions(count, like, xp=xp), start) for start, count in self.chunks(rows)])


def start_of(rank: Any, chunk: Any, size: int, count: int) -> Any:
    """The first position of a chunk of so many: a zigzag rank has the chunks r and 2 R - 1 - r."""
    return (rank + chunk * (2 * size - 1 - 2 * rank)) * count


def whole_of(stack: Array, axis: int, split: str, xp: Namespace) -> Array:
    """Shards (R, ..., n, ...) of all ranks as one array (..., R n, ...) in the order of positions."""
    if split == "zigzag":
        half = stack.shape[axis] // 2
        first, second = (taken(stack, Run(start, half), axis, xp) for start in (0, half))
        stack = xp.concat([first, xp.flip(second, axis=0)], axis=0)
    count, *dims = stack.shape
    dims[axis] *= count
    return xp.reshape(move_axis(stack, -len(stack.shape), axis - 1, xp), tuple(dims))


def stack_of(whole: Array, axis: int, split: str, size: int, xp: Namespace) -> Array:
    """The inverse of `whole_of`."""
    at, count = len(whole.shape) + axis, size * SPLITS[split]
    dims = (*whole.shape[:at], count, whole.shape[at] // count, *whole.shape[at + 1 :])
    chunks = move_axis(xp.reshape(whole, dims), axis - 1, -len(dims), xp)
    if split != "zigzag":
        return chunks
    return xp.concat([chunks[:size, ...], xp.flip(chunks[size:, ...], axis=0)], axis=axis)


def own(stack: Array, rank: Any, xp: Namespace) -> Array:
    """The entry of a rank."""
    return xp.squeeze(taken(stack, Run(rank, 1), -len(stack.shape), xp), axis=0)


@dataclass(frozen=True, eq=False)
class Within(Mask):
    """A rule for the first queries and keys; those behind them pad shards, and are masked."""

    mask: Mask | None
    queries: int
    keys: int

    def allowed(self, at: Positions, /, *, xp: Namespace) -> Array:
        inside = xp.logical_and(xp.less(at.query, self.queries), xp.less(at.key, self.keys))
        if self.mask is None:
            return inside
        query, key = clipped(at.query, self.queries, xp=xp), clipped(at.key, self.keys, xp=xp)
        return xp.logical_and(inside, self.mask.allowed(at._replace(query=query, key=key), xp=xp))

    def bounds(self) -> Band:
        return intersection(bounds_of(self.mask), Band(stop=self.keys))


@dataclass(frozen=True)
class Clipped:
    """A function of scores that is asked for the positions of the first queries and keys alone."""

    function: Callable[..., Array]
    queries: int
    keys: int

    def __call__(self, scores: Array, batch: Array, head: Array, query: Array, key: Array, *arrays: Array) -> Array:
        xp = array_namespace(scores)
        query, key = clipped(query, self.queries, xp=xp), clipped(key, self.keys, xp=xp)
        return self.function(scores, batch, head, query, key, *arrays)


register("shards.Within", Within)
register("shards.Clipped", Clipped)


def within(call: Call, queries: int = LIMIT, keys: int = LIMIT) -> Call:
    """A call over the positions of the whole, for the first queries and keys."""
    mask, score_mod = None if call.mask is None else as_mask(call.mask), call.score_mod
    if queries == keys == LIMIT:
        return call._replace(mask=mask)
    if score_mod is not None:
        function, arrays = (
            (score_mod.function, score_mod.arrays) if isinstance(score_mod, ScoreMod) else (score_mod, ())
        )
        score_mod = ScoreMod(Clipped(function, queries, keys), arrays)
    return call._replace(mask=Within(mask, queries, keys), score_mod=score_mod)


def from_starts(call: Call, query: Any, key: Any) -> Call:
    """A call from positions on: in its rule, which kernels take, if that is a band and nothing else looks at them."""
    starts, is_free = (query, key), call.score_mod is None and call.dropout is None
    if is_free and call.mask is None:
        starts = 0, 0
    elif is_free and isinstance(query, int) and isinstance(key, int) and (band := band_of(call.mask)).is_exact:
        starts, call = (0, 0), call._replace(mask=rule_of(moved(band, query, key)))
    return call._replace(starts=starts)


def moved(band: Band, query: int, key: int) -> Band:
    """A band of queries and keys from positions on, counted from there."""
    ends = zip(band[:3], (query - key, query - key, -key), strict=True)
    low, high, stop = (end if abs(end) == LIMIT else end + by for end, by in ends)
    return Band(low, high, stop, band.is_exact)


Arrays = tuple[Array, ...]
UNDIFFERENTIATED = (
    "expected strategy='merge' of shards, which is for decoding, not to be differentiated; got it so: 'gather' has"
    " gradients"
)


Way = tuple[int, str]  # how shards make a whole: along an axis, by a split
BY_HEADS: Way = (-3, "contiguous")


class Move(NamedTuple):
    """The plan of a collective, between what is cut for it and what is put together of it."""

    collective: str  # a member of `Collectives`; or "own", what a rank has of its own
    back: str  # that of gradients
    group: str
    size: int
    sent: Way | None = None  # how what is sent is cut for all ranks
    received: Way | None = None  # how what they sent is put together
    is_wide: bool = False  # whether 16-bit types end as float32, so that gradients are summed in it


def gather(
    arrays: Arrays, here: Place, axis: int, backend: Backend, *, is_summed: bool = False, is_wide: bool = False
) -> Arrays:
    """The whole of arrays, shards of which the ranks hold; the gradient is the sum over ranks, or each has that."""
    back, whole = "own" if is_summed else "sum_scatter", (axis, here.split)
    return tuple(backend.custom_gradient(MOVE, Move("all_gather", back, *here[:2], None, whole, is_wide), arrays))


def exchange(arrays: Arrays, here: Place, backend: Backend, *, to_heads: bool) -> Arrays:
    """All rows of the heads of this rank, out of its rows of all heads (..., H, M, D); or the other way round."""
    ways = (BY_HEADS, (-2, here.split)) if to_heads else ((-2, here.split), BY_HEADS)
    return tuple(backend.custom_gradient(MOVE, Move("exchange", "exchange", *here[:2], *ways), arrays))


def total(x: Array, here: Place, backend: Backend) -> Array:
    """The sum of the arrays of all ranks, which has no gradient."""
    (found,) = backend.custom_gradient(TOTAL, Move("total", "", *here[:2]), (x,))
    return found


def _moved(plan: Move, arrays: Arrays, backend: Backend, *, is_empty: bool = False) -> Arrays:
    xp, lent = backend.namespace, backend.collectives

    def moved(x: Array) -> Array:
        x = x if plan.sent is None else stack_of(x, *plan.sent, plan.size, xp)
        if is_empty:
            x = xp.stack([x] * plan.size) if plan.collective == "all_gather" else xp.zeros_like(x)
        elif plan.collective == "own":
            x = own(x, lent.rank(plan.group), xp)  # type: ignore[union-attr]
        else:
            x = getattr(lent, plan.collective)(x, plan.group)
        x = x if plan.received is None else whole_of(x, *plan.received, xp)
        return upcast(x, xp=xp) if plan.is_wide else x

    return tuple(map(moved, arrays))


def _moved_back(plan: Move, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Gradients:
    back = plan._replace(collective=plan.back, sent=plan.received, received=plan.sent, is_wide=False)

    def gradient(x: Array, cotangent: Array) -> Array | None:
        return (
            cast_to(_moved(back, (cotangent,), backend)[0], x.dtype, xp=backend.namespace) if is_floating(x) else None
        )

    return tuple(map(gradient, arrays, cotangents))


def check_no_gradient(arrays: Iterable[Any], backend: Backend) -> None:
    """Raise if a gradient is known to be computed of what is computed from one of these, if they are arrays."""
    known = backend.has_gradient
    if known is not None and any(known(x) for x in arrays if backend.owns(x)):
        _not_differentiated()


def _not_differentiated(*_: Any) -> Any:
    raise NotImplementedError(UNDIFFERENTIATED)


_empty = functools.partial(_moved, is_empty=True)  # for compilers that ask for shapes alone
register("shards.Move", Move)
MOVE = register("shards.move", Operation(_moved, _moved_back, _empty))
TOTAL = register("shards.total", Operation(_moved, _not_differentiated, _empty, refusal=UNDIFFERENTIATED))
