"""Which positions of a sequence a rank holds, and the order of blocks in memory and in the whole."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..._arrays import Array, Namespace, move_axis, positions
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
