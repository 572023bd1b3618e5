"""Parts of a call: the keys that its mask leaves, of all samples or of each, as in a cache that is partly filled."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from attention_core._arrays import sizes
from attention_core._attention.call import Call
from attention_core._backend import is_concrete, is_exporting
from attention_core.masks import Mask
from attention_core.masks._band import LIMIT, UNKNOWN, Band
from attention_core.masks._mask import bounds_of
from attention_core.masks._rules import rule_of

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
    bands, rows, columns = _bands(call), call.query.shape[-2], call.key.shape[-2]
    return None if bands is None else [keys_of(band, (0, rows - 1), call.starts[1], columns) for band in bands]


def _bands(call: Call) -> list[Band] | None:
    """The bands of the mask of a call; ``None`` in a program for export, which may be for any length."""
    start, dims = call.starts, (*sizes(call.query), *sizes(call.key)[-2:])
    starts_at_0 = isinstance(start[0], int) and start[0] == 0 and isinstance(start[1], int)
    if is_exporting(call.query) or not isinstance(call.mask, Mask) or None in dims or not starts_at_0:
        return None
    bands = call.mask.bounds().numbers(tuple(call.query.shape[:-3]))
    return None if bands == [UNKNOWN] else bands


def every_query_has_a_key(call: Call) -> bool:
    """Whether numbers of a rule say that each query may attend to some key."""
    bands, rows, start = _bands(call) if call.bias is None else None, call.query.shape[-2], call.starts[1]
    if bands is None:
        return False
    stops = [min(band.stop, start + call.key.shape[-2]) for band in bands]
    return all(
        band.is_exact and band.low <= band.high and start <= band.high and max(start, rows - 1 + band.low) < stop
        for band, stop in zip(bands, stops, strict=True)
    )


class KeyCut(NamedTuple):
    """A run of keys, behind which all is masked, and the mask and the positions that are left for it."""

    first: int
    stop: int
    mask: Any  # None where it allows all of these
    starts: tuple[int, int]


def with_cut(call: Call, cut: KeyCut | None) -> Call:
    """The call with these keys alone."""
    if cut is None:
        return call
    first, stop = cut.first, cut.stop
    if first == 0 and stop == call.key.shape[-2]:
        return call._replace(mask=cut.mask, starts=cut.starts)
    key, value, bias = call.key[..., first:stop, :], call.value[..., first:stop, :], call.bias
    if bias is not None and len(bias.shape) and bias.shape[-1] != 1:  # which may have one number for all keys
        bias = bias[..., first:stop]
    return call._replace(key=key, value=value, mask=cut.mask, bias=bias, starts=cut.starts)


def find_cut(call: Call) -> KeyCut | None:
    """The keys that the mask of a call leaves; ``None`` where nothing is gained, or where that is not known.

    Programs of compilers are made for a shape: they are cut by numbers alone, and no array is cut before it is traced.
    """
    if call.backend.loops.traced and is_concrete(call.query):
        return None
    bands = _bands(call)
    return None if bands is None else _cut(call, bands)


def _cut(call: Call, bands: list[Band]) -> KeyCut | None:
    start, (rows, columns) = call.starts[1], (call.query.shape[-2], call.key.shape[-2])
    ranges = [keys_of(band, (0, rows - 1), start, columns) for band in bands]
    first, stop = min(each.first for each in ranges), max(each.stop for each in ranges)
    if first >= stop:  # nothing is attended to, which a mask has to say
        return None
    is_whole = all(each.every_first <= first and each.every_stop >= stop for each in ranges)
    if not is_whole and stop - first == columns:
        return None
    counts_positions = not is_whole or call.score_mod is not None or call.dropout is not None
    mask = None if is_whole else _left_of(call, bands, start + stop)
    return KeyCut(first, stop, mask, (0, start + first if counts_positions else 0))


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


def sample_ranges(call: Call) -> list[KeyRange] | None:
    """The keys of each sample of a ragged batch; ``None`` of other batches, and where they are not known."""
    bands = _bands(call)
    if bands is None or len(bands) < 2 or not all(band.is_exact for band in bands):
        return None
    return key_ranges(call)


def sample_cuts(call: Call, ranges: list[KeyRange]) -> list[KeyCut]:
    """The keys that the lengths of each sample leave, and the mask of numbers that is left for them."""
    bands: Any = _bands(call)
    return [_cut(call, [band]) or KeyCut(0, call.key.shape[-2], rule_of(band), call.starts) for band in bands]


def sample_calls(call: Call, cuts: list[KeyCut]) -> list[Call]:
    """A call (H, M, D) for each sample of a batch, with the keys of its own cut."""
    places = itertools.product(*map(range, call.query.shape[:-3]))
    samples = (
        call._replace(query=call.query[*at, ...], key=call.key[*at, ...], value=call.value[*at, ...]) for at in places
    )
    return [with_cut(sample, cut) for sample, cut in zip(samples, cuts, strict=True)]


def cuts_that_save(call: Call) -> list[KeyCut] | None:
    """The cuts of samples of a ragged batch; ``None`` where to take these apart saves no time, or is not known to.

    Libraries that trace do not read lengths, and those that differentiate would join gradients of pieces.
    """
    backend = call.backend
    if call.mask is None or backend.loops.traced or backend.differentiates or not all(map(is_concrete, call[:3])):
        return None
    if call.bias is not None or call.score_mod is not None or call.dropout is not None:  # which tell samples apart
        return None
    ranges = sample_ranges(call)
    if ranges is None:
        return None
    lengths = [max(0, each.stop - each.first) for each in ranges]
    numbers_per_key = call.key.shape[-3] * (call.key.shape[-1] + call.value.shape[-1])
    is_worth_it = (max(lengths) - sum(lengths) / len(lengths)) * numbers_per_key >= MIN_SAVED
    return sample_cuts(call, ranges) if is_worth_it else None


class Parts(NamedTuple):
    """A call, and what is left of it without the keys that its mask hides from all queries."""

    whole: Call
    cut: KeyCut | None
    call: Call  # with these keys


def parts_of(call: Call) -> Parts:
    """Cut the keys of a call, unless they are as many as queries, of which blocks leave out what is masked."""
    cut = None if call.mask is None or call.query.shape[-2] == call.key.shape[-2] else find_cut(call)
    return Parts(call, cut, call if cut is None else with_cut(call, cut))
