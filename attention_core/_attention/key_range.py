"""Fewer keys: a call without the keys that its mask hides from all queries, as in a cache that is partly filled."""

from __future__ import annotations

from typing import Any, NamedTuple

from attention_core._arrays import Array, sizes
from attention_core._attention.call import Call
from attention_core._backend import is_concrete, is_exporting
from attention_core.masks import And, Causal, KeyLengths, Mask
from attention_core.masks._mask import KeyRange

FEW_QUERIES = 16
KEYS_PER_QUERY = 64


def has_few_queries(rows: Any, columns: Any) -> bool:
    """Whether a step of decoding reads its keys and values once, so that blocks would save nothing."""
    known = isinstance(rows, int) and isinstance(columns, int)
    return known and rows <= FEW_QUERIES and rows * KEYS_PER_QUERY <= columns


def key_ranges(call: Call) -> list[KeyRange] | None:
    """The keys that queries may attend to, as indices: of all samples, or of each; ``None`` if they are not known.

    They are not known in a program for export, which may be for any length.
    """
    if is_exporting(call.query):
        return None
    dims = (*sizes(call.query), *sizes(call.key)[-2:])
    *leading, _, rows, _, columns, _ = dims
    query_start, start = call.starts
    starts_at_0 = isinstance(query_start, int) and query_start == 0 and isinstance(start, int)
    if not isinstance(call.mask, Mask) or None in dims or not starts_at_0:
        return None
    ranges = call.mask.key_ranges(rows, tuple(leading))  # type: ignore[arg-type]
    if ranges is None:
        return None
    return [KeyRange(*(_within(end - start, columns) for end in each)) for each in ranges]


def _within(end: int, columns: Any) -> Any:
    """An index of so many keys, or their number. Not by `min`, of which a compiler makes a symbol."""
    return columns if end > columns else max(0, end)


def masked_columns(call: Call) -> list[slice]:
    """The columns of the scores in which some may be masked: all, unless numbers of a rule say which."""
    columns = sizes(call.key)[-2]
    ranges = key_ranges(call) if call.bias is None else None
    if ranges is None:
        return [slice(0, columns)]
    first, stop = max(each.every_first for each in ranges), min(each.every_stop for each in ranges)
    parts = (slice(0, first), slice(stop, columns)) if first < stop else (slice(0, columns),)
    return [part for part in parts if part.start < part.stop]


class KeyCut(NamedTuple):
    """A run of keys, behind which all is masked, and the mask and the positions that are left for it.

    Attributes
    ----------
    first, stop : int
    mask : Mask or None
        ``None`` where it allows all of these.
    starts : tuple of int
    """

    first: int
    stop: int
    mask: Any
    starts: tuple[int, int]


def cut_keys(call: Call) -> Call:
    """The call with a run of its keys, behind which all is masked, and without a mask that allows all of these."""
    return with_cut(call, find_cut(call))


def with_cut(call: Call, cut: KeyCut | None) -> Call:
    """The call with these keys alone."""
    if cut is None:
        return call
    first, stop = cut.first, cut.stop
    if first == 0 and stop == call.key.shape[-2]:
        return call._replace(mask=cut.mask, starts=cut.starts)
    return call._replace(
        key=call.key[..., first:stop, :],
        value=call.value[..., first:stop, :],
        mask=cut.mask,
        bias=_cut_bias(call.bias, first, stop),
        starts=cut.starts,
    )


def find_cut(call: Call) -> KeyCut | None:
    """The keys that the mask of a call leaves; ``None`` where nothing is gained, or where that is not known.

    Programs of compilers are made for a shape: they are cut by numbers alone, and no array is cut before it is traced.
    """
    if call.backend.loops.traced and is_concrete(call.query):
        return None
    ranges, start = key_ranges(call), call.starts[1]
    if ranges is None:
        return None
    *leading, _, rows, _ = call.query.shape
    first, stop = min(each.first for each in ranges), max(each.stop for each in ranges)
    if first >= stop:  # nothing is attended to, which a mask has to say
        return None
    is_whole = all(each.every_first <= first and each.every_stop >= stop for each in ranges)
    if not is_whole and stop - first == call.key.shape[-2]:
        return None
    counts_positions = not is_whole or call.score_mod is not None or call.dropout is not None
    kept = KeyRange(*(start + first, start + stop) * 2)
    mask = None if is_whole else _simplified(call.mask, rows, tuple(leading), kept)
    return KeyCut(first, stop, mask, (0, start + first if counts_positions else 0))


def _simplified(mask: Any, rows: int, leading: tuple[int, ...], kept: KeyRange) -> Any:
    """The mask for a run of keys: no idle lengths with a causal mask, whose offset becomes a number.

    Kernels have a flag for the offset 0. Only an offset that can be read, and is one for all samples, is a number.
    """
    if type(mask) is And and {type(mask.first), type(mask.second)} == {Causal, KeyLengths}:
        causal, lengths = (mask.first, mask.second) if type(mask.first) is Causal else (mask.second, mask.first)
        causal = _simplified(causal, rows, leading, kept)
        return causal if _allows_all(lengths, rows, leading, kept) else And(causal, lengths)
    ranges = mask.key_ranges(rows, leading) if type(mask) is Causal else None
    offsets = {each.every_stop - 1 for each in ranges or ()}
    return Causal(offset=offsets.pop()) if len(offsets) == 1 else mask


def _allows_all(mask: Mask, rows: int, leading: tuple[int, ...], kept: KeyRange) -> bool:
    """Whether all queries of all samples may attend to a run of keys."""
    ranges = mask.key_ranges(rows, leading)
    return ranges is not None and all(
        each.every_first <= kept.first and each.every_stop >= kept.stop for each in ranges
    )


def _cut_bias(bias: Array | None, first: int, stop: int) -> Array | None:
    """A bias of these keys, unless it has one number for all keys."""
    return bias if bias is None or not len(bias.shape) or bias.shape[-1] == 1 else bias[..., first:stop]
