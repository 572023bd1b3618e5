"""Which positions of a sequence a rank holds, and the order of blocks in memory and in the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from attention_core._arrays import Array, Namespace, positions, take_rows
from attention_core._backend import array_of

SPLITS = {"contiguous": 1, "zigzag": 2, "striped": 1}  # and how many pieces a rank computes one by one
Function = TypeVar("Function", bound=Callable[..., Any])
Runs = tuple[tuple[int, int, int], ...]  # of each the first position, the step and the length


class Shards(NamedTuple):
    """How a sequence is shared out to the ranks of a group.

    Attributes
    ----------
    group : group of ranks
        In PyTorch a ``ProcessGroup``, or a ``DeviceMesh`` of one axis. In JAX the name of an axis under
        `jax.shard_map`. In TensorFlow a ``tf.distribute.Strategy``, within its ``run``.
    split : {"zigzag", "contiguous", "striped"} or sequence of runs for each rank
        Of R ranks, rank r holds the chunks r and 2 R - 1 - r out of 2 R, or chunk r out of R. Under a causal mask, the
        first gives all as much work. Striped, it holds the positions r, r + R and so on. A run is (first, step,
        length). All runs together hold each position once, and those of a rank are in the order of its rows.
    strategy : {"auto", "gather", "heads", "ring", "merge"}
        ``"gather"`` gathers keys and values, and queries stay. ``"heads"`` exchanges positions for heads and back, and
        repeats key/value heads where the ranks do not share them out evenly. ``"ring"`` passes keys and values on from
        rank to rank. ``"auto"`` takes the ring if a window leaves fewer than half of its hops; else heads if the number
        of ranks divides that of the key/value heads; else it gathers. ``"merge"`` is for decoding: all ranks have all
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
    split: Any  # a word, or runs for each rank

    def padded(self, length: int) -> int:
        """The number of positions of all ranks together that hold so many: as many on each, and on none of them 0."""
        if not isinstance(self.split, str):
            return self.size * max(1, *map(count_of, self.split))
        chunks = self.size * SPLITS[self.split]
        return max(1, -(-length // chunks)) * chunks

    def starts(self, rows: int, like: Array, xp: Namespace) -> list[tuple[Any, int]]:
        """Of each piece of so many rows of this rank, the length and the first position, or all of them."""
        rank, count = self.rank, rows // num_pieces(self.split)
        if self.split == "contiguous":
            return [(_times(rank, count, xp), count)]
        if self.split == "zigzag":
            last = 2 * self.size - 1
            mirrored = last - rank if isinstance(rank, int) else xp.subtract(last, rank)
            return [(_times(rank, count, xp), count), (_times(mirrored, count, xp), count)]
        return [(self.positions(rows, like, xp), rows)]

    def start(self, rows: int, like: Array, xp: Namespace) -> Any:
        """The first position of so many rows of this rank, if they are neighbours, or all of them."""
        pieces = self.starts(rows, like, xp)
        return pieces[0][0] if len(pieces) == 1 else self.positions(rows, like, xp)

    def positions(self, rows: int, like: Array, xp: Namespace) -> Array:
        """The positions of so many rows of this rank, (rows,)."""
        if self.split == "striped":
            return xp.add(xp.multiply(positions(rows, like, xp=xp), self.size), self.rank)
        if isinstance(self.split, str):
            pieces = self.starts(rows, like, xp)
            return xp.concat([xp.add(positions(count, like, xp=xp), start) for start, count in pieces])
        order, rank = _order(self.split), self.rank
        if isinstance(rank, int):
            return array_of(order[rank * rows : (rank + 1) * rows], xp.int32, like, xp)
        return own(xp.reshape(array_of(order, xp.int32, like, xp), (self.size, rows)), rank, xp)


def kept(function: Function) -> Function:
    """A function of plain values whose results are kept; torch.compile calls it, and does not trace it."""
    cached = functools.lru_cache(maxsize=256)(function)

    @functools.wraps(function)
    def known(*values: Any) -> Any:
        return cached(*values)

    known._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cast(Function, known)


def num_pieces(split: Any) -> int:
    """How many pieces a shard has that start somewhere and go on with neighbours; 1 if it is none of such pieces."""
    return SPLITS.get(split, 1)


@kept
def runs_of(split: Any, size: int, rows: int) -> tuple[Runs, ...]:
    """The runs of each rank, of so many rows each; what pads runs that are given comes behind the last position."""
    if split == "contiguous":
        return tuple([((rank * rows, 1, rows),) for rank in range(size)])
    if split == "zigzag":
        half, last = rows // 2, 2 * size - 1
        return tuple([((rank * half, 1, half), ((last - rank) * half, 1, half)) for rank in range(size)])
    if split == "striped":
        return tuple([((rank, size, rows),) for rank in range(size)])
    end, every = sum(map(count_of, split)), []
    for runs in split:
        fill = rows - count_of(runs)
        every.append((*runs, (end, 1, fill)) if fill else runs)
        end += fill
    return tuple(every)


def count_of(runs: Runs) -> int:
    """How many positions runs hold."""
    return sum([length for _, _, length in runs])


@kept
def _order(split: tuple[Runs, ...], is_inverse: bool = False) -> tuple[int, ...]:
    """The positions of the rows of rank after rank; or inversely, the row that holds each position."""
    ranks = runs_of(split, len(split), max(1, *map(count_of, split)))
    order = [first + step * n for runs in ranks for first, step, length in runs for n in range(length)]
    if is_inverse:
        rows = dict(zip(order, range(len(order)), strict=True))
        order = [rows[position] for position in range(len(order))]
    return tuple(order)


@kept
def wrong_position(split: tuple[Runs, ...]) -> int | None:
    """The first position that runs do not hold once; ``None`` if they hold each of their number once."""
    order = sorted([first + step * n for runs in split for first, step, length in runs for n in range(length)])
    return next((count for count, position in enumerate(order) if position != count), None)


def _times(index: Any, count: int, xp: Namespace) -> Any:
    return index * count if isinstance(index, int) else xp.multiply(index, count)


def cut(x: Array, axis: int, start: int, stop: int) -> Array:
    """A run of an axis, which is counted from the end."""
    return x[(..., slice(start, stop), *(slice(None),) * (-axis - 1))]


def whole_of(stack: Array, axis: int, split: Any, xp: Namespace) -> Array:
    """Shards (R, ..., n, ...) of all ranks as one array (..., R n, ...) in the order of positions."""
    if split == "zigzag":
        half = stack.shape[axis] // 2
        halves = cut(stack, axis, 0, half), xp.flip(cut(stack, axis, half, 2 * half), axis=0)
        stack = xp.concat(halves, axis=0)
    count, *dims = stack.shape
    at = len(dims) + axis
    order = [*range(1, len(dims) + 1)]
    order.insert(at + (split == "striped"), 0)  # ranks before rows, or after
    dims[at] *= count
    whole = xp.reshape(xp.permute_dims(stack, tuple(order)), tuple(dims))
    return whole if isinstance(split, str) else take_rows(whole, _rows(split, whole, xp, True), axis=axis, xp=xp)


def stack_of(whole: Array, axis: int, split: Any, size: int, xp: Namespace) -> Array:
    """The inverse of `whole_of`."""
    if not isinstance(split, str):
        whole = take_rows(whole, _rows(split, whole, xp), axis=axis, xp=xp)
    dims = list(whole.shape)
    at, count = len(dims) + axis, size * num_pieces(split)
    rows = dims[at] // count
    chunks = xp.reshape(whole, (*dims[:at], *((rows, count) if split == "striped" else (count, rows)), *dims[at + 1 :]))
    order = [*range(len(dims) + 1)]
    order.insert(0, order.pop(at + (split == "striped")))
    chunks = xp.permute_dims(chunks, tuple(order))
    if split != "zigzag":
        return chunks
    return xp.concat([chunks[:size, ...], xp.flip(chunks[size:, ...], axis=0)], axis=axis)


def _rows(split: tuple[Runs, ...], like: Array, xp: Namespace, is_inverse: bool = False) -> Array:
    return array_of(_order(split, is_inverse), xp.int32, like, xp)


def own(stack: Array, rank: Any, xp: Namespace) -> Array:
    """The entry of a rank."""
    if isinstance(rank, int):
        return stack[rank, ...]
    return xp.squeeze(take_rows(stack, xp.reshape(rank, (1,)), axis=0, xp=xp), axis=0)


def own_heads(x: Array, here: Place, xp: Namespace) -> Array:
    """The heads of a rank, of an array (..., H, M, N) of all heads, or of one for all of them."""
    if len(x.shape) < 3 or x.shape[-3] == 1:
        return x
    *leading, heads, rows, columns = x.shape
    chunks = xp.reshape(x, (*leading, here.size, heads // here.size, rows, columns))
    at = len(leading)
    return own(xp.permute_dims(chunks, (at, *range(at), *range(at + 1, at + 4))), here.rank, xp)
