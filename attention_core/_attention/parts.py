"""Parts of a call, which are calls; and which keys the mask of a call leaves, as in a cache that is partly filled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from .._arrays import Array, Namespace, leaves, positions, sizes, take_rows
from .._backend import is_concrete, is_exporting
from ..masks import Mask, flatten, unflatten
from ..masks._band import LIMIT, UNKNOWN, Band
from ..masks._mask import as_mask, bounds_of
from ..masks._rules import rule_of
from .call import Call, group_size, is_listed

FEW_QUERIES = 16
KEYS_PER_QUERY = 64
MIN_SAVED = 2**16  # numbers of keys and values of a sample: they take as long to read as a call of its own costs


def has_few_queries(rows: Any, columns: Any) -> bool:
    """Whether a step of decoding reads its keys and values once, so that blocks would save nothing."""
    known = isinstance(rows, int) and isinstance(columns, int)
    return known and rows <= FEW_QUERIES and rows * KEYS_PER_QUERY <= columns


class KeyRange(NamedTuple):
    """Of some queries, the keys that any of them may attend to, and a run of keys that all of them may."""

    first: int
    stop: int  # behind the last
    every_first: int
    every_stop: int


def keys_of(band: Band, queries: tuple[int, int], start: int, columns: Any) -> KeyRange:
    """The keys of queries from a first to a last one, as indices of so many keys from a position on."""
    (first, last), (low, high, stop, is_exact, _) = queries, band
    ends = first + low, min(stop, last + high + 1), last + low, min(stop, first + high + 1) if is_exact else start
    return KeyRange(*(_within(end - start, columns) for end in ends))


def _within(end: int, columns: Any) -> Any:
    """An index of so many keys, or their number. Not by `min`, of which a compiler makes a symbol."""
    return columns if end > columns else max(0, end)


def key_ranges(call: Call) -> list[KeyRange] | None:
    """The keys that queries may attend to, as indices: of all samples, or of each; ``None`` if they are not known."""
    bands = _bands(call)
    return None if bands is None else [_keys_of(band, call) for band in bands]


def _keys_of(band: Band, call: Call) -> KeyRange:
    first, start = call.starts
    return keys_of(band, (first, first + call.query.shape[-2] - 1), start, call.key.shape[-2])


def _bands(call: Call) -> list[Band] | None:
    """The bands of the mask of a call; ``None`` in a program for export, which may be for any length."""
    dims = (*sizes(call.query), *sizes(call.key)[-2:], *call.starts)
    if is_exporting(call.query) or not isinstance(call.mask, Mask) or not all(isinstance(dim, int) for dim in dims):
        return None
    bands = call.mask.bounds().numbers(tuple(call.query.shape[:-3]))
    return None if bands == [UNKNOWN] else bands


def every_query_has_a_key(call: Call) -> bool:
    """Whether numbers of a rule say that each query may attend to some key."""
    bands, (first, start) = _bands(call) if call.bias is None else None, call.starts
    if bands is None:
        return False
    last = first + call.query.shape[-2] - 1
    stops = [min(band.stop, start + call.key.shape[-2]) for band in bands]
    return all(
        band.is_exact and band.low <= band.high and start <= first + band.high and max(start, last + band.low) < stop
        for band, stop in zip(bands, stops, strict=True)
    )


class Run(NamedTuple):
    """Neighbouring places along an axis, the first of which may be an array."""

    first: Any
    size: int


Places: TypeAlias = "Run | Array | None"  # or the indices (n,) of any places; None for all


def cut(call: Call, *, heads: Places = None, rows: Places = None, columns: Places = None) -> Call:
    """The part of a call of some query heads, queries and keys: a call by the positions of the whole.

    A run of heads from an array on has whole groups. Of heads that are no whole groups, each gets a key/value head.
    """
    xp, (query, key, value), bias = call.xp, call[:3], call.bias
    sinks, starts, whole = call.sinks, call.starts, call.whole
    if heads is rows is columns is None:
        return call
    mask = None if call.mask is None else _rule_of_part(as_mask(call.mask), heads, xp)
    if heads is not None:
        group = group_size(query, key, xp)
        if isinstance(heads, Run) and isinstance(heads.first, int) and (heads.first % group or heads.size % group):
            heads = _indices(heads, query, xp)
        of_keys = Run(heads.first // group, heads.size // group) if isinstance(heads, Run) else heads // group
        num_heads = query.shape[-3] if whole.num_heads is None else whole.num_heads
        whole = whole._replace(head=_start(whole.head, heads, xp), num_heads=num_heads)
        query, sinks = taken(query, heads, -3, xp), taken(sinks, heads, -1, xp)
        key, value = taken(key, of_keys, -3, xp), taken(value, of_keys, -3, xp)
    if rows is not None:
        query, starts = taken(query, rows, -2, xp), (_start(starts[0], rows, xp), starts[1])
    if columns is not None:
        key, value = taken(key, columns, -2, xp), taken(value, columns, -2, xp)
        starts = starts[0], _start(starts[1], columns, xp)
    for axis, places in ((-3, heads), (-2, rows), (-1, columns)) if bias is not None else ():
        bias = taken(bias, places, axis, xp, may_broadcast=True)
    return call._replace(
        query=query, key=key, value=value, mask=mask, bias=bias, sinks=sinks, starts=starts, whole=whole
    )


def taken(x: Array | None, places: Places, axis: int, xp: Namespace, *, may_broadcast: bool = False) -> Any:
    """What stands at places along an axis, -1 or before; of an array that broadcasts, the one number for all."""
    if x is None or places is None or (may_broadcast and (len(x.shape) < -axis or sizes(x)[axis] == 1)):
        return x
    if isinstance(places, Run) and isinstance(places.first, int):
        return x[(..., slice(places.first, places.first + places.size), *(slice(None),) * (-axis - 1))]
    return take_rows(x, _indices(places, x, xp), axis=axis, xp=xp)


def _indices(places: Any, like: Array, xp: Namespace) -> Array:
    if not isinstance(places, Run):
        return places
    return xp.add(positions(places.size, like, xp=xp), places.first)


def _start(start: Any, places: Any, xp: Namespace) -> Any:
    """Where places stand that are counted from a start: a position, or those of all of them."""
    if isinstance(places, Run) and not is_listed(start):
        return start + places.first
    return taken(start, places, -1, xp) if is_listed(start) else xp.add(places, start)


def with_arrays(rule: Mask, part: Callable[[Array, int], Array]) -> Any:
    """A rule of ``part(array, axes)`` for each of its arrays, but for those that it passes on whole."""
    treedef, arrays = flatten(rule)
    if not arrays:
        return rule
    for index, axes in leaves(treedef):
        if axes >= 0:
            arrays[index] = part(arrays[index], axes)
    return unflatten(treedef, arrays)


def _rule_of_part(rule: Mask, heads: Any, xp: Namespace) -> Any:
    def part(array: Array, axes: int) -> Array:
        return taken(array, heads, -3, xp, may_broadcast=True) if axes == 3 else array

    return with_arrays(rule, part)


class KeyCut(NamedTuple):
    """A run of keys, behind which all is masked, and the mask and the positions that are left for it."""

    first: int
    stop: int
    mask: Any  # None where it allows all of these
    starts: tuple[int, int]


def with_cut(call: Call, keys: KeyCut | None) -> Call:
    """The call with these keys alone."""
    if keys is None:
        return call
    first, stop, key, value, bias = keys.first, keys.stop, call.key, call.value, call.bias
    if stop - first < key.shape[-2]:
        key, value = key[..., first:stop, :], value[..., first:stop, :]
        bias = None if bias is None else taken(bias, Run(first, stop - first), -1, call.xp, may_broadcast=True)
    return call._replace(key=key, value=value, mask=keys.mask, bias=bias, starts=keys.starts)


def find_cut(call: Call) -> KeyCut | None:
    """The keys that the mask of a call leaves; ``None`` where nothing is gained, or where that is not known.

    Programs of compilers are made for a shape: they are cut by numbers alone, and no array is cut before it is traced.
    """
    if call.backend.loops.traced and is_concrete(call.query):
        return None
    bands = _bands(call)
    found = None if bands is None else cut_of(call, bands)
    saves = found is not None and (found.mask is None or found.stop - found.first < call.key.shape[-2])
    return found if saves else None


def cut_of(call: Call, bands: list[Band]) -> KeyCut:
    """The keys that bands of all samples, or of each, leave."""
    of_queries, start = call.starts
    ranges = [_keys_of(band, call) for band in bands]
    first, stop = min(each.first for each in ranges), max(each.stop for each in ranges)
    if first >= stop:  # nothing is attended to, which a mask has to say, of one key
        first, stop = 0, 1
    is_whole = all(each.every_first <= first and each.every_stop >= stop for each in ranges)
    counts_positions = not is_whole or call.score_mod is not None or call.dropout is not None
    mask = None if is_whole else _left_of(call, bands, start + stop)
    return KeyCut(first, stop, mask, (of_queries, start + first) if counts_positions else (0, 0))


def _left_of(call: Call, bands: list[Band], stop: int) -> Any:
    """What a mask says of keys before a position: no idle lengths, and numbers that all samples share.

    Kernels have a flag for the offset 0. Arrays of lengths stay where samples differ.
    """
    if not all(band.is_exact for band in bands):
        return call.mask
    whole = bounds_of(call.mask)
    ends, stops = {band[:2] for band in bands}, {LIMIT if band.stop >= stop else band.stop for band in bands}
    if len(ends) == 1:
        whole = whole._replace(low=bands[0].low, high=bands[0].high, offset=0)
    return rule_of(whole._replace(stop=stops.pop()) if len(stops) == 1 else whole)


def sample_cuts(call: Call) -> list[KeyCut] | None:
    """The keys that a rule leaves of all samples, or of each, and the mask of numbers that is left for them.

    ``None`` where the rule is no band, and where lengths are not known.
    """
    bands = _bands(call)
    if bands is None or not all(band.is_exact for band in bands):
        return None
    return [cut_of(call, [band]) for band in bands]


def sample_calls(call: Call, cuts: list[KeyCut]) -> list[Call]:
    """A call (H, M, D) for each sample of a batch, with the keys of its own cut."""
    query, key, value = call[:3]
    places = itertools.product(*map(range, query.shape[:-3]))
    return [
        with_cut(call._replace(query=query[*at, ...], key=key[*at, ...], value=value[*at, ...]), keys)
        for at, keys in zip(places, cuts, strict=True)
    ]


def cuts_that_save(call: Call) -> list[KeyCut] | None:
    """The cuts of samples of a ragged batch; ``None`` where to take these apart saves no time, or is not known to.

    Libraries that trace do not read lengths, and those that differentiate would join gradients of pieces.
    """
    backend = call.backend
    if call.mask is None or backend.loops.traced or backend.differentiates or not all(map(is_concrete, call[:3])):
        return None
    if call.bias is not None or call.score_mod is not None or call.dropout is not None:  # which tell samples apart
        return None
    cuts = sample_cuts(call)
    if cuts is None:
        return None
    lengths = [each.stop - each.first for each in cuts]
    numbers_per_key = call.key.shape[-3] * (call.key.shape[-1] + call.value.shape[-1])
    is_worth_it = (max(lengths) - sum(lengths) / len(lengths)) * numbers_per_key >= MIN_SAVED
    return cuts if is_worth_it else None


def keys_within_reach(call: Call) -> KeyCut | None:
    """The cut of a call, unless it has as many keys as queries: of these, blocks leave out what is masked.

    Reproducible arithmetic has blocks alone.
    """
    is_square = call.query.shape[-2] == call.key.shape[-2]
    return None if call.mask is None or is_square or call.arithmetic == "reproducible" else find_cut(call)
