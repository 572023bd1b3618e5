"""Which positions of a sequence a rank holds, and the order of blocks in memory and in the whole."""

from __future__ import annotations

from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace, positions, take_rows

SPLITS = {"contiguous": 1, "zigzag": 2}  # and the number of runs of neighbours that a rank holds


class Shards(NamedTuple):
    """How a sequence is shared out to the ranks of a group.

    Attributes
    ----------
    group : group of ranks
        In PyTorch a ``ProcessGroup``, or a ``DeviceMesh`` of one axis. In JAX the name of an axis under
        `jax.shard_map`.
    split : {"zigzag", "contiguous"}
        Of R ranks, rank r holds the chunks r and 2 R - 1 - r out of 2 R, or chunk r out of R. Under a causal mask, the
        first gives all as much work.
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

    @property
    def num_chunks(self) -> int:
        """How many chunks all ranks hold together."""
        return self.size * SPLITS[self.split]

    def runs(self, rows: int, xp: Namespace) -> list[tuple[Any, int]]:
        """The first position and the length of each run of neighbours among so many rows of this rank."""
        rank, count = self.rank, rows // SPLITS[self.split]
        if self.split == "contiguous":
            return [(_times(rank, count, xp), count)]
        last = 2 * self.size - 1
        mirrored = last - rank if isinstance(rank, int) else xp.subtract(last, rank)
        return [(_times(rank, count, xp), count), (_times(mirrored, count, xp), count)]

    def positions(self, rows: int, like: Array, xp: Namespace) -> Array:
        """The positions of so many rows of this rank, (rows,)."""
        return xp.concat([xp.add(positions(count, like, xp=xp), start) for start, count in self.runs(rows, xp)])


def _times(index: Any, count: int, xp: Namespace) -> Any:
    return index * count if isinstance(index, int) else xp.multiply(index, count)


def padded_length(length: int, chunks: int) -> int:
    """The least multiple of a number of chunks that holds a length, and no empty chunk."""
    return max(1, -(-length // chunks)) * chunks


def cut(x: Array, axis: int, start: int, stop: int) -> Array:
    """A run of an axis, which is counted from the end."""
    return x[(..., slice(start, stop), *(slice(None),) * (-axis - 1))]


def whole_of(stack: Array, axis: int, split: str, xp: Namespace) -> Array:
    """Shards (R, ..., n, ...) of all ranks as one array (..., R n, ...) in the order of positions."""
    if split == "zigzag":
        half = stack.shape[axis] // 2
        halves = cut(stack, axis, 0, half), xp.flip(cut(stack, axis, half, 2 * half), axis=0)
        stack = xp.concat(halves, axis=0)
    count, *dims = stack.shape
    at = len(dims) + axis
    merged = xp.permute_dims(stack, (*range(1, at + 1), 0, *range(at + 1, len(dims) + 1)))
    dims[at] *= count
    return xp.reshape(merged, tuple(dims))


def stack_of(whole: Array, axis: int, split: str, size: int, xp: Namespace) -> Array:
    """The inverse of `whole_of`."""
    dims = list(whole.shape)
    at, count = len(dims) + axis, size * SPLITS[split]
    chunks = xp.reshape(whole, (*dims[:at], count, dims[at] // count, *dims[at + 1 :]))
    chunks = xp.permute_dims(chunks, (at, *range(at), *range(at + 1, len(dims) + 1)))
    if split == "contiguous":
        return chunks
    return xp.concat([chunks[:size, ...], xp.flip(chunks[size:, ...], axis=0)], axis=axis)


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
