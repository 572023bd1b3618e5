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
from typing import Any, NamedTuple, TypeVar, cast

from attention_core._arrays import Array, Arrays, Gradients, Namespace, cast_to, is_floating, shape, upcast
from attention_core._attention.blocks.backward import backward
from attention_core._attention.blocks.forward import empty_results, forward
from attention_core._attention.blocks.grid import is_broadcast
from attention_core._attention.blocks.plan import Plan, make_plan, pack, unpack
from attention_core._attention.call import Call, Result, score_change, upcast_call
from attention_core._attention.parts import KeyRange, key_ranges
from attention_core._attention.shards.splits import SPLITS, Place, start_of
from attention_core._attention.softmax import merge_pieces
from attention_core._attention.ways import taken_way
from attention_core._backend import Backend, Operation, register
from attention_core.masks._band import LIMIT, Band
from attention_core.masks._mask import band_of
from attention_core.masks._rules import rule_of

Function = TypeVar("Function", bound=Callable[..., Any])


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


def _kept(function: Function) -> Function:
    """A function of plain values whose results are kept; torch.compile calls it, and does not trace it."""
    cached = functools.lru_cache(maxsize=256)(function)

    @functools.wraps(function)
    def known(*values: Any) -> Any:
        return cached(*values)

    known._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cast(Function, known)


@_kept
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


def moved(band: Band, query: int, key: int) -> Band:
    """A band of queries and keys from positions on, counted from there."""
    ends = zip(band[:3], (query - key, query - key, -key), strict=True)
    low, high, stop = (end if abs(end) == LIMIT else end + by for end, by in ends)
    return Band(low, high, stop, band.is_exact)


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
    kernel = taken_way(call).kernel
    return kernel if kernel is not None and kernel.takes_pieces(call) else None


def ring_attention(call: Call, here: Place, hops: Hops, by_kernel: bool) -> Result:
    """Attention of the queries of this rank; a bias has the columns of rank after rank."""
    wide, xp = upcast_call(call), call.xp
    plan, arrays = make_plan(wide)
    plan = plan._replace(  # of the keys of others, nothing is known
        all_finite=not plan.may_mask or plan.assume_finite, exp_without_max=False if call.backend.loops.traced else None
    )
    keys = (cast_to(x, call.key.dtype, xp=xp) for x in arrays[1:3])  # they travel in 16 bits
    arrays = arrays[0], *keys, *arrays[3:]
    output, *rows = call.backend.custom_gradient(RING, RingPlan(plan, *here[:2], here.split, hops, by_kernel), arrays)
    *dims, _ = shape(call.query, xp=xp)
    return Result(xp.reshape(output, (*dims, call.value.shape[-1])), None, *(xp.reshape(x, tuple(dims)) for x in rows))


class Ring(NamedTuple):
    """What all hops look up."""

    plan: RingPlan
    call: Call
    backend: Any
    rank: Any
    band: Band
    num_chunks: int
    rows: tuple[int, int]  # the queries and keys of a chunk


def _ring(plan: RingPlan, arrays: Arrays, backend: Any) -> Ring:
    call, count = unpack(plan.plan, arrays, backend), SPLITS[plan.split]
    band = band_of(call.mask)
    rows = call.query.shape[-2] // count, call.key.shape[-2] // count
    return Ring(plan, call, backend, backend.collectives.rank(plan.group), band, count, rows)


def _go_round(ring: Ring, visit: Callable[..., Any], keys: Arrays, state: Any) -> Any:
    """``visit(hop, keys, state, by)`` for each hop, while the next keys are under way; sums then go so far."""
    (first, count), (_, group, size, *_), lent = ring.plan.hops, ring.plan, ring.backend.collectives
    keys = lent.rotate(keys, group, first)() if first else keys

    def step(hop: Any, carried: Any) -> Any:
        keys, state = carried
        finish = lent.rotate(keys, group, 1)
        state = visit(hop, keys, state, 1)
        return finish(), state

    last = first + count - 1
    if count > 1:
        keys, state = ring.backend.loops.loop(first, last, step, (keys, state))
    return visit(last, keys, state, -last % size)


def _source(ring: Ring, hop: Any) -> Any:
    """The rank whose keys have come."""
    return (ring.rank - hop) % ring.plan.size


def _piece(ring: Ring, keys: Arrays, hop: Any, index: Any) -> Call | None:
    """A pair of chunks, of queries and of keys, as a call of five axes; ``None`` if no query sees a key."""
    call, loops, xp = ring.call, ring.backend.loops, ring.backend.namespace
    (i, j), source = _chunks_of(ring, index), _source(ring, hop)
    sides = (ring.rank, i, ring.rows[0]), (source, j, ring.rows[1])
    starts = tuple(start_of(rank, chunk, ring.plan.size, rows) for rank, chunk, rows in sides)
    if isinstance(source, int) and not is_in_sight(ring.band, *zip(starts, ring.rows, strict=True)):
        return None
    bias = call.bias
    if bias is not None and not is_broadcast(bias, -2):
        bias = loops.block(bias, i, ring.rows[0], -2)
    if bias is not None and not is_broadcast(bias, -1):
        bias = loops.block(bias, source * ring.num_chunks + j, ring.rows[1], -1)
    key, value = (upcast(loops.block(x, j, ring.rows[1], -2), xp=xp) for x in keys)
    query = loops.block(call.query, i, ring.rows[0], -2)
    return call._replace(query=query, key=key, value=value, bias=bias, starts=starts)


def _kernel_call(ring: Ring, piece: Call) -> tuple[Any, Call] | None:
    """The kernel that a plain call of a piece takes, and that call; none where the mask is no band of numbers."""
    starts = (0, 0) if piece.mask is None else piece.starts
    if not (ring.plan.by_kernel and ring.band.is_exact and all(isinstance(start, int) for start in starts)):
        return None
    xp, columns = ring.backend.namespace, piece.key.shape[-2]
    arrays, mask = (_with_heads(piece.query, xp), *piece[1:3]), rule_of(moved(ring.band, *starts))
    call = Call(*arrays, xp, ring.backend, mask, scale=1.0, assume_finite=ring.plan.plan.assume_finite or None)
    if key_ranges(call) == [KeyRange(0, columns, 0, columns)]:
        call = call._replace(mask=None)
    kernel = _kernel_of(call)
    return None if kernel is None else (kernel, call)


def _with_heads(x: Array, xp: Namespace) -> Array:
    """An array (B, G, R, M, ...) with one axis of heads."""
    batch, heads, group, *dims = x.shape
    return xp.reshape(x, (batch, heads * group, *dims))


def _attend_to_piece(ring: Ring, piece: Call) -> Arrays:
    """What `forward` returns of a piece. A kernel does not tell what rounding takes from its logsumexp: little."""
    taken, xp = _kernel_call(ring, piece), ring.backend.namespace
    found = None if taken is None else taken[0].attend_to_piece(taken[1])
    if found is None:
        return forward(*_packed(ring, piece), ring.backend)
    dims = piece.query.shape[:-1]
    output, logsumexp = (xp.reshape(x, (*dims, *x.shape[3:])) for x in found)
    return output, logsumexp, xp.zeros_like(logsumexp)


def _packed(ring: Ring, piece: Call) -> tuple[Plan, Arrays]:
    definitions, arrays = pack(piece)
    return ring.plan.plan._replace(call=definitions), arrays


def _gradients_of_piece(ring: Ring, piece: Call, results: Arrays, cotangents: Arrays) -> list[Any]:
    """The gradients of the arrays of a piece, given what is exact of the whole."""
    taken, xp = _kernel_call(ring, piece), ring.backend.namespace
    if taken is not None:
        kernel, call = taken
        ends = ([_with_heads(x, xp) for x in each[:2]] for each in (results, cotangents))
        found = kernel.piece_gradients(call, *ends)
        if found is not None:
            return [xp.reshape(found[0], piece.query.shape), *found[1:], *(None for _ in _packed(ring, piece)[1][3:])]
    return list(backward(*_packed(ring, piece), results, cotangents, ring.backend))


def _chunks_of(ring: Ring, index: Any) -> tuple[Any, Any]:
    return index // ring.num_chunks, index % ring.num_chunks


def _among(x: Array, index: Any, count: int, axis: int, number: float, xp: Namespace) -> Array:
    """A block among so many along an axis, with a number in the place of the others."""
    if count == 1:
        return x
    other = xp.full_like(x, number)
    if isinstance(index, int):
        return xp.concat([x if index == each else other for each in range(count)], axis=axis)
    return xp.concat([xp.where(xp.equal(index, each), x, other) for each in range(count)], axis=axis)


def _forward(plan: RingPlan, arrays: Arrays, backend: Backend) -> Arrays:
    """Output, logsumexp, and what is to be added to that to make it exact, as blocks have them."""
    ring, xp = _ring(plan, arrays, backend), backend.namespace

    def visit(hop: Any, keys: Arrays, results: Arrays, by: int) -> Any:
        def add(index: Any, results: Arrays) -> Arrays:
            piece = _piece(ring, keys, hop, index)
            if piece is None:
                return results
            chunk, _ = _chunks_of(ring, index)
            found = zip(_attend_to_piece(ring, piece), (-2, -1, -1), (0.0, -math.inf, 0.0), strict=True)
            others = (_among(x, chunk, ring.num_chunks, axis, number, xp) for x, axis, number in found)
            output, logsumexp, remainder = (xp.stack(pair) for pair in zip(results, others, strict=True))
            return merge_pieces(output, logsumexp, remainder, xp=xp)

        return backend.loops.loop(0, ring.num_chunks**2, add, results)

    output, logsumexp, remainder = empty_results(plan.plan, arrays, backend)
    nothing = output, xp.full_like(logsumexp, -math.inf), remainder
    results: Arrays = _go_round(ring, visit, ring.call[1:3], nothing)
    return results


def _backward(plan: RingPlan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Any) -> Gradients:
    """The gradient for each array; those of keys and values end on the rank that these came from."""
    ring, xp, loops = _ring(plan, arrays, backend), backend.namespace, backend.loops
    bias = ring.call.bias
    factor = xp.exp(xp.negative(results[2]))  # of weights by the logsumexp alone, see `blocks.backward`
    cotangents = xp.multiply(cotangents[0], xp.expand_dims(factor, axis=-1)), xp.multiply(cotangents[1], factor), factor
    results = *results[:2], xp.zeros_like(factor)

    def of_chunk(arrays: Arrays, chunk: Any) -> Any:
        return tuple(loops.block(x, chunk, ring.rows[0], axis) for x, axis in zip(arrays, (-2, -1, -1), strict=True))

    def visit(hop: Any, keys: Arrays, sums: Any, by: int) -> Any:
        def add(index: Any, sums: Any) -> Any:
            piece = _piece(ring, keys, hop, index)
            if piece is None:
                return sums
            i, j = _chunks_of(ring, index)
            found = _gradients_of_piece(ring, piece, of_chunk(results, i), of_chunk(cotangents, i))
            for side, chunk in enumerate((i, j, j)):
                found[side] = _among(found[side], chunk, ring.num_chunks, -2, 0.0, xp)
            if bias is not None and not is_broadcast(bias, -2):
                found[3] = _among(found[3], i, ring.num_chunks, -2, 0.0, xp)
            if bias is not None and not is_broadcast(bias, -1):
                column = _source(ring, hop) * ring.num_chunks + j
                found[3] = _among(found[3], column, ring.num_chunks * plan.size, -1, 0.0, xp)
            pairs = zip(sums, found, strict=False)  # behind the last gradient, a piece may have its positions
            return tuple(total if x is None else xp.add(total, upcast(x, xp=xp)) for total, x in pairs)

        sums = loops.loop(0, ring.num_chunks**2, add, sums)
        if by:
            sums = sums[0], *backend.collectives.rotate(sums[1:3], plan.group, by)(), *sums[3:]
        return sums

    zeros = (upcast(xp.zeros_like(x), xp=xp) if is_floating(x) else None for x in arrays)
    sums = _go_round(ring, visit, ring.call[1:3], tuple(zeros))
    pairs = zip(sums, arrays, strict=True)
    return tuple(None if total is None else cast_to(total, x.dtype, xp=xp) for total, x in pairs)


def _empty(plan: RingPlan, arrays: Arrays, backend: Backend) -> Arrays:
    return empty_results(plan.plan, arrays, backend)


register("shards.Hops", Hops)
register("shards.RingPlan", RingPlan)
RING = register("shards.ring", Operation(_forward, _backward, _empty))
