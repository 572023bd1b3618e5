"""The strategies by which ranks share attention to a sequence, and which of them a call takes.

They are judged as ways are: a refusal, or why another one is faster. Each runs the call that this rank computes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..._arrays import HALF, Array, cast_to, clipped, dtype_name, upcast
from ..._backend import Verdict, is_on_host
from ...masks._band import LIMIT
from ...masks._mask import band_of
from ...scores import ScoreMod
from ..blocks.grid import pad
from ..call import Call, Result, has_no_pairs, repeat_kv, upcast_call
from ..parts import Run, cut, looks_up_heads, taken
from ..reproducible.forward import reproducible_attention
from ..ways import dense_advantage, run_call, with_sinks
from .operations import check_no_gradient, exchange, gather
from .partials import merge, merge_exactly
from .ring import Hops, hops_of, kernel_of, ring_attention
from .rules import from_starts, within
from .splits import Place, stack_of, whole_of

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
        """Compute attention of the queries of this rank; without being asked, some return the logsumexp."""
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
        output = math.prod((*call.query.shape[:-1], call.value.shape[-1]))
        numbers: int = math.prod(call.query.shape) + output + _repeats(sharded) * _numbers_of_keys(sharded)
        return numbers * (size - 1) // size * BYTES[dtype_name(call.query.dtype)]

    def run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
        here, (queries, keys), xp, backend = sharded.here, sharded.lengths, sharded.call.xp, sharded.call.backend
        call, local = self._calls(sharded)
        bias, rows = call.bias, call.query.shape[-2]
        query, key, value = exchange(call[:3], here, backend, to_heads=True)
        if bias is not None and len(bias.shape) > 1 and bias.shape[-2] == rows:  # even of 1
            is_of_heads = _has_axis(bias, -3)
            move = functools.partial(exchange, to_heads=True) if is_of_heads else functools.partial(gather, axis=-2)
            (bias,) = move((bias,), here=here, backend=backend)
            local = local._replace(bias=_first(bias, queries))
        local = local._replace(query=_first(query, queries), key=_first(key, keys), value=_first(value, keys))
        result = run_call(local, sharded.implementation, logsumexp=logsumexp)
        fill = rows * here.size - queries
        back = [pad(cast_to(result.output, sharded.call.query.dtype, xp=xp), -2, fill, xp)]
        if logsumexp:
            back.append(pad(xp.expand_dims(result.logsumexp, axis=-1), -2, fill, xp, -math.inf))
        output, *found = exchange(tuple(back), here, backend, to_heads=False)
        return Result(output, None, xp.squeeze(found[0], axis=-1) if found else None)

    def local_call(self, sharded: Sharded) -> Call:
        _, local = self._calls(sharded)
        query, key, value = _stretched(local, sharded.lengths[0], *sharded.lengths[1:] * 2)
        return local._replace(query=query, key=key, value=value, bias=None)

    def _calls(self, sharded: Sharded) -> tuple[Call, Call]:
        """The call with key/value heads enough for all ranks; and its part of the heads of this rank, with own rows."""
        call, here, repeats = sharded.call, sharded.here, _repeats(sharded)
        call = call if repeats == 1 else upcast_call(call)
        key, value = (repeat_kv(x, repeats, xp=call.xp) for x in call[1:3])
        call = call._replace(key=key, value=value)
        count = call.query.shape[-3] // here.size
        return call, cut(call, heads=Run(here.rank * count, count))


class Gather(Strategy):
    """Gather keys and values: each rank has all of them, and its own queries."""

    name = "gather"

    def sent(self, sharded: Sharded) -> int:
        return (sharded.here.size - 1) * _numbers_of_keys(sharded) * BYTES[dtype_name(sharded.call.query.dtype)]

    def run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
        return _joined([self._run(each, logsumexp=logsumexp) for each in _turns(sharded)], -3, sharded.call.xp)

    def _run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
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
        results = [run_call(each, implementation, logsumexp=logsumexp) for each in _calls_of_chunks(call, here)]
        return _without_padding(sharded, _joined(results, -2, xp))

    def local_call(self, sharded: Sharded) -> Call:
        (call, here, (_, keys), _), *_ = _turns(sharded)
        _, key, value = _stretched(call, 1, keys, keys)
        return _calls_of_chunks(within(call._replace(key=key, value=value), queries=sharded.stop), here)[0]


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
        return self._hops(sharded).rotations * _numbers_of_keys(sharded) * BYTES[dtype_name(sharded.call.query.dtype)]

    def run(self, sharded: Sharded, *, logsumexp: bool) -> Result:
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
            return merge_exactly(call, here)
        if implementation == "auto":  # few kernels return the logsumexp
            implementation = "dense" if dense_advantage(call) else "blockwise"
        result = merge(run_call(call, implementation, logsumexp=True), here, call)
        return result if sharded.call.sinks is None else with_sinks(result, sharded.call)

    def local_call(self, sharded: Sharded) -> Call:
        """All queries, and the keys of this rank."""
        call, here, xp, rows = sharded.call, sharded.here, sharded.call.xp, sharded.call.key.shape[-2]
        places = clipped(here.positions(rows, call.key, xp), sharded.lengths[1], xp=xp)
        bias = taken(call.bias, places, -1, xp, may_broadcast=True)
        starts = 0, here.start(rows, call.key, xp)
        return within(call._replace(sinks=None, bias=bias, starts=starts), keys=sharded.stop)


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
    for strategy, (refusal, is_faster, _) in walk_strategies(sharded, name):
        if refusal is None and (name == strategy.name or (name == "auto" and is_faster)):
            return strategy
        if name == strategy.name:
            raise ValueError(f"expected a call that strategy={name!r} answers as defined; got one of which {refusal}")
    return GATHER


def _numbers_of_keys(sharded: Sharded) -> int:
    """How many numbers the keys and values of this rank are."""
    return sum(math.prod(x.shape) for x in sharded.call[1:3])


def _repeats(sharded: Sharded) -> int:
    """How often a key/value head is repeated, so that ranks have whole groups."""
    return sharded.here.size // math.gcd(sharded.call.key.shape[-3], sharded.here.size)


def _has_axis(x: Array, axis: int) -> bool:
    return len(x.shape) >= -axis and x.shape[axis] != 1


def _first(x: Array, count: int) -> Array:
    return x[..., :count, :]


def _stretched(call: Call, *lengths: int) -> list[Array]:
    """Query, key and value of so many positions, of which memory holds no more than one."""
    pairs = zip(call[:3], lengths, strict=True)
    return [call.xp.broadcast_to(x[..., :1, :], (*x.shape[:-2], count, x.shape[-1])) for x, count in pairs]


def _turns(sharded: Sharded) -> list[Sharded]:
    """Some heads after others, so that not all that is gathered, nor all of its gradients, is there at once.

    Compilers order it themselves, and accelerators have not been measured.
    """
    call, heads = sharded.call, sharded.call.key.shape[-3]
    is_host = is_on_host(call.query) and not call.backend.loops.traced
    if call.arithmetic == "reproducible" or not is_host or looks_up_heads(call.mask):
        return [sharded]
    numbers, most = sharded.here.size * _numbers_of_keys(sharded), range(1, max(1, heads) + 1)
    count = next(n for n in most if heads % n == 0 and (numbers <= n * MOST_GATHERED or n == heads))
    size = call.query.shape[-3] // count
    if count == 1:
        return [sharded]
    return [sharded._replace(call=cut(call, heads=Run(n * size, size))) for n in range(count)]


def _calls_of_chunks(call: Call, here: Place) -> list[Call]:
    """A call for each chunk of queries."""
    calls, first = [], 0
    for start, size in here.chunks(call.query.shape[-2]):
        calls.append(from_starts(cut(call, rows=Run(first, size)), start, 0))
        first += size
    return calls


def _joined(results: list[Result], axis: int, xp: Any) -> Result:
    """Results for some heads or rows after others, an axis of the output."""
    if len(results) == 1:
        return results[0]
    output, found = xp.concat([each.output for each in results], axis=axis), [each.logsumexp for each in results]
    return Result(output, None, None if found[0] is None else xp.concat(found, axis=axis + 1))


def _without_padding(sharded: Sharded, result: Result) -> Result:
    """The result with a logsumexp of -inf in padding, which would have that of the sink."""
    if sharded.stop == LIMIT or sharded.call.sinks is None or result.logsumexp is None:
        return result
    xp, rows = sharded.call.xp, sharded.call.query.shape[-2]
    is_inside = xp.less(sharded.here.positions(rows, result.logsumexp, xp), sharded.stop)
    return result._replace(logsumexp=xp.where(is_inside, result.logsumexp, -math.inf))
