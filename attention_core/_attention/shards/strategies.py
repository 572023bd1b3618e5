"""The strategies by which ranks share attention to a sequence, and which of them a call takes.

They are judged as ways are: a refusal, or why another one is faster. Each runs the call that this rank computes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from attention_core._arithmetic import ARITHMETICS, fan_out
from attention_core._arrays import HALF, Array, cast_to, dtype_name, upcast
from attention_core._attention.blocks.grid import pad
from attention_core._attention.call import Call, Result, has_no_pairs, repeat_kv, upcast_call
from attention_core._attention.reproducible.forward import reproducible_attention
from attention_core._attention.shards.operations import check_no_gradient, exchange, gather
from attention_core._attention.shards.partials import merge, merge_exactly
from attention_core._attention.shards.ring import Hops, hops_of, moved, ring_attention, takes_kernel
from attention_core._attention.shards.rules import (
    dropout_of_heads,
    looks_up_heads,
    mask_of_heads,
    mask_within,
    score_mod_at,
)
from attention_core._attention.shards.splits import Place, cut, own, own_heads, stack_of, whole_of
from attention_core._attention.ways import dense_advantage, run_call, with_sinks
from attention_core._backend import Verdict, is_on_host
from attention_core.masks import Mask
from attention_core.masks._band import LIMIT
from attention_core.masks._mask import band_of
from attention_core.masks._rules import rule_of
from attention_core.scores import ScoreMod

MOST_GATHERED = 2**21  # numbers of keys and values, of as many heads as are gathered at once
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


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


class Strategy:
    """A way to share attention: a base class."""

    name: str

    def judge(self, sharded: Sharded) -> Verdict:
        """Say whether this gives the answer, which it does by default, and why another one is faster."""
        return Verdict(None)

    def sent(self, sharded: Sharded) -> int:
        """How many bytes each rank receives from others, forward."""
        raise NotImplementedError

    def run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
        """Compute attention of the queries of this rank."""
        raise NotImplementedError

    def local_call(self, sharded: Sharded) -> Call:
        """A call like those that this rank computes, of which no array is that of another rank."""
        raise NotImplementedError


class Heads(Strategy):
    """Exchange positions for heads: each rank has all positions of some heads."""

    name = "heads"

    def judge(self, sharded: Sharded) -> Verdict:
        call, size = sharded.call, sharded.here.size
        num_heads, num_kv_heads = (operator.index(x.shape[-3]) for x in call[:2])  # no symbols of a compiler
        if num_heads % max(1, math.lcm(num_kv_heads, size)):
            return Verdict(
                f"{num_heads} heads and {num_kv_heads} key/value heads are not shared out evenly by {size} ranks"
            )
        if looks_up_heads(call.mask):
            return Verdict("a rule that is not of attention_core may look up an array by heads of the whole")
        if num_kv_heads % size == 0:
            return Verdict(None)
        if call.arithmetic == "reproducible":
            return Verdict(
                "the key/value heads would be repeated, and rounded gradients summed: 'gather' has equal bits"
            )
        return Verdict(None, False, "repeats key/value heads")

    def sent(self, sharded: Sharded) -> int:
        call, size = sharded.call, sharded.here.size
        repeats = _repeats(call, size)
        numbers: int = math.prod(call.query.shape) + math.prod((*call.query.shape[:-1], call.value.shape[-1]))
        numbers += repeats * (math.prod(call.key.shape) + math.prod(call.value.shape))
        return numbers * (size - 1) // size * BYTES[dtype_name(call.query.dtype)]

    def run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
        call, here, lengths, implementation = sharded
        xp, backend, rows = call.xp, call.backend, call.query.shape[-2] * here.size
        if call.arithmetic == "reproducible":
            query, key, value = fan_out(call[:3], ARITHMETICS[call.arithmetic], xp)
            call = call._replace(query=query, key=key, value=value)
        repeats = _repeats(call, here.size)
        call = call if repeats == 1 else upcast_call(call)
        arrays = call.query, *(repeat_kv(x, repeats, xp=xp) for x in call[1:3])
        own_bias = call.bias
        if own_bias is not None and len(own_bias.shape) > 1 and own_bias.shape[-2] == call.query.shape[-2]:  # even of 1
            if _has_axis(own_bias, -3):
                arrays = (*arrays, own_bias)
            else:
                (own_bias,) = gather((own_bias,), here, -2, backend)
                own_bias = cut(own_bias, -2, 0, lengths[0])
        elif own_bias is not None:
            own_bias = own_heads(own_bias, here, xp)
        query, key, value, *biases = exchange(arrays, here, backend, to_heads=True)
        local = _of_heads(sharded, call)._replace(
            query=cut(query, -2, 0, lengths[0]),
            key=cut(key, -2, 0, lengths[1]),
            value=cut(value, -2, 0, lengths[1]),
            bias=cut(biases[0], -2, 0, lengths[0]) if biases else own_bias,
        )
        result = run_call(local, implementation, logsumexp=logsumexp)
        back = [pad(cast_to(result.output, sharded.call.query.dtype, xp=xp), -2, rows - lengths[0], xp)]
        if logsumexp:
            back.append(pad(xp.expand_dims(result.logsumexp, axis=-1), -2, rows - lengths[0], xp, -math.inf))
        output, *found = exchange(tuple(back), here, backend, to_heads=False)
        return Result(output, None, xp.squeeze(found[0], axis=-1) if found else None)

    def local_call(self, sharded: Sharded) -> Call:
        call, here, lengths, _ = sharded
        count, num_queries, num_keys = math.lcm(call.key.shape[-3], here.size) // here.size, *lengths
        local = _of_heads(sharded, call)._replace(
            query=_like(call.query, call.query.shape[-3] // here.size, num_queries, call.xp)
        )
        key, value = (_like(x, count, num_keys, call.xp) for x in call[1:3])
        return local._replace(key=key, value=value, bias=None)


class Gather(Strategy):
    """Gather keys and values: each rank has all of them, and its own queries."""

    name = "gather"

    def sent(self, sharded: Sharded) -> int:
        call, size = sharded.call, sharded.here.size
        numbers: int = math.prod(call.key.shape) + math.prod(call.value.shape)
        return numbers * (size - 1) * BYTES[dtype_name(call.query.dtype)]

    def run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
        xp, results = sharded.call.xp, [self._run(each, logsumexp=logsumexp) for each in _turns(sharded)]
        if len(results) == 1:
            return results[0]
        output = xp.concat([each.output for each in results], axis=-3)
        return Result(output, None, xp.concat([x.logsumexp for x in results], axis=-2) if logsumexp else None)

    def _run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
        call, here, lengths, implementation = sharded
        xp, backend, stop, is_exact = call.xp, call.backend, sharded.stop, call.arithmetic == "reproducible"
        rows = call.query.shape[-2]
        if is_exact:
            query, key, value = fan_out(call[:3], ARITHMETICS[call.arithmetic], xp)
            call = call._replace(query=query, key=key, value=value)
        else:
            call = call._replace(query=upcast(call.query, xp=xp), bias=upcast(call.bias, xp=xp))
        is_wide = not is_exact and dtype_name(sharded.call.query.dtype) in HALF
        key, value = gather(call[1:3], here, -2, backend, is_summed=is_exact, is_wide=is_wide)
        call = call._replace(key=cut(key, -2, 0, lengths[1]), value=cut(value, -2, 0, lengths[1]))
        call = _within(call, queries=stop)
        if is_exact:
            call = call._replace(starts=(here.start(rows, call.query, xp), 0))
            output, found, _ = reproducible_attention(call, here.group, rows * here.size)
        else:
            locals_ = _calls_of_chunks(call, here.chunks(rows))
            results = [run_call(each, implementation, logsumexp=logsumexp) for each in locals_]
            output = xp.concat([each.output for each in results], axis=-2)
            found = xp.concat([each.logsumexp for each in results], axis=-1) if logsumexp else None
        return Result(output, None, _without_padding(sharded, found) if logsumexp else None)

    def local_call(self, sharded: Sharded) -> Call:
        call, here, lengths, _ = _turns(sharded)[0]
        chunks = here.chunks(call.query.shape[-2])
        key, value = (_like(x, x.shape[-3], lengths[1], call.xp) for x in call[1:3])
        return _calls_of_chunks(_within(call._replace(key=key, value=value), queries=sharded.stop), chunks)[0]


class Ring(Strategy):
    """Pass keys and values round: each rank attends to those that have come, block by block."""

    name = "ring"

    def judge(self, sharded: Sharded) -> Verdict:
        if sharded.call.arithmetic == "reproducible":
            return Verdict("the outputs of each hop would be rounded before they are merged: 'gather' has equal bits")
        if sharded.implementation == "dense":
            return Verdict(
                "implementation='dense' holds all scores at once, and a ring has the keys of one rank at a time"
            )
        if 2 * self._hops(sharded).rotations < sharded.here.size - 1:
            return Verdict(None)
        return Verdict(None, False, "no window leaves fewer than half of its hops")

    def sent(self, sharded: Sharded) -> int:
        call = sharded.call
        numbers: int = math.prod(call.key.shape) + math.prod(call.value.shape)
        return self._hops(sharded).rotations * numbers * BYTES[dtype_name(call.query.dtype)]

    def run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
        call, here, stop = sharded.call, sharded.here, sharded.stop
        if has_no_pairs(call):  # as blocks, a ring has nothing to cut
            return GATHER.run(sharded, logsumexp=logsumexp)
        if call.bias is not None and _has_axis(call.bias, -1):
            stack = stack_of(_padded_columns(sharded), -1, here.split, here.size, call.xp)
            call = call._replace(bias=whole_of(stack, -1, "contiguous", call.xp))
        result = ring_attention(_within(call, stop, stop), here, self._hops(sharded), self.takes_kernel(sharded))
        result = result if call.sinks is None else with_sinks(result, call)
        return result._replace(logsumexp=_without_padding(sharded, result.logsumexp) if logsumexp else None)

    def takes_kernel(self, sharded: Sharded) -> bool:
        """Whether hops that need no mask take a kernel."""
        return sharded.implementation == "auto" and takes_kernel(sharded.call)

    def _hops(self, sharded: Sharded) -> Hops:
        call, (_, size, _, split) = sharded.call, sharded.here
        return hops_of(band_of(call.mask), size, split, (call.query.shape[-2], call.key.shape[-2]))


class Merge(Strategy):
    """Attend to the keys of this rank by all queries, which all ranks have, and merge what they found: for decoding."""

    name = "merge"

    def sent(self, sharded: Sharded) -> int:
        call, size = sharded.call, sharded.here.size
        *dims, _ = call.query.shape
        if call.arithmetic == "reproducible":
            width = call.value.shape[-1]
            each = 8 * (width + 7) + 4 * (width + 1)  # sums in float64, and the result; sums in doubt are few
            return int(2 * (size - 1) * math.prod(dims) * each) // size
        numbers: int = math.prod(dims) * (call.value.shape[-1] + 2)
        return 2 * (size - 1) * numbers * max(4, BYTES[dtype_name(call.query.dtype)])

    def run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
        call, here, implementation = self.local_call(sharded), sharded.here, sharded.implementation
        of_scores = call.score_mod.arrays if isinstance(call.score_mod, ScoreMod) else ()
        check_no_gradient((*call[:3], call.bias, call.scale, call.softcap, *of_scores), call.backend)
        if call.arithmetic == "reproducible":
            result = merge_exactly(call, here)
            return result if logsumexp else result._replace(logsumexp=None)
        if implementation == "auto":  # few kernels return the logsumexp
            implementation = "dense" if dense_advantage(call) else "blockwise"
        result = merge(run_call(call, implementation, logsumexp=True), here, call)
        result = result if sharded.call.sinks is None else with_sinks(result, sharded.call)
        return result if logsumexp else result._replace(logsumexp=None)

    def local_call(self, sharded: Sharded) -> Call:
        """All queries, and the keys of this rank."""
        call, here = sharded.call, sharded.here
        bias, rows = call.bias, call.key.shape[-2]
        if bias is not None and _has_axis(bias, -1):
            bias = own(stack_of(_padded_columns(sharded), -1, here.split, here.size, call.xp), here.rank, call.xp)
        starts = 0, here.start(rows, call.key, call.xp)
        return _within(call._replace(sinks=None, bias=bias, starts=starts), keys=sharded.stop)


RING, HEADS, GATHER, MERGE = Ring(), Heads(), Gather(), Merge()
STRATEGIES = ("auto", "gather", "heads", "merge", "ring")


def walk_strategies(sharded: Sharded, name: str) -> Iterator[tuple[Strategy, Verdict]]:
    """The strategies for what is shared with their verdicts, in the order in which they are asked."""
    backend: Any = sharded.call.backend
    cannot = Verdict(f"ranks of {backend.name} cannot send to each other: 'gather' has the same numbers")
    for strategy in (MERGE,) if name == MERGE.name else (RING, HEADS, GATHER):
        yield strategy, strategy.judge(sharded) if strategy.name in backend.collectives.strategies else cannot


def taken_strategy(sharded: Sharded, name: str) -> Strategy:
    """The strategy of a name, or that of ``"auto"``.

    Raises
    ------
    ValueError
        When the one that was asked for is refused.
    """
    for strategy, verdict in walk_strategies(sharded, name):
        if name == "auto" and verdict.refusal is None and verdict.is_faster:
            return strategy
        if name == strategy.name and verdict.refusal is not None:
            raise ValueError(
                f"expected a call that strategy={name!r} answers as defined; got one of which {verdict.refusal}"
            )
        if name == strategy.name:
            return strategy
    return GATHER


def _repeats(call: Call, size: int) -> int:
    """How often a key/value head is repeated, so that ranks have whole groups."""
    return size // math.gcd(call.key.shape[-3], size)


def _has_axis(x: Array, axis: int) -> bool:
    return len(x.shape) >= -axis and x.shape[axis] != 1


def _of_heads(sharded: Sharded, call: Call) -> Call:
    """The options of a call for the heads of this rank."""
    xp, here = call.xp, sharded.here
    num_heads = call.query.shape[-3]
    count = num_heads // here.size
    first = here.rank * count if isinstance(here.rank, int) else xp.multiply(here.rank, count)
    sinks = call.sinks
    if sinks is not None:
        sinks = xp.reshape(own_heads(xp.reshape(sinks, (num_heads, 1, 1)), here, xp), (count,))
    return call._replace(
        mask=mask_of_heads(call.mask, here, first, xp),
        score_mod=score_mod_at(call.score_mod, head=first),
        sinks=sinks,
        dropout=dropout_of_heads(call.dropout, first, num_heads, call.query, xp),
    )


def _turns(sharded: Sharded) -> list[Sharded]:
    """Some heads after others, so that not all that is gathered, nor all of its gradients, is there at once.

    Compilers order it themselves, and accelerators have not been measured.
    """
    call, xp, heads = sharded.call, sharded.call.xp, sharded.call.key.shape[-3]
    numbers = sharded.here.size * (math.prod(call.key.shape) + math.prod(call.value.shape))
    is_whole = call.arithmetic == "reproducible" or call.score_mod is not None or looks_up_heads(call.mask)
    if is_whole or call.backend.loops.traced or not is_on_host(call.query):
        return [sharded]
    most = range(1, max(1, heads) + 1)
    count = next(n for n in most if heads % n == 0 and (numbers <= n * MOST_GATHERED or n == heads))
    turns = []
    for n in range(count) if count > 1 else ():
        turn = sharded._replace(here=sharded.here._replace(rank=n, size=count))
        bias = None if call.bias is None else own_heads(call.bias, turn.here, xp)
        query, key, value = (own_heads(x, turn.here, xp) for x in call[:3])
        of_turn = _of_heads(turn, call)._replace(query=query, key=key, value=value, bias=bias)
        turns.append(sharded._replace(call=of_turn))
    return turns or [sharded]


def _calls_of_chunks(call: Call, chunks: list[tuple[Any, int]]) -> list[Call]:
    """A call for each chunk of queries."""
    calls, first = [], 0
    for start, count in chunks:
        stop = first + count
        bias = call.bias
        if bias is not None and _has_axis(bias, -2):
            bias = cut(bias, -2, first, stop)
        calls.append(_from_start(call._replace(query=cut(call.query, -2, first, stop), bias=bias), start))
        first = stop
    return calls


def _padded_columns(sharded: Sharded) -> Array:
    """The bias, with columns of zeros for the keys that pad the shards."""
    call, here, lengths, _ = sharded
    return pad(call.bias, -1, call.key.shape[-2] * here.size - lengths[1], call.xp)


def _within(call: Call, queries: int = LIMIT, keys: int = LIMIT) -> Call:
    """A call over the positions of the whole, for the first queries and keys."""
    mask, score_mod = mask_within(call.mask, queries, keys), score_mod_at(call.score_mod, queries=queries, keys=keys)
    return call._replace(mask=mask, score_mod=score_mod)


def _without_padding(sharded: Sharded, logsumexp: Array) -> Array:
    """The logsumexp of queries, -inf in padding, which would have that of the sink."""
    if sharded.stop == LIMIT or sharded.call.sinks is None:
        return logsumexp
    xp, rows = sharded.call.xp, sharded.call.query.shape[-2]
    return xp.where(xp.less(sharded.here.positions(rows, logsumexp, xp), sharded.stop), logsumexp, -math.inf)


def _from_start(call: Call, start: Any) -> Call:
    """A call whose first query has a position: in its rule, if that is a band and nothing else looks at positions."""
    is_free = call.score_mod is None and call.dropout is None
    if call.mask is None and is_free:
        return call
    is_free = is_free and isinstance(start, int) and isinstance(call.mask, Mask)
    if is_free and (band := band_of(call.mask)).is_exact:
        return call._replace(mask=rule_of(moved(band, start, 0)))
    return call._replace(starts=(start, 0))


def _like(x: Array, heads: int, length: int, xp: Any) -> Array:
    """An array of some shape, of which memory holds no more than a row."""
    return xp.broadcast_to(x[..., :1, :1, :], (*x.shape[:-3], heads, length, x.shape[-1]))
