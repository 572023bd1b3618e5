"""Attention to the keys of each rank, merged over ranks by sums."""

from __future__ import annotations

import functools

from attention_core._arrays import Array, positions
from attention_core._attention.call import Call, Result
from attention_core._attention.reproducible.pieces import (
    ExactPartial,
    Extent,
    complete_exactly,
    extent_of,
    merge_sums,
    merge_two_extents,
    reproducible_partial,
)
from attention_core._attention.shards.operations import total
from attention_core._attention.shards.splits import Place
from attention_core._attention.softmax import merge_pieces, with_remainder
from attention_core._backend import Backend


def merge(piece: Result, here: Place, call: Call) -> Result:
    """Attention to all keys, out of that to those of this rank: one sum over ranks."""
    xp, known = call.xp, with_remainder(piece, call.xp)
    stack = xp.concat([known.output, *(xp.expand_dims(x, axis=-1) for x in known[2:])], axis=-1)
    stack = _of_all_ranks(stack, here, call.backend)
    output, *rows = merge_pieces(stack[..., :-2], stack[..., -2], stack[..., -1], xp=xp)
    return Result(output, None, *rows)


def merge_exactly(call: Call, here: Place) -> tuple[Array, Array]:
    """The same in reproducible arithmetic: maxima over ranks, then sums of integers."""
    xp, backend = call.xp, call.backend
    stacks = [_of_all_ranks(x, here, backend) for x in extent_of(call)]
    extents = (Extent(*(x[r, ...] for x in stacks)) for r in range(here.size))
    extent = functools.reduce(functools.partial(merge_two_extents, xp=xp), extents)
    partial = reproducible_partial(call, extent)
    sums = total(xp.concat([partial.weights, partial.values], axis=-1), here, backend)
    sums = merge_sums(sums, xp.zeros_like(sums), xp)  # what exceeds a limb is carried
    count = partial.weights.shape[-1]
    return complete_exactly(ExactPartial(sums[..., :count], sums[..., count:], extent), call.dropout, xp)


def _of_all_ranks(x: Array, here: Place, backend: Backend) -> Array:
    """The arrays of all ranks, (R, ...), by a sum in which each has a place: so JAX knows that all get the same."""
    xp = backend.namespace
    mine = xp.equal(positions(here.size, x, xp=xp), here.rank)
    places = xp.where(xp.reshape(mine, (here.size, *(1 for _ in x.shape))), xp.expand_dims(x, axis=0), 0.0)
    return total(places, here, backend)
