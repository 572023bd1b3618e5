"""Attention to the keys of each rank, merged over ranks by sums."""

from __future__ import annotations

from ..._arrays import Array, positions
from ..._backend import Backend
from ..call import Call, Result
from ..reproducible.forward import reproducible_attention
from ..softmax import merge_pieces, with_remainder
from .operations import total
from .splits import Place


def merge(piece: Result, here: Place, call: Call) -> Result:
    """Attention to all keys, out of that to those of this rank: one sum over ranks."""
    xp, known = call.xp, with_remainder(piece, call.xp)
    stack = xp.concat([known.output, *(xp.expand_dims(x, axis=-1) for x in known[2:])], axis=-1)
    stack = _of_all_ranks(stack, here, call.backend)
    output, *rows = merge_pieces(stack[..., :-2], stack[..., -2], stack[..., -1], xp=xp)
    return Result(output, None, *rows)


def merge_exactly(call: Call, here: Place) -> Result:
    """The same in reproducible arithmetic. Another sum, to which one rank adds, tells JAX that all have the same."""
    xp = call.xp
    output, logsumexp, _ = reproducible_attention(call, here.group)
    results = xp.concat([output, xp.expand_dims(logsumexp, axis=-1)], axis=-1)
    is_first = xp.equal(positions(1, results, xp=xp), here.rank)
    results = total(xp.where(is_first, results, 0.0), here, call.backend)
    return Result(results[..., :-1], None, results[..., -1])


def _of_all_ranks(x: Array, here: Place, backend: Backend) -> Array:
    """The arrays of all ranks, (R, ...), by a sum in which each has a place: so JAX knows that all get the same."""
    xp = backend.namespace
    mine = xp.equal(positions(here.size, x, xp=xp), here.rank)
    places = xp.where(xp.reshape(mine, (here.size, *(1 for _ in x.shape))), xp.expand_dims(x, axis=0), 0.0)
    return total(places, here, backend)
