"""The strategies by which ranks share attention to a sequence, and which of them a call takes.

Each is a way to compute a `Sharded` call. `explain_shards` prints what is walked.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import NamedTuple

from ..._arrays import HALF, Array, cast_to, clipped, dtype_name, positions, upcast
from ..._backend import Backend
from ...masks._band import LIMIT
from ...masks._mask import band_of
from ..blocks.plan import pad
from ..blocks.visits import score_variables
from ..call import Call, Result, has_no_pairs, repeat_kv, upcast_call
from ..kernels import OPEN, Verdict, Way
from ..parts import Run, cut, taken
from ..reproducible.forward import reproducible_attention
from ..softmax import merge_pieces, with_remainder
from ..ways import Candidate, Explanation, logsumexp_way, run_call, with_sinks
from .ring import Hops, hops_of, kernel_of, ring_attention
from .splits import Place, check_no_gradient, exchange, from_starts, gather, stack_of, total, whole_of, within


class Sharded(NamedTuple):
    """A call whose queries, keys, values and bias are those of this rank, and whose mask is one over the whole.

    Attributes
    ----------
    call : Call
    here : Place
    lengths : tuple of int
        The numbers of queries and keys of the whole, without padding.
    implementation : {"auto", "dense", "blockwise"}
    """

    call: Call
    here: Place
    lengths: tuple[int, int]
    implementation: str = "auto"

    @property
    def stop(self) -> int:
        """The position from which on all only pads the shards; `LIMIT` if nothing does."""
        is_padded = self.lengths[1] < self.call.key.shape[-2] * self.here.size
        return self.lengths[1] if is_padded else LIMIT


class Heads(Way):
    """Exchange positions for heads: each rank has all positions of some heads."""

    kind, reason = "heads", "each rank has all positions of some heads"

    def judge(self, sharded: Sharded) -> Verdict:
        call, size = sharded.call, sharded.here.size
        num_heads, num_kv_heads = (operator.index(x.shape[-3]) for x in call[:2])  # no symbols of a compiler
        if num_heads % max(1, math.lcm(num_kv_heads, size)):
            return Verdict(
                f"{num_heads} heads and {num_kv_heads} key/value heads are not shared out evenly by {size} ranks"
            )
        if num_kv_heads % size == 0:
            return OPEN
        if call.arithmetic == "reproducible":
            return Verdict(
                "the key/value heads would be repeated, and rounded gradients summed: 'gather' has equal bits"
            )
        return Verdict(None, "repeats key/value heads")

    def run(self, sharded: Sharded, *, logsumexp: bool, weights: bool = False) -> Result:
        (call, here, (queries, keys), implementation), xp, backend = sharded, sharded.call.xp, sharded.call.backend
        rows, count, dtype = call.query.shape[-2], call.query.shape[-3] // here.size, call.query.dtype
        repeats = here.size // math.gcd(call.key.shape[-3], here.size)  # so that ranks have whole groups
        call = call if repeats == 1 else upcast_call(call)
        key, value = (repeat_kv(x, repeats, xp=xp) for x in call[1:3])
        call, bias = call._replace(key=key, value=value), call.bias
        local = cut(call, heads=Run(here.rank * count, count))
        query, key, value = exchange(call[:3], here, backend, to_heads=True)
        if bias is not None and len(bias.shape) > 1 and bias.shape[-2] == rows:  # even of 1
            is_of_heads = _has_axis(bias, -3)
            move = functools.partial(exchange, to_heads=True) if is_of_heads else functools.partial(gather, axis=-2)
            (bias,) = move((bias,), here=here, backend=backend)
            local = local._replace(bias=_first(bias, queries))
        local = local._replace(query=_first(query, queries), key=_first(key, keys), value=_first(value, keys))
        result = run_call(local, implementation, logsumexp=logsumexp)
        fill = rows * here.size - queries
        back = [pad(cast_to(result.output, dtype, xp=xp), -2, fill, xp)]
        if logsumexp:
            back.append(pad(xp.expand_dims(result.logsumexp, axis=-1), -2, fill, xp, -math.inf))
        output, *found = exchange(tuple(back), here, backend, to_heads=False)
        return Result(output, None, xp.squeeze(found[0], axis=-1) if found else None)


class Gather(Way):
    """Gather keys and values: each rank has all of them, and its own queries."""

    kind, reason = "gather", "each rank has all keys and values, and its own queries"

    def run(self, sharded: Sharded, *, logsumexp: bool, weights: bool = False) -> Result:
        (call, here, (_, keys), implementation), stop = sharded, sharded.stop
        xp, rows, is_exact = call.xp, call.query.shape[-2], call.arithmetic == "reproducible"
        is_wide = not is_exact and dtype_name(call.query.dtype) in HALF
        gathered = gather(call[1:3], here, -2, call.backend, is_summed=is_exact, is_wide=is_wide)
        key, value = (_first(x, keys) for x in gathered)
        call = within(call._replace(key=key, value=value), queries=stop)
        if is_exact:
            call = call._replace(starts=(here.start(rows, call.query, xp), 0))
            output, found, _ = reproducible_attention(call, here.group, rows * here.size)
            return _without_padding(sharded, Result(output, None, found))
        call = call._replace(query=upcast(call.query, xp=xp), bias=upcast(call.bias, xp=xp))
        chunks = enumerate(here.chunks(rows))
        parts = [from_starts(cut(call, rows=Run(n * size, size)), start, 0) for n, (start, size) in chunks]
        results = [run_call(each, implementation, logsumexp=logsumexp) for each in parts]
        output, found = xp.concat([each.output for each in results], axis=-2), None
        if logsumexp:
            found = xp.concat([each.logsumexp for each in results], axis=-1)
        return _without_padding(sharded, Result(output, None, found))


class Ring(Way):
    """Pass keys and values round: each rank attends to those that have come, block by block."""

    kind, reason = "ring", "keys and values go round, and each rank attends to those that it has"

    def judge(self, sharded: Sharded) -> Verdict:
        if sharded.call.arithmetic == "reproducible":
            return Verdict("the outputs of each hop would be rounded before they are merged: 'gather' has equal bits")
        if sharded.implementation == "dense":
            return Verdict(
                "implementation='dense' holds all scores at once, and a ring has the keys of one rank at a time"
            )
        if 2 * self._hops(sharded).rotations < sharded.here.size - 1:
            return OPEN
        return Verdict(None, "no window leaves fewer than half of its steps")

    def run(self, sharded: Sharded, *, logsumexp: bool, weights: bool = False) -> Result:
        call, here, stop = sharded.call, sharded.here, sharded.stop
        if has_no_pairs(call):  # as blocks, a ring has nothing to cut
            return GATHER.run(sharded, logsumexp=logsumexp)
        if call.bias is not None and _has_axis(call.bias, -1):
            bias = pad(call.bias, -1, call.key.shape[-2] * here.size - sharded.lengths[1], call.xp)
            stack = stack_of(bias, -1, here.split, here.size, call.xp)
            call = call._replace(bias=whole_of(stack, -1, "contiguous", call.xp))
        result = ring_attention(within(call, stop, stop), here, self._hops(sharded), self.takes_kernel(sharded))
        return _without_padding(sharded, result if call.sinks is None else with_sinks(result, call))

    def takes_kernel(self, sharded: Sharded) -> bool:
        """Whether hops that need no mask take a kernel."""
        hop = upcast_call(sharded.call)._replace(mask=None, scale=1.0, sinks=None)
        return sharded.implementation == "auto" and kernel_of(hop) is not None

    def _hops(self, sharded: Sharded) -> Hops:
        call, (_, size, _, split) = sharded.call, sharded.here
        return hops_of(band_of(call.mask), size, split, (call.query.shape[-2], call.key.shape[-2]))


class Merge(Way):
    """Attend to the keys of this rank by all queries, which all ranks have, and merge what they found: for decoding."""

    kind, reason = "merge", "each rank attends to its own keys by all queries"

    def run(self, sharded: Sharded, *, logsumexp: bool, weights: bool = False) -> Result:
        (call, here, (_, keys), implementation), xp = sharded, sharded.call.xp
        rows = call.key.shape[-2]
        places = clipped(here.positions(rows, call.key, xp), keys, xp=xp)
        bias, starts = taken(call.bias, places, -1, xp, may_broadcast=True), (0, here.start(rows, call.key, xp))
        call = within(call._replace(sinks=None, bias=bias, starts=starts), keys=sharded.stop)
        check_no_gradient((*call[:3], call.bias, call.scale, *score_variables(call)), call.backend)
        if call.arithmetic == "reproducible":
            return _merged_exactly(call, here)
        if implementation == "auto":
            implementation = logsumexp_way(call).kind
        result = _merged(run_call(call, implementation, logsumexp=True), here, call)
        return result if sharded.call.sinks is None else with_sinks(result, sharded.call)


RING, HEADS, GATHER, MERGE = Ring(), Heads(), Gather(), Merge()
STRATEGIES = ("auto", "gather", "heads", "merge", "ring")


def walk_strategies(sharded: Sharded, name: str) -> Iterator[tuple[Way, Verdict]]:
    """The strategies for what is shared with their verdicts, in the order in which they are asked."""
    for strategy in (MERGE,) if name == MERGE.kind else (RING, HEADS, GATHER):
        yield strategy, strategy.judge(sharded)


def taken_strategy(sharded: Sharded, name: str) -> Way:
    """The strategy of a name, or that of ``"auto"``.

    Raises
    ------
    ValueError
        When the one that was asked for is refused.
    """
    for strategy, (refusal, slower) in walk_strategies(sharded, name):
        if refusal is None and (name == strategy.kind or (name == "auto" and slower is None)):
            return strategy
        if name == strategy.kind:
            raise ValueError(f"expected a call that strategy={name!r} answers as defined; got one of which {refusal}")
    return GATHER


def explain_shards(sharded: Sharded, name: str) -> Explanation:
    """What `taken_strategy` walks, in words."""
    taken = taken_strategy(sharded, name)
    others = [row for row in walk_strategies(sharded, name) if row[0] is not taken]
    reason = "another one was asked for or comes first"
    rows = (Candidate(way.kind, None, verdict.refusal, verdict.slower or reason) for way, verdict in others)
    return Explanation(taken.kind, taken.reason, tuple(rows))


def _has_axis(x: Array, axis: int) -> bool:
    return len(x.shape) >= -axis and x.shape[axis] != 1


def _first(x: Array, count: int) -> Array:
    return x[..., :count, :]


def _without_padding(sharded: Sharded, result: Result) -> Result:
    """The result with a logsumexp of -inf in padding, which would have that of the sink."""
    if sharded.stop == LIMIT or sharded.call.sinks is None or result.logsumexp is None:
        return result
    xp, rows = sharded.call.xp, sharded.call.query.shape[-2]
    is_inside = xp.less(sharded.here.positions(rows, result.logsumexp, xp), sharded.stop)
    return result._replace(logsumexp=xp.where(is_inside, result.logsumexp, -math.inf))


def _merged(piece: Result, here: Place, call: Call) -> Result:
    """Attention to all keys, out of that to those of this rank: one sum over ranks."""
    xp, known = call.xp, with_remainder(piece, call.xp)
    stack = xp.concat([known.output, *(xp.expand_dims(x, axis=-1) for x in known[2:])], axis=-1)
    stack = _of_all_ranks(stack, here, call.backend)
    output, *rows = merge_pieces(stack[..., :-2], stack[..., -2], stack[..., -1], xp=xp)
    return Result(output, None, *rows)


def _merged_exactly(call: Call, here: Place) -> Result:
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
