"""A ring of ranks: keys and values go round, and each rank attends to those that it has.

Forward, what a rank found of the keys so far is merged with what it finds of the next ones. Backward, the gradients of
keys and values go round with them. The backward functions of blocks and of some kernels take output and logsumexp as
given: given those of the whole, they return the gradients of a piece. So whatever a block can do, each hop does.

References
----------
H. Liu, M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from attention_core._arrays import Array, Arrays, Gradients, Namespace, cast_to, is_floating, shape, upcast
from attention_core._attention.blocks.backward import backward
from attention_core._attention.blocks.forward import empty_results, forward
from attention_core._attention.blocks.grid import is_broadcast
from attention_core._attention.blocks.plan import Plan, make_plan, pack, unpack
from attention_core._attention.call import Call, Result, score_change, upcast_call
from attention_core._attention.parts import KeyRange, Parts, key_ranges
from attention_core._attention.shards.rules import from_starts
from attention_core._attention.shards.splits import SPLITS, Place, start_of
from attention_core._attention.softmax import merge_pieces
from attention_core._attention.ways import taken_way
from attention_core._backend import Backend, Loops, Operation, register
from attention_core._keywords import untraced
from attention_core.masks._band import LIMIT, Band
from attention_core.masks._mask import band_of


class Hops(NamedTuple):
    """Whose keys come to a rank: those of the rank so many places behind it, and then of its neighbours behind that.

    Attributes
    ----------
    first, length : int
        How many places, and how many ranks in all.
    """

    first: int
    length: int

    @property
    def rotations(self) -> int:
        """How often keys are sent."""
        return self.length - 1 + (self.first > 0)


def hops_of(band: Band, size: int, split: str, rows: tuple[int, int]) -> Hops:
    """The shortest way round that brings all ranks the keys that a band leaves, of so many queries and keys on each."""
    queries, keys = map(operator.index, rows)  # no symbols of a compiler
    return Hops(*_shortest_way(tuple(band), size, split, (queries, keys)))


@untraced
@functools.lru_cache(maxsize=256)
def _shortest_way(bounds: tuple[Any, ...], size: int, split: str, rows: tuple[int, int]) -> tuple[int, int]:
    band = Band(*bounds)
    if (band.low, band.high) == (-LIMIT, LIMIT):
        return 0, size
    queries, keys = ([Place("", size, rank, split).chunks(count) for rank in range(size)] for count in rows)

    def is_needed(hop: int) -> bool:
        pairs = (itertools.product(queries[rank], keys[rank - hop]) for rank in range(size))
        return any(is_in_sight(band, *pair) for pair in itertools.chain.from_iterable(pairs))

    needed = [hop for hop in range(size) if is_needed(hop)]
    ways = [Hops(first, 1 + max([0, *((hop - first) % size for hop in needed)])) for first in range(size)]
    return min(ways, key=lambda way: way.rotations)[:2]


def is_in_sight(band: Band, query: tuple[int, int], key: tuple[int, int]) -> bool:
    """Whether a band leaves anything of a chunk of queries and one of keys, each by its first position and length."""
    (first, rows), (start, columns) = query, key
    nearest = max(start - first + 1 - rows, band.low)  # of the distances that there are, the least that is seen
    return nearest < start - first + columns and nearest <= band.high and start < band.stop


class RingPlan(NamedTuple):
    """The plan of a ring: that of a call with the keys of this rank, who is in the ring, and whether kernels are."""

    plan: Plan
    group: str
    size: int
    split: str
    hops: Hops
    by_kernel: bool


def takes_kernel(call: Call) -> bool:
    """Whether a hop that needs no mask takes a kernel, which has gradients of query, key and value alone."""
    others = call.bias, score_change(call), call.dropout
    hop = upcast_call(call)._replace(mask=None, scale=1.0, sinks=None)
    return all(each is None for each in others) and _kernel_of(hop) is not None


def _kernel_of(call: Call) -> Any:
    """The kernel that a call takes, if it has pieces."""
    kernel = taken_way(Parts(call, None, call)).kernel
    return kernel if kernel is not None and kernel.takes_pieces(call) else None


def ring_attention(call: Call, here: Place, hops: Hops, by_kernel: bool) -> Result:
    """Attention of the queries of this rank; a bias has the columns of rank after rank."""
    xp, (plan, arrays) = call.xp, make_plan(upcast_call(call))
    plan = plan._replace(  # of the keys of others, nothing is known
        all_finite=not plan.may_mask or plan.assume_finite, exp_without_max=False if call.backend.loops.traced else None
    )
    keys = (cast_to(x, call.key.dtype, xp=xp) for x in arrays[1:3])  # they travel in 16 bits
    plan, arrays = RingPlan(plan, *here[:2], here.split, hops, by_kernel), (arrays[0], *keys, *arrays[3:])
    output, *rows = call.backend.custom_gradient(RING, plan, arrays)
    *dims, _ = shape(call.query, xp=xp)
    return Result(xp.reshape(output, (*dims, call.value.shape[-1])), None, *(xp.reshape(x, tuple(dims)) for x in rows))


class Ring(NamedTuple):
    """What all hops look up."""

    plan: RingPlan
    call: Call  # in five axes, see `make_plan`
    rank: Any
    band: Band
    num_chunks: int


def _ring(plan: RingPlan, arrays: Arrays, backend: Any) -> Ring:
    call = unpack(plan.plan, arrays, backend)
    return Ring(plan, call, backend.collectives.rank(plan.group), band_of(call.mask), SPLITS[plan.split])


class Block(NamedTuple):
    """A block along an axis, out of so many of equal length."""

    axis: int
    index: Any
    count: int

    def of(self, x: Array, loops: Loops) -> Array:
        """The block of an array."""
        return loops.block(x, self.index, x.shape[self.axis] // self.count, self.axis)

    def among(self, x: Array, number: float, xp: Namespace) -> Array:
        """An array of which this is the block, and a number in the place of the others."""
        if self.count == 1:
            return x
        other, index = xp.full_like(x, number), self.index
        if isinstance(index, int):
            return xp.concat([x if index == each else other for each in range(self.count)], axis=self.axis)
        return xp.concat([xp.where(xp.equal(index, each), x, other) for each in range(self.count)], axis=self.axis)


class Piece(NamedTuple):
    """A chunk of queries, and one of the keys that have come, as a call; and which blocks of each array it has."""

    call: Call
    rows: tuple[Block, ...]  # of output, logsumexp and remainder
    blocks: tuple[tuple[Block, ...], ...]  # of query, key, value and bias


def _piece(ring: Ring, keys: Arrays, source: Any, i: Any, j: Any) -> Piece | None:
    """The piece of two chunks of this rank and of a source; ``None`` if no query sees a key."""
    call, size, count, loops = ring.call, ring.plan.size, ring.num_chunks, ring.call.backend.loops
    rows = call.query.shape[-2] // count, call.key.shape[-2] // count
    starts = start_of(ring.rank, i, size, rows[0]), start_of(source, j, size, rows[1])
    if isinstance(source, int) and not is_in_sight(ring.band, *zip(starts, rows, strict=True)):
        return None
    row, column = Block(-2, i, count), Block(-2, j, count)
    of_bias = (row, Block(-1, source * count + j, size * count)) if call.bias is not None else ()
    blocks = (row,), (column,), (column,), tuple(each for each in of_bias if not is_broadcast(call.bias, each.axis))
    arrays = [call.query, *keys, call.bias]
    for n, each in enumerate(blocks):
        for block in each:
            arrays[n] = block.of(arrays[n], loops)
    query, *of_keys, bias = arrays
    key, value = upcast(tuple(of_keys), xp=call.xp)
    return Piece(
        call._replace(query=query, key=key, value=value, bias=bias, starts=starts),
        (row, row._replace(axis=-1), row._replace(axis=-1)),
        blocks,
    )


def _go_round(ring: Ring, add: Callable[..., Any], stays: Any, travels: Arrays = ()) -> Any:
    """``stays, travels = add(piece, stays, travels)`` for all pieces; some sums travel with the keys, and come home."""
    (first, count), (_, group, size, *_), backend = ring.plan.hops, ring.plan, ring.call.backend
    lent, num_chunks = backend.collectives, ring.num_chunks

    def visit(hop: Any, keys: Arrays, sums: Any, by: int) -> Any:
        def add_pair(index: Any, sums: Any) -> Any:
            piece = _piece(ring, keys, (ring.rank - hop) % size, index // num_chunks, index % num_chunks)
            return sums if piece is None else add(piece, *sums)

        stays, travels = backend.loops.loop(0, num_chunks**2, add_pair, sums)
        return stays, lent.rotate(travels, group, by)() if travels and by else travels

    def step(hop: Any, carried: Any) -> Any:
        keys, sums = carried
        finish = lent.rotate(keys, group, 1)  # while the next keys are under way
        sums = visit(hop, keys, sums, 1)
        return finish(), sums

    keys, sums, last = ring.call[1:3], (stays, travels), first + count - 1
    keys = lent.rotate(keys, group, first)() if first else keys
    if count > 1:
        keys, sums = backend.loops.loop(first, last, step, (keys, sums))
    return visit(last, keys, sums, -last % size)


def _kernel_call(ring: Ring, piece: Call) -> tuple[Any, Call] | None:
    """The kernel that a plain call of a piece takes, and that call; none where the mask is no band of numbers."""
    if not (ring.plan.by_kernel and ring.band.is_exact):
        return None
    (batch, heads, group, *ends), columns = piece.query.shape, piece.key.shape[-2]
    query, assume_finite = piece.xp.reshape(piece.query, (batch, heads * group, *ends)), ring.plan.plan.assume_finite
    call = piece._replace(query=query, scale=1.0, starts=(0, 0), assume_finite=assume_finite or None)
    call = from_starts(call, *piece.starts)
    if call.starts != (0, 0):
        return None
    if key_ranges(call) == [KeyRange(0, columns, 0, columns)]:
        call = call._replace(mask=None)
    kernel = _kernel_of(call)
    return None if kernel is None else (kernel, call)


def _packed(ring: Ring, piece: Call) -> tuple[Plan, Arrays]:
    """A piece as blocks take it."""
    definitions, arrays = pack(piece)
    return ring.plan.plan._replace(call=definitions), arrays


def _attend(ring: Ring, piece: Call) -> Arrays:
    """What `forward` returns of a piece. A kernel does not tell what rounding takes from its logsumexp: little."""
    taken, xp = _kernel_call(ring, piece), piece.xp
    found = None if taken is None else taken[0].attend_to_piece(taken[1])
    if found is None:
        return forward(*_packed(ring, piece), piece.backend)
    output, logsumexp = (xp.reshape(x, (*piece.query.shape[:-1], *x.shape[3:])) for x in found)
    return output, logsumexp, xp.zeros_like(logsumexp)


def _gradients(ring: Ring, piece: Call, results: Arrays, cotangents: Arrays) -> list[Any]:
    """The gradients of the arrays of a piece, given what is exact of the whole."""
    taken, xp = _kernel_call(ring, piece), piece.xp
    if taken is not None:
        kernel, call = taken
        ends = (
            [xp.reshape(x, (*call.query.shape[:3], *x.shape[4:])) for x in each[:2]] for each in (results, cotangents)
        )
        found = kernel.piece_gradients(call, *ends)
        if found is not None:
            return [xp.reshape(found[0], piece.query.shape), *found[1:]]
    return list(backward(*_packed(ring, piece), results, cotangents, piece.backend))


def _forward(plan: RingPlan, arrays: Arrays, backend: Backend) -> Arrays:
    """Output, logsumexp, and what is to be added to that to make it exact, as blocks have them."""
    ring, xp = _ring(plan, arrays, backend), backend.namespace

    def add(piece: Piece, results: Arrays, travels: Arrays) -> Any:
        found = zip(_attend(ring, piece.call), piece.rows, (0.0, -math.inf, 0.0), strict=True)
        others = (rows.among(x, number, xp) for x, rows, number in found)
        return merge_pieces(*(xp.stack(pair) for pair in zip(results, others, strict=True)), xp=xp), travels

    output, logsumexp, remainder = empty_results(plan.plan, arrays, backend)
    results: Arrays
    results, _ = _go_round(ring, add, (output, xp.full_like(logsumexp, -math.inf), remainder))
    return results


def _backward(plan: RingPlan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Any) -> Gradients:
    """The gradient for each array; those of keys and values end on the rank that these came from."""
    ring, xp = _ring(plan, arrays, backend), backend.namespace
    factor = xp.exp(xp.negative(results[2]))  # of weights by the logsumexp alone, see `blocks.backward`
    cotangents = xp.multiply(cotangents[0], xp.expand_dims(factor, axis=-1)), xp.multiply(cotangents[1], factor), factor
    results = *results[:2], xp.zeros_like(factor)

    def add(piece: Piece, stays: Any, travels: Arrays) -> Any:
        ends = (
            tuple(rows.of(x, backend.loops) for x, rows in zip(each, piece.rows, strict=True))
            for each in (results, cotangents)
        )
        found = _gradients(ring, piece.call, *ends)
        for n, blocks in enumerate(piece.blocks):
            for block in blocks:
                found[n] = block.among(found[n], 0.0, xp)
        sums = [stays[0], *travels, *stays[1:]]
        for n, x in enumerate(found):
            if x is not None:
                sums[n] = xp.add(sums[n], upcast(x, xp=xp))
        return (sums[0], *sums[3:]), tuple(sums[1:3])

    d_query, *of_keys = (upcast(xp.zeros_like(x), xp=xp) if is_floating(x) else None for x in arrays)
    (d_query, *others), of_keys = _go_round(ring, add, (d_query, *of_keys[2:]), tuple(of_keys[:2]))
    sums = zip((d_query, *of_keys, *others), arrays, strict=True)
    return tuple(None if total is None else cast_to(total, x.dtype, xp=xp) for total, x in sums)


def _empty(plan: RingPlan, arrays: Arrays, backend: Backend) -> Arrays:
    return empty_results(plan.plan, arrays, backend)


register("shards.Hops", Hops)
register("shards.RingPlan", RingPlan)
RING = register("shards.ring", Operation(_forward, _backward, _empty))
