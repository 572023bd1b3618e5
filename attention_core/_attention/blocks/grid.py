"""The grid of blocks that a call is cut into, and where a block stands. Its arrays have five axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._arrays import Array, Namespace, at_least_one, on_device_of, positions, shape
from ..._backend import Loops, Ranks, can_be_read, ranks_of, runs_at_once
from ...masks import Positions, Spans
from ...masks._mask import bounds_of
from ..call import Call, apply_dropout, counted_from, flatten_group, is_listed, upcast_call
from ..facts import MAX_KEPT
from ..parts import with_arrays
from .plan import Plan, in_five_axes, pad, unpack

EXACT_WORK = 8  # the time of a score in reproducible arithmetic, by that of one in fast arithmetic


class Sample(NamedTuple):
    """One sample of the batch, or one key/value head of it."""

    round: Any  # of all rounds
    index: Any  # in the batch
    head: Any  # None for all heads
    query: Array  # (G, R, M, D)
    key: Array  # (G, N, D)
    value: Array  # (G, N, E)
    bias: Array | None
    rule: Any
    at: Positions | None  # of all of its scores (G, R, M, N)


class Grid(NamedTuple):
    """A call cut into blocks of queries and keys, with what all loops over them look up."""

    plan: Plan
    call: Call  # in five axes, see `plan.make_plan`
    xp: Namespace
    loops: Loops
    sizes: tuple[int, int]  # queries and keys of a block
    counts: tuple[Any, Any]  # blocks of queries and of keys
    lengths: tuple[Any, Any]  # M, N
    dims: tuple[Any, Any, Any]  # B, G, R
    width: Any  # of the values that are averaged
    num_rounds: Any  # samples, or key/value heads of all of them if these are taken one by one
    padded: bool  # whether the last block of keys is filled up with zeros
    may_be_empty: bool  # whether something may be masked, so that a row may be fully masked
    may_mask: bool  # whether a block may hold masked scores
    all_finite: bool  # whether query, key and value are finite, or a host looks at what is computed of them
    changes_scores: bool  # whether there is a softcap or a score modification
    work: int  # of all scores of a round, by the time of one in fast arithmetic; 0 if not computed on the host at once
    at: Positions | None  # of all scores (B, G, R, M, N), if a rule, a function of scores or dropout asks
    cache: dict[Any, Array] | None = None  # masks by distance, under a rule that looks at `key - query` alone
    value_part: Callable[[Array], Array] = lambda values: values  # of a block of values, what is averaged
    weighed: Callable[[Array, Callable[[Array], Array]], Array] = lambda x, even: x  # scores or weights, or even(x)
    visits: Any = None  # `Visits`, once they are known and needed
    exp_without_max: bool = False  # whether scores are so small that no maximum need be subtracted

    def of(self, call: Call) -> Grid:
        """The grid with the arrays of a call, of one that lasts."""
        arrays, *_ = in_five_axes(call)
        whole = self.call._replace(**dict(zip(("query", "key", "value"), arrays, strict=True)))
        cache = self.cache if self.cache is None or math.prod(self.lengths) <= MAX_KEPT else {}
        return self._replace(call=whole, cache=cache)

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that share the keys, if any do: what one of them knows of its values, the others do not."""
        return None if self.plan.num_queries is not None else ranks_of(self.call.backend, self.plan.group)

    def for_each_sample(self, body: Callable[[Any, Any], Any], state: Any, *, is_shared: bool = False) -> Any:
        """Run a body for each round; in turn, if they add to the same sums."""
        if is_shared:
            return self.loops.loop(0, self.num_rounds, body, state)
        return self.loops.for_each(self.num_rounds, body, state, self.num_rounds * self.work)

    def sample_at(self, index: Any) -> Sample:
        """The arrays of one sample, or of one of its key/value heads."""
        call = self.call
        b, g = (index // self.dims[1], index % self.dims[1]) if self.plan.per_head else (index, None)

        def part(array: Array, axes: int) -> Array:
            return self.part_of(array, b, g if axes == 3 else None)

        rule = None if call.mask is None else with_arrays(call.mask, part)
        bias = None if call.bias is None else self.part_of(call.bias, b, g)
        query, key, value = map(self.loops.block_at, call[:3], (b, b, b))
        if g is not None:
            query, key, value = [self.xp.expand_dims(self.loops.block_at(x, g), axis=0) for x in (query, key, value)]
        at = self.at
        if at is not None:
            at = at._replace(batch=self.loops.block_at(at.batch, b), head=self.part_of(at.head, b, g))
        return Sample(index, b, g, query, key, value, bias=bias, rule=rule, at=at)

    def part_of(self, x: Array, b: Any, g: Any) -> Array:
        """The part of an array (B or 1, G or 1, ...) of one sample, and one key/value head if that is not ``None``."""
        part = self.loops.block_at(x, 0 if is_broadcast(x, 0) else b)
        if g is None or is_broadcast(part, 0):
            return part
        return self.xp.expand_dims(self.loops.block_at(part, g), axis=0)

    def cached_by_distance(self, name: str, i: Any, j: Any, like: Array, compute: Callable[[], Array]) -> Array:
        """Compute a mask of a block; only once for all blocks of one shape and distance, if the distance decides."""
        if self.cache is None:
            return compute()
        first = i.start if isinstance(i, range) else i
        start = j.start if isinstance(j, range) else j
        key = name, first * self.sizes[0] - start * self.sizes[1], *like.shape[-2:]
        if key not in self.cache:
            self.cache[key] = compute()
        return self.cache[key]

    def spans(self, side: int) -> Spans:
        """The positions of all blocks of one side: of queries as a column, of keys as a row."""
        xp, size, count = self.xp, self.sizes[side], self.counts[side]
        at = xp.reshape(_places(self.call, side, self.lengths[side], count * size), (count, size))
        first, last = xp.min(at, axis=-1), xp.max(at, axis=-1)
        if side == 0:
            first, last = xp.expand_dims(first, axis=-1), xp.expand_dims(last, axis=-1)
        return Spans(first, last, size)

    def positions(self, sample: Sample, i: Any, j: Any) -> Positions:
        """Where the scores of a block stand."""
        at: Any = sample.at
        query, key = self.loops.block(at.query, i, self.sizes[0], -2), self.loops.block(at.key, j, self.sizes[1], -1)
        return Positions(at.batch, at.head, query, key)

    def drop(self, weights: Array, at: Positions | None) -> Array:
        """Weights of a block with some of them 0; all of them as they are where scores are even."""
        num_heads = self.call.whole.num_heads
        num_heads = self.dims[1] * self.dims[2] if num_heads is None else num_heads
        kept = apply_dropout(weights, self.call.dropout, at, num_heads, self.xp)
        return weights if kept is weights else self.weighed(kept, lambda _: weights)

    def finite_or_zero(self, x: Array) -> Array:
        """A block with 0 for what is not finite, to multiply others by."""
        return x if self.all_finite else self.xp.where(self.xp.isfinite(x), x, 0.0)

    # Stacks of blocks in which results and gradients are summed

    def row_stacks(self, *lasts: Any, dtype: str | None = None) -> tuple[Any, ...]:
        """Blocks of queries, (G, R, m, last) each, that start as zero: a stack for each of these widths.

        By default they have the dtype of the queries.
        """
        return tuple([self._stack(0, last, dtype) for last in lasts])

    def gradient_stacks(self, *lasts: Any, after: Array, dtype: str | None = None) -> tuple[Any, ...]:
        """Blocks for the gradients of query, key and value of these widths. Memory is needed as of ``after``."""
        return tuple([self._stack(side, last, dtype, after) for side, last in zip((0, 1, 1), lasts, strict=True)])

    def _stack(self, side: int, last: Any, dtype: str | None, after: Array | None = None) -> Any:
        between = () if side else (self.dims[2],)
        dims = (1 if self.plan.per_head else self.dims[1], *between)

        def zero(index: Any) -> Array:
            return self._zeros(*dims, self.length_of_block(side, index), last, dtype=dtype)

        return self.loops.zero_blocks(self.num_rounds * self.counts[side], zero, after)

    def _zeros(self, *dims: Any, dtype: str | None) -> Array:
        like = self.call.query
        kind = like.dtype if dtype is None else getattr(self.xp, dtype)
        return self.xp.zeros(dims, dtype=kind, **on_device_of(like))

    def length_of_block(self, side: int, index: Any) -> Any:
        """How long a block is, by its index over all rounds."""
        if self.loops.traced:
            return self.sizes[side]
        return min(self.sizes[side], self.lengths[side] - index % self.counts[side] * self.sizes[side])

    def concat_blocks(self, stacks: tuple[Any, ...], side: int) -> list[Array]:
        """The blocks of queries or keys (axis -2) of each stack as one array (B, G, ..., length, width)."""
        xp, loops = self.xp, self.loops
        count, length = self.counts[side], self.lengths[side]
        rows = [loops.stack_blocks(loops.concat_blocks(stack, count, -2))[..., :length, :] for stack in stacks]
        if not (loops.traced or self.plan.per_head):
            return rows
        return [xp.reshape(x, (*self.dims[:2], *shape(x, xp=xp)[2:])) for x in rows]

    def bias_counts(self) -> tuple[Any, Any, Any, Any]:
        """How many blocks a bias has along the samples, the heads, the queries and the keys."""
        bias = self.call.bias
        batch, heads = shape(bias, xp=self.xp)[:2]
        rows, columns = (1 if is_broadcast(bias, axis) else self.counts[axis] for axis in (-2, -1))
        return batch, heads if self.plan.per_head else 1, rows, columns

    def bias_stack(self, dtype: str | None = None) -> Any:
        """Blocks for the gradient of a bias; ``None`` where there is none."""
        bias = self.call.bias
        if bias is None:
            return None
        counts, (heads, sharing) = self.bias_counts(), shape(bias, xp=self.xp)[1:3]

        def zero(index: Any) -> Array:
            places = index // counts[-1], index
            ends = (
                1 if is_broadcast(bias, axis) else self.length_of_block(axis, number)
                for axis, number in zip((-2, -1), places, strict=True)
            )
            return self._zeros(1 if self.plan.per_head else heads, sharing, *ends, dtype=dtype)

        return self.loops.zero_blocks(math.prod(counts), zero)

    def add_bias_gradient(self, sample: Sample, stack: Any, d_scores: Array, i: Any, j: Any) -> Any:
        """Add the gradient of a block of scores to that of the bias, summed over what the bias is broadcast to."""
        index, head = 0, 0 if sample.head is None else sample.head
        for at, count in zip((sample.index, head, i, j), self.bias_counts(), strict=True):
            index = index * count + at % count
        shared = tuple(axis for axis in range(4) if is_broadcast(self.call.bias, axis + 1))
        summed = self.xp.sum(d_scores, axis=shared, keepdims=True) if shared else d_scores
        return self.loops.add_block(stack, index, summed)

    def concat_bias_gradient(self, stack: Any) -> Array:
        """The gradient of the bias as one array of its shape."""
        bias, xp = self.call.bias, self.xp
        for axis in (-1, -2):
            stack = self.loops.concat_blocks(stack, self.bias_counts()[axis], axis)
        d_bias = self.loops.stack_blocks(stack)
        rows, columns = (1 if is_broadcast(bias, axis) else self.lengths[axis] for axis in (-2, -1))
        return xp.reshape(d_bias[..., :rows, :columns], (*shape(bias, xp=xp)[:3], rows, columns))


def make_grid(plan: Plan, call: Call) -> Grid:
    """Cut the call of a plan into blocks; where loops are traced, fill the last block up with zeros."""
    xp, loops = call.xp, call.backend.loops
    batch, num_kv_heads, group, rows, _ = shape(call.query, xp=xp)
    lengths, width = (rows, shape(call.key, xp=xp)[-2]), shape(call.value, xp=xp)[-1]
    sizes, counts = zip(
        *[_split_evenly(*each, xp) for each in zip(lengths, plan.block_sizes, strict=True)], strict=True
    )
    padded = False
    if loops.traced:
        fill = tuple(count * size - length for count, size, length in zip(counts, sizes, lengths, strict=True))
        padded = not (isinstance(fill[1], int) and fill[1] == 0)
        call = _padded(call, fill, xp)
    is_open = not isinstance(lengths[1], int) and loops.traced  # else known when an operator runs
    may_be_empty = call.mask is not None or call.bias is not None or is_open
    asks = call.mask is not None or call.score_mod is not None or call.dropout is not None
    relative = call.mask is not None and bounds_of(call.mask).is_relative and not any(map(is_listed, call.starts))
    repeats = max(sizes) % max(min(sizes), 1) == 0  # else hardly any distance occurs twice
    scores = math.prod((1 if plan.per_head else num_kv_heads, group, *lengths)) if runs_at_once(call.query) else 0
    return Grid(
        plan,
        call,
        xp,
        loops,
        sizes=sizes,
        counts=counts,
        lengths=lengths,
        dims=(batch, num_kv_heads, group),
        width=width,
        num_rounds=batch * num_kv_heads if plan.per_head else batch,
        padded=padded,
        may_be_empty=may_be_empty,
        may_mask=may_be_empty or padded,
        all_finite=not may_be_empty or bool(call.assume_finite),
        changes_scores=call.softcap is not None or call.score_mod is not None,
        work=scores * (EXACT_WORK if call.arithmetic == "reproducible" else 1),
        at=_positions(call, lengths, [shape(x, xp=xp)[-2] for x in call[:2]]) if asks else None,
        cache={} if relative and repeats and call.bias is None and not loops.traced else None,
    )


def lasting_grid(call: Call, plan_of: Callable[..., Any], grid_of: Callable[..., Grid]) -> Grid | None:
    """The grid of all calls of the signature of this one, without arrays; ``None`` if it depends on more than that.

    Libraries that differentiate keep none, as in `facts.lasting_facts`.
    """
    if call.backend.differentiates or call.score_mod is not None or not can_be_read(*call[:3]):
        return None
    plan, arrays = plan_of(upcast_call(call))
    if len(arrays) > 3:
        return None
    grid = grid_of(plan, unpack(plan, arrays, call.backend))
    return grid._replace(call=grid.call._replace(query=None, key=None, value=None))


def _positions(call: Call, lengths: tuple[Any, Any], totals: list[Any]) -> Positions:
    """Where the scores (B, G, R, M, N) of a call stand, (B,) among them; what only fills up a block has the last."""
    xp, (batch, num_kv_heads, group) = call.xp, shape(call.query, xp=call.xp)[:3]
    batch, heads = (positions(count, call.query, xp=xp) for count in (batch, num_kv_heads * group))
    query, key = (_places(call, side, lengths[side], totals[side]) for side in (0, 1))
    heads = xp.reshape(counted_from(call.whole.head, heads, xp), (1, num_kv_heads, group, 1, 1))
    return Positions(counted_from(call.whole.batch, batch, xp), heads, xp.expand_dims(query, axis=-1), key)


def _places(call: Call, side: int, length: Any, total: Any) -> Array:
    """The positions of queries or keys, so many in all: those behind their length have the last."""
    counted = positions(total, call.query, xp=call.xp)
    if not (isinstance(length, int) and total == length):
        counted = call.xp.minimum(counted, call.xp.add(call.xp.zeros_like(counted), at_least_one(length, call.xp) - 1))
    return counted_from(call.starts[side], counted, call.xp)


def _split_evenly(length: Any, size: int, xp: Namespace) -> tuple[int, Any]:
    """The size of blocks of nearly equal size, and their number: at least 1, as XLA compiles loops of no step, too."""
    if not isinstance(length, int):
        return size, (at_least_one(length, xp) + (size - 1)) // size
    count = max(1, -(-length // size))
    return -(-length // count), count


def _padded(call: Call, fill: tuple[Any, ...], xp: Namespace) -> Call:
    """The call with zeros at the end of queries and keys, to fill up the last block."""
    query, key, value, bias = *call[:3], call.bias
    if bias is not None:
        for axis, amount in ((-2, fill[0]), (-1, fill[1])):
            bias = bias if is_broadcast(bias, axis) else pad(bias, axis, amount, xp)
    return call._replace(
        query=pad(query, -2, fill[0], xp), key=pad(key, -2, fill[1], xp), value=pad(value, -2, fill[1], xp), bias=bias
    )


def is_broadcast(x: Array, axis: int) -> bool:
    """Whether an axis has length 1 and stands for all positions."""
    dim = x.shape[axis]
    return isinstance(dim, int) and dim == 1


def matmul_per_group(weights: Array, value: Array, xp: Namespace) -> Array:
    """Weights (G, R, m, n) times values (G, n, E): an array (G, R, m, E)."""
    (*dims, columns), width = shape(weights, xp=xp), shape(value, xp=xp)[-1]
    flat = xp.reshape(weights, (dims[0], dims[1] * dims[2], columns))
    return xp.reshape(xp.matmul(flat, value), (*dims, width))


def matmul_transposed(weights: Array, x: Array, xp: Namespace) -> Array:
    """Sums over queries, of weights (G, R, m, n) and vectors (G, R, m, D): an array (G, n, D)."""
    transposed = xp.matmul(xp.matrix_transpose(flatten_group(x, xp=xp)), flatten_group(weights, xp=xp))
    return xp.matrix_transpose(transposed)  # as libraries are slower where the larger factor is transposed


def zero_unless_finite(gradient: Array, x: Array, xp: Namespace) -> Array:
    """The gradient of an array whose non-finite elements were replaced by constants: 0 for those."""
    return xp.where(xp.isfinite(x), gradient, 0.0)
