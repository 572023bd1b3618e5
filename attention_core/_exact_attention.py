r"""Attention in reproducible arithmetic, over the blocks of `_tiles`.

Scores are held in the units of `exp2_weight`, :math:`t_{ij} = s_{ij} / (256 \ln 2)`. Each is a sum of three products of
slices, of which the larger one and the sum of the smaller two are exact; the two are added with one rounding. A first
pass over the keys finds the largest score, a second one the weights

.. math:: w_{ij} = 2^{256 (t_{ij} - \max_j t_{ij})}

as two integers of 18 bits, and adds up products of these with slices of the values, exactly: so neither the order of
blocks nor their size shows. In types of 16 bits one slice of each number does, and one integer of 24 bits for a weight.

Backward, the weights are computed relative to :math:`\ell_i / (256 \ln 2)` less a power of two, such that none exceeds
4 / 3, and what they are multiplied by holds the rest. The slopes :math:`\bar s_{ij}` are cut into slices of their own,
below a bound that holds for a whole row, so that no pass over them has to come first.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

from attention_core._call import Call, dropped, gain, widened
from attention_core._exact import (
    LOG2_E,
    LONGEST,
    bits_for,
    carried,
    dots,
    exp2_weight,
    log2,
    peak,
    power_above,
    quotient,
    rounded,
    settle,
    slices,
    tanh,
    total,
    wide,
)
from attention_core._gradients import add_bias, bias_stack, collected_bias, gradient_stacks, transposed_product
from attention_core._namespace import beside, dtype_name, shape
from attention_core._plan import Operands, Plan, operands_of, planned
from attention_core._tiles import (
    Entry,
    Tiles,
    Visits,
    collected,
    dropout_of,
    entry_of,
    finite,
    ground_of,
    heads_of,
    is_one,
    may_mask,
    of_entry,
    pad,
    product,
    rounds_of,
    swept,
    tiles_of,
    visit,
    visits_of,
    zeros,
)
from attention_core._typing import Array, Namespace
from attention_core.backend import Backend, Operation
from attention_core.masks import Positions

__all__ = ["EXACT", "exact_attention"]

UNIT = LOG2_E / 256  # of scores, so that the eighth square of a power of 2 is the exponential
WEIGHTS = {1: 24, 2: 18}  # bits of a slice of a weight, by the number of slices
VALUES = {count: bits_for(LONGEST, bits) for count, bits in WEIGHTS.items()}
SLOPES = 20
BESIDE_SLOPES = bits_for(LONGEST, SLOPES)
OUT = 22  # bits of slices beside weights that reach 4 / 3
BIAS_BITS = 40
SIDE = 512  # of a block, going backward
LEAST, MOST = 2.0**-64, 2.0**127  # between which the largest score is the sum of three numbers of float32


def exact_attention(call: Call, backend: Backend) -> tuple[Array, Array]:
    """Output (..., H, M, E) and logsumexp (..., H, M) in float32, of which every library computes the same bits."""
    xp = call.xp
    output, logsumexp, _ = backend.custom_gradient(EXACT, *arranged(call, backend))
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    width = shape(call.value, xp=xp)[-1]
    return xp.reshape(output, (*leading, heads, rows, width)), xp.reshape(logsumexp, (*leading, heads, rows))


def arranged(call: Call, backend: Backend) -> tuple[Plan, tuple[Array, ...]]:
    """A call as a plan and the arrays of its operands."""
    xp = call.xp
    count = 2 if dtype_name(call.query.dtype) == "float32" else 1
    call = widened(call)
    width = shape(call.query, xp=xp)[-1]
    if isinstance(width, int) and width == 0:  # all scores are 0, as they are where there is one channel of zeros
        query, key = (xp.zeros((*shape(x, xp=xp)[:-1], 1), dtype=x.dtype, **beside(x)) for x in (call.query, call.key))
        call, width = call._replace(query=query, key=key), 1
    scale = 1 / math.sqrt(width) if call.scale is None else float(call.scale)
    call = call._replace(softcap=None if call.softcap is None else float(call.softcap))
    plan, operands = planned(call, backend, (scale, count))
    return plan, tuple(leaf for leaf in (*operands[:8], *operands.mask, *operands.score_mod) if leaf is not None)


def _query_scale(plan: Plan) -> float:
    """What queries are multiplied by before they are cut: what a cap takes is in the units of scores."""
    scale, _ = plan.exact  # type: ignore[misc]
    return scale if plan.softcap is not None else scale * UNIT


def _packed(tiles: Tiles, x: Array, *, first_last: bool) -> Array:
    r"""Vectors (..., D) as slices side by side, so that products of packed ones are scores.

    Of one side :math:`[a_1, a_2 2^{-b}]`, of the other :math:`[b_2 2^{-b}, b_1]`, each times its power of two.
    """
    xp, (_, count) = tiles.xp, tiles.plan.exact  # type: ignore[misc]
    allowed = xp.all(xp.isfinite(x), axis=-1, keepdims=True)
    x = finite(tiles, x)
    bits = bits_for(shape(x, xp=xp)[-1])
    power = peak(x, -1, xp)
    parts = slices(x, power, bits, count, xp)
    scaled = [
        xp.multiply(part, xp.multiply(power, 2.0 ** (-bits * place))) for place, part in enumerate(parts, start=1)
    ]
    if not tiles.plan.tame:
        scaled[0] = xp.where(allowed, scaled[0], math.nan)
    return xp.concat(scaled[::-1] if first_last else scaled, axis=-1)


def _scores(query: Array, key: Array, xp: Namespace) -> Array:
    """Products of packed queries (G, R, m, 2 D) and keys (G, n, 2 D): (G, R, m, n), each a sum of two exact numbers."""
    across = xp.matrix_transpose(key)
    width = shape(key, xp=xp)[-1] // 2
    scores = product(query[..., :width], across[..., width:, :], xp)
    scores += product(query, across, xp)
    return scores


def _plain_scores(query: Array, key: Array, xp: Namespace) -> Array:
    return product(query, xp.matrix_transpose(key), xp)


class Tile(NamedTuple):
    """A block of scores in units of 256 ln 2, -inf where not allowed, and the slope of a cap."""

    scores: Array
    slope: Array | None
    allowed: Array | None
    at: Positions | None


def _tile(tiles: Tiles, entry: Entry, query: Array, key: Array, i: Any, j: Any, masked: bool) -> Tile:
    plan, xp = tiles.plan, tiles.xp
    _, count = plan.exact  # type: ignore[misc]
    scores = (_scores if count == 2 else _plain_scores)(query, key, xp)
    at, bias, allowed = ground_of(tiles, entry, scores, i, j, masked)
    slope = None
    if plan.softcap is not None:
        bent = tanh(settle(xp.multiply(scores, 1 / plan.softcap), xp), xp)
        slope = xp.subtract(1.0, settle(xp.multiply(bent, bent), xp))
        scores = settle(xp.multiply(bent, plan.softcap * UNIT), xp)
    if bias is not None:
        scores = xp.add(scores, settle(xp.multiply(wide(bias, xp), UNIT), xp))
    if allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)
    return Tile(scores, slope, allowed, at)


def _cut(weights: Array, bits: int, count: int, xp: Namespace) -> list[Array]:
    """Weights of at most 1, which are not used again, as integers: of two, the second holds what the first has left."""
    weights *= 2.0**bits
    high = xp.round(weights)
    if count == 1:
        return [high]
    weights -= high
    weights *= 2.0**bits
    return [high, xp.round(weights)]


def _sliced(x: Array, power: Array, bits: int, count: int, xp: Namespace) -> Array:
    """Slices (..., count * D), the last one first, so that the first alone stands at the end."""
    return xp.concat(slices(x, power, bits, count, xp)[::-1], axis=-1)


def _summed(weights: list[Array], x: Array, multiply: Any, xp: Namespace) -> tuple[Array, ...]:
    """Exact sums of products of slices: with the first of the weights all of the others', with the second the first."""
    found = multiply(weights[0], x, xp)
    if len(weights) == 1:
        return (found,)
    width = shape(x, xp=xp)[-1] // 2
    return found, multiply(weights[1], x[..., width:], xp)


def _combined(sums: tuple[Array, ...], left: int, right: int, xp: Namespace) -> Array:
    r"""What such sums stand for, in units of the product of the first slices."""
    if len(sums) == 1:
        return sums[0]
    both, beside_first = sums
    width = shape(beside_first, xp=xp)[-1]
    low, high = both[..., :width], both[..., width:]
    return xp.add(high, xp.add(xp.multiply(low, 2.0**-right), xp.multiply(beside_first, 2.0**-left)))


def _parts(sums: tuple[Array, ...], carry: bool, xp: Namespace) -> tuple[Array, ...]:
    """Sums as they are added up: where they may exceed 53 bits, each in two parts."""
    return tuple(part for each in sums for part in carried(each, xp)) if carry else sums


def _whole(parts: tuple[Array, ...], carry: bool, xp: Namespace) -> tuple[Array, ...]:
    return tuple(total(each, xp) for each in zip(parts[::2], parts[1::2], strict=True)) if carry else parts


def widths_of(last: Any, count: int, carry: bool) -> list[Any]:
    """How wide the parts of sums with vectors of some width are."""
    return [width for width in ([2 * last, last] if count == 2 else [last]) for _ in range(2 if carry else 1)]


def split(x: Array, widths: list[Any]) -> tuple[Array, ...]:
    """Parts that were put side by side."""
    ends = list(itertools.accumulate(widths))
    return tuple(x[..., end - width : end] for width, end in zip(widths, ends, strict=True))


def exceeds(tiles: Tiles, side: int) -> bool:
    """Whether so many terms are added up that integers of 53 bits do not hold them."""
    length = tiles.lengths[side]
    if side == 0:
        times = shape(tiles.operands.query, xp=tiles.xp)[2]
        length = length * times if isinstance(times, int) else None
    return not isinstance(length, int) or length > LONGEST


def _cut_query(tiles: Tiles, query: Array) -> Array:
    xp = tiles.xp
    return _packed(tiles, xp.multiply(wide(query, xp), _query_scale(tiles.plan)), first_last=False)


def _cut_key(tiles: Tiles, key: Array) -> Array:
    return _packed(tiles, wide(key, tiles.xp), first_last=True)


def forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array, Array]:
    """Output (B, G, R, M, E), logsumexp (B, G, R, M), and what `backward` needs of each row, (B, G, R, M, 4)."""
    tiles = tiles_of(plan, arrays, backend)
    return swept(tiles, functools.partial(_forward, tiles), lambda: empty_results(plan, arrays, backend))


def _forward(tiles: Tiles, part: Any) -> tuple[Array, Array, Array]:
    xp, dropout = tiles.xp, dropout_of(tiles)

    def close(top: Array, power: Array, sums: Parts, mass: Parts) -> tuple[Array, ...]:
        carry = exceeds(tiles, 1)
        return *averaged(_whole(sums, carry, xp), _whole(mass, carry, xp), power, xp), top

    width = shape(tiles.operands.value, xp=xp)[-1]
    average, weight, top = gathered(tiles, Pass(close, (width, 1, 1), "float64", part))
    logsumexp = xp.squeeze(logsumexp_of(top, weight, xp), axis=-1)
    return divided(average, weight, gain(dropout), xp), logsumexp, _held(top, weight, xp)


Parts = tuple[Array, ...]


class Pass(NamedTuple):
    """What becomes of the sums of a block of queries, and of what they are taken.

    Attributes
    ----------
    close : callable
        ``close(top, power, sums, mass)`` returns arrays (G, R, m, ...) of some widths and one dtype.
    widths : tuple of int
    dtype : str
    part : callable
        A part of the values.
    given : (Array, Array) or None
        The largest scores, (B, G, R, M, 1), and the powers of two above the values, (B, G, 1, E), where these are not
        those of the keys at hand.
    """

    close: Any
    widths: tuple[Any, ...]
    dtype: str
    part: Any
    given: tuple[Array, Array] | None = None


class Strip(NamedTuple):
    """A block of queries in slices, and the keys that it visits."""

    tiles: Tiles
    entry: Entry
    query: Array
    keys: Array
    place: Any
    visits: tuple[Any, Any, Any]


def strips(tiles: Tiles, visits: Visits, entry: Entry) -> Any:
    """A function from blocks of queries of an entry to strips."""
    keys = _cut_key(tiles, entry.key)

    def strip(i: Any) -> Strip:
        rows = _cut_query(tiles, tiles.loops.block(entry.query, i, tiles.sizes[0], -2))
        return Strip(tiles, entry, rows, keys, i, visits.of(tiles.loops, entry.index, i))

    return strip


def tile_at(strip: Strip, masked: bool, j: Any) -> Tile:
    tiles = strip.tiles
    keys = tiles.loops.block(strip.keys, j, tiles.sizes[1], -2)
    return _tile(tiles, strip.entry, strip.query, keys, strip.place, j, masked)


def highest(strip: Strip) -> Array:
    """The largest score of each query, (G, R, m, 1): -inf where there is none."""
    tiles, (next_block, whole, seen) = strip.tiles, strip.visits
    xp = tiles.xp

    def reach(masked: bool, step: Any, top: Array) -> Array:
        return xp.maximum(top, xp.max(tile_at(strip, masked, next_block(step)).scores, axis=-1, keepdims=True))

    *dims, _ = shape(strip.query, xp=xp)
    lowest = xp.full((*dims, 1), -math.inf, dtype=xp.float64, **beside(strip.query))
    return visit(tiles.loops, whole, seen, reach, lowest)


def anchored(top: Array, xp: Namespace) -> Array:
    """What weights are relative to: 0 where all is masked, and nan beyond the largest float32."""
    size = xp.abs(top)
    top = xp.where(xp.logical_or(xp.equal(top, -math.inf), xp.less(size, LEAST)), 0.0, top)
    return xp.where(xp.greater_equal(xp.abs(top), MOST), math.nan, top)


def gathered(tiles: Tiles, aim: Pass) -> tuple[Array, ...]:
    """What ``aim.close`` makes of the sums of weighted values and of weights, over all keys, for all queries."""
    plan, xp, loops = tiles.plan, tiles.xp, tiles.loops
    _, count = plan.exact  # type: ignore[misc]
    dropout = dropout_of(tiles)
    width = shape(tiles.operands.value, xp=xp)[-1]
    carry = exceeds(tiles, 1)
    widths = widths_of(width, count, carry), [1] * (count * (2 if carry else 1))
    visits = visits_of(tiles, by_key=False)
    once = aim.given is None and isinstance(tiles.counts[1], int) and tiles.counts[1] == 1

    def attend(index: Any, stacks: Any) -> Any:
        entry = entry_of(tiles, index)
        strip_of = strips(tiles, visits, entry)
        values = aim.part(wide(entry.value, xp))
        if aim.given is None:
            tops, power = None, peak(values, -2, xp)  # (G, 1, E)
        else:
            tops, power = (of_entry(tiles, x, entry.index, entry.head) for x in aim.given)
        values = _sliced(values, power, VALUES[count], count, xp)

        def attend_rows(i: Any, stacks: Any) -> Any:
            strip = strip_of(i)
            next_block, whole, seen = strip.visits
            *dims, _ = shape(strip.query, xp=xp)

            def sums_of(top: Array, tile: Tile, j: Any) -> tuple[Parts, Parts]:
                scores = tile.scores
                scores -= top
                weights = _cut(exp2_weight(scores, xp), WEIGHTS[count], count, xp)
                mass = tuple(xp.sum(each, axis=-1, keepdims=True) for each in weights)
                kept = [dropped(each, dropout, tile.at, heads_of(tiles), xp) for each in weights]
                found = _summed(kept, loops.block(values, j, tiles.sizes[1], -2), product, xp)
                return _parts(found, carry, xp), _parts(mass, carry, xp)

            def absorb(top: Array, masked: bool, step: Any, state: Any) -> Any:
                j = next_block(step)
                found = sums_of(top, tile_at(strip, masked, j), j)
                return tuple(tuple(map(xp.add, *each)) for each in zip(state, found, strict=True))

            if once:  # the scores of all keys are at hand for both passes
                tile = tile_at(strip, may_mask(tiles), 0)
                top = anchored(xp.max(tile.scores, axis=-1, keepdims=True), xp)
                sums, mass = sums_of(top, tile, 0)
            else:
                top = highest(strip) if tops is None else loops.block(tops, i, tiles.sizes[0], -2)
                top = anchored(top, xp)
                state = tuple(tuple(zeros(top, *dims, last, xp=xp) for last in lasts) for lasts in widths)
                sums, mass = visit(loops, whole, seen, functools.partial(absorb, top), state)
            place = index * tiles.counts[0] + i
            found = aim.close(top, power, sums, mass)
            return tuple(loops.add(stack, place, x) for stack, x in zip(stacks, found, strict=True))

        return loops.loop(0, tiles.counts[0], attend_rows, stacks)

    stacks = tuple(row_stack(tiles, last, aim.dtype) for last in aim.widths)
    return tuple(collected(tiles, stack, 0) for stack in loops.loop(0, rounds_of(tiles), attend, stacks))


def row_stack(tiles: Tiles, last: Any, dtype: str) -> Any:
    """Blocks of rows for all queries."""
    xp, query = tiles.xp, tiles.operands.query
    _, groups, times, _, _ = shape(query, xp=xp)
    dims = (1 if tiles.plan.apart else groups, times, tiles.sizes[0], last)
    count = rounds_of(tiles) * tiles.counts[0]
    return tiles.loops.stack(count, lambda _: xp.zeros(dims, dtype=getattr(xp, dtype), **beside(query)))


def averaged(sums: Parts, mass: Parts, power: Array, xp: Namespace) -> tuple[Array, Array]:
    """Sums of weighted values and of weights, of the integers that stand for them."""
    count = len(mass)
    bits, value_bits = WEIGHTS[count], VALUES[count]
    weight = mass[0]
    if count == 2:
        weight = xp.add(weight, xp.multiply(mass[1], 2.0**-bits))
    average = _combined(sums, bits, value_bits, xp)
    unit = xp.multiply(xp.expand_dims(power, axis=-3), 2.0 ** -(bits + value_bits))
    return xp.multiply(average, unit), xp.multiply(weight, 2.0**-bits)


def divided(average: Array, weight: Array, factor: float, xp: Namespace) -> Array:
    """The output: 0 where there is no weight."""
    output = quotient(average, xp.where(xp.equal(weight, 0.0), 1.0, weight), xp)
    return rounded(output if factor == 1 else xp.multiply(settle(output, xp), factor), xp)


def _held(top: Array, weight: Array, xp: Namespace) -> Array:
    r"""Of the backward pass's reference three parts, and a power of two.

    With :math:`z_i = \sum_j w_{ij}` and a power of two :math:`2^{c_i}` within a third of it, the reference is
    :math:`r_i = \max_j t_{ij} + \log_2 (z_i 2^{-c_i}) / 256`, and p is :math:`2^{256 (t_{ij} - r_i)} 2^{-c_i}`.
    """
    none = xp.equal(weight, 0.0)
    mass = xp.where(none, 1.0, weight)
    power = xp.multiply(power_above(mass, xp), 0.5)
    reference = xp.add(top, xp.multiply(log2(xp.divide(mass, power), xp), 1 / 256))
    parts = thirds(xp.where(none, 0.0, reference), xp)
    return xp.concat([*parts, xp.astype(xp.divide(1.0, power), xp.float32)], axis=-1)


def logsumexp_of(top: Array, weight: Array, xp: Namespace) -> Array:
    """The logarithm of the sum of the exponentials of scores; -inf where there are none."""
    none = xp.equal(weight, 0.0)
    high = xp.add(top, xp.multiply(log2(xp.where(none, 1.0, weight), xp), 1 / 256))
    return rounded(xp.where(none, -math.inf, settle(xp.multiply(high, 1 / UNIT), xp)), xp)


def thirds(x: Array, xp: Namespace) -> list[Array]:
    """Numbers of float64 as sums of three of float32."""
    parts = []
    for _ in range(3):
        parts.append(rounded(x, xp))
        x = xp.subtract(x, xp.astype(parts[-1], xp.float64))
    return parts


def joined(parts: Array, xp: Namespace) -> Array:
    """The inverse of `thirds`, of parts side by side: (..., 3) -> (..., 1)."""
    first, second, third = (parts[..., place : place + 1] for place in range(3))
    return xp.add(first, xp.add(second, third))


def empty_results(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array, Array]:
    """Arrays like those of `forward`, for compilers that ask for shapes alone."""
    xp, operands = backend.namespace, operands_of(plan, arrays)
    *dims, _ = shape(operands.query, xp=xp)
    width = shape(operands.value, xp=xp)[-1]
    return (
        zeros(operands.query, *dims, width, xp=xp),
        zeros(operands.query, *dims, xp=xp),
        zeros(operands.query, *dims, 4, xp=xp),
    )


class Sides(NamedTuple):
    """What going backward takes blocks of, beside the operands."""

    out: Array  # cotangents of the output, packed as queries are, (B, G, R, M, 2 E)
    out_columns: Array  # those times 2^-c, cut along columns, (B, G, R, M, 2 E)
    query_columns: Array  # queries times the bound of their slopes and 2^-c, (B, G, R, M, 2 D)
    rows: Array  # reference, delta, 1 / bound, and the unit of a bias, (B, G, R, M, 4)
    key_columns: Array  # (B, G, N, 2 D)


def backward(
    plan: Plan,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array | None, ...]:
    """The gradient for each array, given those for output and logsumexp; ``None`` for integers and booleans."""
    given, xp = operands_of(plan, arrays), backend.namespace
    tiles = tiles_of(plan._replace(blocks=_square(plan, given, xp)), arrays, backend)
    operands = tiles.operands
    out, output, of_logsumexp, kept = (
        _filled(tiles, wide(x, xp))
        for x in (cotangents[0], results[0], xp.expand_dims(cotangents[1], axis=-1), results[2])
    )
    query, key, value = (wide(finite(tiles, x), xp) for x in operands[:3])
    delta = xp.subtract(dots(out, output, xp), of_logsumexp)
    width = shape(given.value, xp=xp)[-1]
    tallest = xp.expand_dims(xp.max(peak(value, -1, xp), axis=-2, keepdims=True), axis=2)
    most = xp.multiply(xp.multiply(peak(out, -1, xp), tallest), float(width * math.ceil(gain(dropout_of(tiles)))))
    bound = xp.multiply(power_above(xp.add(most, xp.abs(delta)), xp), 2.0)  # the product is one of powers of two
    share = kept[..., 3:]
    spread = xp.multiply(bound, share)
    reference = joined(kept[..., :3], xp)
    columns = (xp.multiply(out, share), OUT), (xp.multiply(query, spread), BESIDE_SLOPES), (key, BESIDE_SLOPES)
    powers = [peak(x, (-3, -2) if x is not key else -2, xp) for x, _ in columns]
    cut = [_sliced(x, power, bits, 2, xp) for (x, bits), power in zip(columns, powers, strict=True)]
    widest = None if operands.bias is None else _widest(tiles, spread)
    units = spread if widest is None else xp.multiply(xp.divide(spread, widest), 2.0**BIAS_BITS)
    rows = xp.concat([reference, delta, xp.divide(1.0, bound), units], axis=-1)
    sides = Sides(_packed(tiles, out, first_last=False), cut[0], cut[1], rows, cut[2])
    packed = operands._replace(
        query=_cut_query(tiles, operands.query),
        key=_cut_key(tiles, operands.key),
        value=_packed(tiles, value, first_last=True),
    )
    stacks = _backward(tiles._replace(operands=packed), sides)
    depth = shape(key, xp=xp)[-1]
    slices_of = (SLOPES, BESIDE_SLOPES), (SLOPES, BESIDE_SLOPES), (WEIGHTS[2], OUT)
    found = []
    for stack, side, last, cuts in zip(stacks[:3], (0, 1, 1), (depth, depth, width), slices_of, strict=True):
        carry = exceeds(tiles, 1 - side)
        parts = split(collected(tiles, stack, side), widths_of(last, 2, carry))
        found.append(_combined(_whole(parts, carry, xp), *cuts, xp))
    of_query, of_key, of_value = found
    scale, _ = plan.exact  # type: ignore[misc]
    spread = spread[..., : tiles.lengths[0], :]
    of_query = xp.multiply(of_query, xp.multiply(spread, xp.expand_dims(powers[2], axis=2)))
    of_key = xp.multiply(of_key, xp.squeeze(powers[1], axis=2))
    of_value = xp.multiply(of_value, xp.squeeze(powers[0], axis=2))
    slope_unit = scale * 2.0 ** -(SLOPES + BESIDE_SLOPES)
    units = slope_unit, slope_unit, gain(dropout_of(tiles)) * 2.0 ** -(WEIGHTS[2] + OUT)
    gradients: list[Any] = [
        rounded(xp.multiply(gradient, unit), xp)
        for gradient, unit in zip((of_query, of_key, of_value), units, strict=True)
    ]
    if not plan.tame:  # what was replaced has no gradient
        gradients = [xp.where(xp.isfinite(x), gradient, 0.0) for x, gradient in zip(given[:3], gradients, strict=True)]
    if widest is not None:
        found = total(tuple(collected_bias(tiles, stack) for stack in stacks[3]), xp)
        if not is_one(operands.bias, -2):
            widest = widest[..., : tiles.lengths[0], :]
        gradients.append(rounded(xp.multiply(found, xp.multiply(widest, 2.0**-BIAS_BITS)), xp))
    integers = sum(plan.present[4:]) + sum(plan.num_arrays)
    return *gradients, *(None for _ in range(integers))


def _square(plan: Plan, operands: Operands, xp: Namespace) -> tuple[int, int]:
    """As many queries as keys, for both collect sums: with long blocks of one, those of the other come by often."""
    times = shape(operands.query, xp=xp)[2]
    side = min(SIDE, plan.blocks[1])
    return max(32, side // times if isinstance(times, int) else side), side


def _widest(tiles: Tiles, spread: Array) -> Array:
    """The largest unit of slopes among the rows that share an element of the bias, and no others."""
    xp, bias = tiles.xp, tiles.operands.bias
    shared = tuple(axis for axis in range(4) if is_one(bias, axis))
    widest = xp.max(spread, axis=shared, keepdims=True) if shared else spread
    return xp.where(xp.equal(widest, 0.0), 1.0, widest)  # of rows that only fill up a block


def _filled(tiles: Tiles, rows: Array) -> Array:
    """Rows with zeros added, as the queries have where blocks are of one size."""
    if not tiles.loops.traced:
        return rows
    return pad(rows, -2, shape(tiles.operands.query, xp=tiles.xp)[-2] - tiles.lengths[0], tiles.xp)


def _backward(tiles: Tiles, sides: Sides) -> Any:
    plan, xp, loops = tiles.plan, tiles.xp, tiles.loops
    _, count = plan.exact  # type: ignore[misc]
    dropout, visits = dropout_of(tiles), visits_of(tiles, by_key=True)
    multiply_out = _scores if count == 2 else _plain_scores
    carry_keys, carry_rows = exceeds(tiles, 1), exceeds(tiles, 0)
    depth, width = (shape(x, xp=xp)[-1] // 2 for x in (sides.key_columns, sides.out_columns))
    widths = widths_of(depth, 2, carry_keys), widths_of(depth, 2, carry_rows), widths_of(width, 2, carry_rows)

    def attend(index: Any, sums: Any) -> Any:
        entry = entry_of(tiles, index)
        own = Sides(*(of_entry(tiles, x, entry.index, entry.head) for x in sides))

        def attend_columns(j: Any, sums: Any) -> Any:
            keys, values, key_columns = (
                loops.block(x, j, tiles.sizes[1], -2) for x in (entry.key, entry.value, own.key_columns)
            )
            next_block, whole, seen = visits.of(loops, entry.index, j)

            def absorb(masked: bool, step: Any, state: Any) -> Any:
                of_query, of_key, of_value, of_bias = state
                i = next_block(step)
                query, out, out_columns, query_columns, rows = (
                    loops.block(x, i, tiles.sizes[0], -2) for x in (entry.query, *own[:4])
                )
                tile = _tile(tiles, entry, query, keys, i, j, masked)
                scores = tile.scores
                scores -= rows[..., :1]
                weights = exp2_weight(scores, xp)
                rise = multiply_out(out, values, xp)
                if dropout is not None:
                    rise = dropped(rise, dropout, tile.at, heads_of(tiles), xp)
                    rise = settle(xp.multiply(rise, gain(dropout)), xp)
                slope = xp.subtract(rise, rows[..., 1:2])
                slope *= weights
                slope *= rows[..., 2:3]  # at most 1 in magnitude
                kept = [dropped(x, dropout, tile.at, heads_of(tiles), xp) for x in _cut(weights, WEIGHTS[2], 2, xp)]
                if of_bias is not None:
                    of_bias = _add_bias(tiles, entry, of_bias, slope, rows, i, j)
                if tile.slope is not None:
                    slope *= tile.slope
                parts = _cut(slope, SLOPES, 2, xp)
                found = _summed(parts, query_columns, transposed_product, xp)
                of_key = tuple(map(xp.add, of_key, _parts(found, carry_rows, xp)))
                found = _summed(kept, out_columns, transposed_product, xp)
                of_value = tuple(map(xp.add, of_value, _parts(found, carry_rows, xp)))
                beside_keys = xp.concat(list(_parts(_summed(parts, key_columns, product, xp), carry_keys, xp)), axis=-1)
                return loops.add(of_query, index * tiles.counts[0] + i, beside_keys), of_key, of_value, of_bias

            stack, keys_sum, values_sum, of_bias = sums
            *dims, _ = shape(keys, xp=xp)
            empty = (tuple(zeros(keys, *dims, last, xp=xp) for last in lasts) for lasts in widths[1:])
            stack, *found, of_bias = visit(loops, whole, seen, absorb, (stack, *empty, of_bias))
            of_key, of_value = (xp.concat(list(parts), axis=-1) for parts in found)
            place = index * tiles.counts[1] + j
            return stack, loops.add(keys_sum, place, of_key), loops.add(values_sum, place, of_value), of_bias

        return loops.loop(0, tiles.counts[1], attend_columns, sums)

    biases = None if tiles.operands.bias is None else (bias_stack(tiles), bias_stack(tiles))
    return loops.loop(
        0, rounds_of(tiles), attend, (*gradient_stacks(tiles, *map(sum, widths), after=sides.rows), biases)
    )


def _add_bias(tiles: Tiles, entry: Entry, stacks: Any, slope: Array, rows: Array, i: Any, j: Any) -> tuple[Any, ...]:
    """Slopes as integers in a unit that all rows share, in two parts, so that their sums are exact."""
    parts = carried(tiles.xp.round(tiles.xp.multiply(slope, rows[..., 3:])), tiles.xp)
    return tuple(add_bias(tiles, entry, stack, part, i, j) for stack, part in zip(stacks, parts, strict=True))


EXACT = Operation(forward, backward, empty_results, wide=True)
