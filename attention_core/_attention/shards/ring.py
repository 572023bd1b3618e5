"""A ring of ranks: keys and values go round, and each rank attends to those that it has.

Forward, what a rank found of the keys so far is merged with what it finds of the next ones. Backward, the gradients of
keys and values go round with them. The backward functions of blocks and of some kernels take output and logsumexp as
given: given those of the whole, they return the gradients of a piece. So whatever a block can do, each hop does.

References
----------
H. Liu, M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._arrays import Array, Arrays, Gradients, Namespace, cast_to, is_floating, shape, upcast
from ..._backend import Backend, Operation, register
from ..._keywords import kept
from ...masks._band import LIMIT, Band
from ...masks._mask import band_of
from ..blocks.backward import backward
from ..blocks.forward import empty_results, forward
from ..blocks.grid import is_broadcast
from ..blocks.plan import Plan, make_plan, pack, unpack
from ..call import Call, Result, upcast_call
from ..kernels import Kernel
from ..parts import KeyRange, Run, cut, key_ranges, taken
from ..softmax import merge_pieces
from ..ways import taken_way
from .splits import SPLITS, Place, from_starts, start_of

ROWS = -2, -1, -1  # the axis of output, logsumexp and remainder


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


@kept
def _shortest_way(bounds: tuple[Any, ...], size: int, split: str, rows: tuple[int, int]) -> tuple[int, int]:
    band = Band(*bounds)
    if (band.low, band.high) == (-LIMIT, LIMIT):
        return 0, size
    queries, keys = ([Place("", size, rank, split).chunks(count) for rank in range(size)] for count in rows)

    def is_needed(hop: int) -> bool:
        pairs = (itertools.product(queries[rank], keys[rank - hop]) for rank in range(size))
        return any(is_in_sight(band, *pair) for pair in itertools.chain.from_iterable(pairs))

    needed = list(filter(is_needed, range(size)))
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


def ring_attention(call: Call, here: Place, hops: Hops, by_kernel: bool) -> Result:
    """Attention of the queries of this rank; a bias has the columns of rank after rank."""
    xp, (plan, arrays) = call.xp, make_plan(upcast_call(call))
    keys = (cast_to(x, call.key.dtype, xp=xp) for x in arrays[1:3])  # they travel in 16 bits
    ring, arrays = RingPlan(plan, *here[:2], here.split, hops, by_kernel), (arrays[0], *keys, *arrays[3:])
    output, *rows = call.backend.custom_gradient(RING, ring, arrays)
    *dims, _ = shape(call.query, xp=xp)
    return Result(xp.reshape(output, (*dims, call.value.shape[-1])), None, *(xp.reshape(x, tuple(dims)) for x in rows))


def _go_round(plan: RingPlan, call: Call, add: Callable[..., Any], sums: Any, *, is_backward: bool) -> Any:
    """``sums = add(part, i, j, sums)`` for the parts of all pairs of chunks; backward, those of keys go with these.

    Out of the chunks of all ranks, j counts in the order of ranks.
    """
    (first, count), (_, group, size, *_), loops = plan.hops, plan, call.backend.loops
    lent: Any = call.backend.collectives
    num_chunks, rank, last = SPLITS[plan.split], lent.rank(group), first + count - 1

    def visit(hop: Any, keys: Arrays, sums: Any, by: int) -> Any:
        def add_pair(index: Any, sums: Any) -> Any:
            i, j, source = index // num_chunks, index % num_chunks, (rank - hop) % size
            part = _part(plan, call._replace(key=keys[0], value=keys[1]), (rank, i), (source, j))
            return sums if part is None else add(part, i, source * num_chunks + j, sums)

        sums = loops.loop(0, num_chunks**2, add_pair, sums)
        if is_backward and by:
            sums = sums[0], *lent.rotate(sums[1:3], group, by)(), *sums[3:]
        return sums

    def step(hop: Any, carried: Any) -> Any:
        keys, sums = carried
        finish = lent.rotate(keys, group, 1)  # while the next keys are under way
        sums = visit(hop, keys, sums, 1)
        return finish(), sums

    keys = lent.rotate(call[1:3], group, first)() if first else call[1:3]
    if count > 1:
        keys, sums = loops.loop(first, last, step, (keys, sums))
    return visit(last, keys, sums, -last % size)


def _part(plan: RingPlan, call: Call, row: tuple[Any, Any], column: tuple[Any, Any]) -> Call | None:
    """The part of two chunks, each of a rank, of a call with the keys of the second; ``None`` if no query sees one."""
    (rank, i), (source, j), size, count, xp = row, column, plan.size, SPLITS[plan.split], call.xp
    rows, columns = (x.shape[-2] // count for x in call[:2])
    starts = start_of(rank, i, size, rows), start_of(source, j, size, columns)
    if isinstance(source, int) and not is_in_sight(band_of(call.mask), *zip(starts, (rows, columns), strict=True)):
        return None
    bias = taken(call.bias, Run(source * count * columns, count * columns), -1, xp, may_broadcast=True)
    part = cut(call._replace(bias=bias), rows=Run(i * rows, rows), columns=Run(j * columns, columns))
    key, value = upcast(part[1:3], xp=xp)
    return part._replace(key=key, value=value, starts=starts)


def _among(x: Array, axis: int, index: Any, count: int, number: float, xp: Namespace) -> Array:
    """A block among so many along an axis, with a number in the place of the others."""
    if count == 1:
        return x
    other = xp.full_like(x, number)
    if isinstance(index, int):
        return xp.concat([x if index == each else other for each in range(count)], axis=axis)
    return xp.concat([xp.where(xp.equal(index, each), x, other) for each in range(count)], axis=axis)


def kernel_of(call: Call) -> Any:
    """The kernel that a call takes, if it has pieces, whose gradients are those of query, key and value alone."""
    if any(each is not None for each in (call.bias, call.softcap, call.score_mod, call.dropout)):
        return None
    way = taken_way(call)
    return way if isinstance(way, Kernel) and way.takes_pieces(call) else None


def _kernel_call(plan: RingPlan, part: Call) -> tuple[Any, Call]:
    """The kernel that a part takes, and its call; none where the mask is no band of numbers."""
    call, columns = from_starts(part._replace(starts=(0, 0)), *part.starts), part.key.shape[-2]
    if not plan.by_kernel or call.starts != (0, 0) or not band_of(call.mask).is_exact:
        return None, call
    call = call._replace(query=_with_heads(call.query, call.xp), scale=1.0)
    if key_ranges(call) == [KeyRange(0, columns, 0, columns)]:
        call = call._replace(mask=None)
    return kernel_of(call), call


def _with_heads(x: Array, xp: Namespace) -> Array:
    """An array (B, G, R, M, ...) with one axis of heads."""
    batch, heads, group, *dims = x.shape
    return xp.reshape(x, (batch, heads * group, *dims))


def _packed(plan: RingPlan, part: Call) -> tuple[Plan, Arrays]:
    """A part as blocks take it."""
    definitions, arrays = pack(part)
    return plan.plan._replace(call=definitions), arrays


def _attend(plan: RingPlan, part: Call) -> Arrays:
    """What `forward` returns of a part. A kernel does not tell what rounding takes from its logsumexp: little."""
    (kernel, call), xp = _kernel_call(plan, part), part.xp
    found = None if kernel is None else kernel.attend_to_piece(call)
    if found is None:
        return forward(*_packed(plan, part), part.backend)
    output, logsumexp = (xp.reshape(x, (*part.query.shape[:-1], *x.shape[3:])) for x in found)
    return output, logsumexp, xp.zeros_like(logsumexp)


def _gradients(plan: RingPlan, part: Call, results: Arrays, cotangents: Arrays) -> list[Any]:
    """The gradients of the arrays of a part, given what is exact of the whole."""
    (kernel, call), xp = _kernel_call(plan, part), part.xp
    ends = ([_with_heads(x, xp) for x in each[:2]] for each in (results, cotangents))
    found = None if kernel is None else kernel.piece_gradients(call, *ends)
    if found is None:
        return list(backward(*_packed(plan, part), results, cotangents, part.backend))
    return [xp.reshape(found[0], part.query.shape), *found[1:], *(None for _ in pack(part)[1][3:])]


def _forward(plan: RingPlan, arrays: Arrays, backend: Backend) -> Arrays:
    """Output, logsumexp, and what is to be added to that to make it exact, as blocks have them."""
    xp, num_chunks = backend.namespace, SPLITS[plan.split]

    def add(part: Call, i: Any, j: Any, results: Arrays) -> Arrays:
        found = zip(_attend(plan, part), ROWS, (0.0, -math.inf, 0.0), strict=True)
        others = (_among(x, axis, i, num_chunks, number, xp) for x, axis, number in found)
        return merge_pieces(*(xp.stack(each) for each in zip(results, others, strict=True)), xp=xp)

    output, logsumexp, remainder = empty_results(plan.plan, arrays, backend)
    nothing, call = (output, xp.full_like(logsumexp, -math.inf), remainder), unpack(plan.plan, arrays, backend)
    results: Arrays = _go_round(plan, call, add, nothing, is_backward=False)
    return results


def _backward(plan: RingPlan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Any) -> Gradients:
    """The gradient for each array; those of keys and values end on the rank that these came from."""
    call, xp, num_chunks = unpack(plan.plan, arrays, backend), backend.namespace, SPLITS[plan.split]
    factor = xp.exp(xp.negative(results[2]))  # of weights by the logsumexp alone, see `blocks.backward`
    cotangents = xp.multiply(cotangents[0], xp.expand_dims(factor, axis=-1)), xp.multiply(cotangents[1], factor), factor
    of_rows = (*results[:2], xp.zeros_like(factor)), cotangents

    def add(part: Call, i: Any, j: Any, sums: Any) -> Any:
        rows = Run(i * part.query.shape[-2], part.query.shape[-2])
        ends = (tuple([taken(x, rows, axis, xp) for x, axis in zip(each, ROWS, strict=True)]) for each in of_rows)
        found, bias = _gradients(plan, part, *ends), call.bias
        for n, chunk in enumerate((i, j % num_chunks, j % num_chunks)):
            found[n] = _among(found[n], -2, chunk, num_chunks, 0.0, xp)
        if bias is not None and not is_broadcast(bias, -2):
            found[3] = _among(found[3], -2, i, num_chunks, 0.0, xp)
        if bias is not None and not is_broadcast(bias, -1):
            found[3] = _among(found[3], -1, j, num_chunks * plan.size, 0.0, xp)
        pairs = zip(sums, found, strict=False)  # behind the last gradient, a part may have its positions
        return tuple(total if x is None else xp.add(total, upcast(x, xp=xp)) for total, x in pairs)

    zeros = tuple([upcast(xp.zeros_like(x), xp=xp) if is_floating(x) else None for x in arrays])
    sums = zip(_go_round(plan, call, add, zeros, is_backward=True), arrays, strict=True)
    return tuple(None if total is None else cast_to(total, x.dtype, xp=xp) for total, x in sums)


def _empty(plan: RingPlan, arrays: Arrays, backend: Backend) -> Arrays:
    return empty_results(plan.plan, arrays, backend)


register("shards.Hops", Hops)
register("shards.RingPlan", RingPlan)
RING = register("shards.ring", Operation(_forward, _backward, _empty))
