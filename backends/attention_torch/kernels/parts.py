"""A call of PyTorch's kernel for CPUs as its parts: all samples, or each with the keys that a mask leaves for it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from attention_core.backend import (
    Call,
    KeyCut,
    bounds_of,
    find_cut,
    is_top_left_causal,
    key_ranges,
    masked_columns,
    remember,
    rule_of,
    sample_cuts,
)
from attention_core.masks import Band, Mask, flatten
from attention_torch.kernels import guards, sdpa

ALL = slice(None)
MAX_KEPT, MAX_KEPT_NUMBERS = 64, 2**16  # masks, such as those of the samples of a batch, and numbers of one
_kept: dict[Any, torch.Tensor] = {}


class Part(NamedTuple):
    """A call of the kernel: of all samples, or of one, with a run of their keys."""

    at: slice  # of samples, along one axis
    keys: slice
    arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value as the kernel takes them
    added: torch.Tensor | None  # to scores
    is_causal: bool


def parts_of(call: Call, cuts: list[KeyCut] | None = None) -> list[Part] | None:
    """The calls of the kernel; ``None`` if it turns out that the mask is left to blocks."""
    if cuts is None:
        mask: Any = call.mask
        if isinstance(mask, Mask) and not guards.fits_mask(call):
            return None
        cuts = cuts_of(call)
    flags = [is_top_left_causal(cut.mask) for cut in cuts]
    arrays = sdpa.kernel_arrays(call, is_causal=any(flags))
    query, key, _ = arrays
    parts = []
    samples = [x.split(1) for x in arrays] if len(cuts) > 1 else []  # whose gradients are joined at once
    for index, cut in enumerate(cuts):
        at = slice(index, index + 1) if len(cuts) > 1 else ALL
        keys, is_causal, added = slice(cut.first, cut.stop), False, None
        if cut.first >= cut.stop:
            continue
        if at != ALL:
            arrays = tuple(x[index] for x in samples)
        if keys != slice(0, key.shape[-2]):
            arrays = arrays[0], arrays[1][:, :, keys], arrays[2][:, :, keys]
        if call.bias is not None:
            added = sdpa.with_axes_of(query, call, call.bias)
        elif cut.mask is not None:
            is_causal = flags[index] and guards.counts_from_0(cut.starts)
            added = None if is_causal else _added_to_scores(_of_part(call, at, keys, cut), arrays[0])
        parts.append(Part(at, keys, arrays, added, is_causal))
    return parts


def _of_part(call: Call, at: slice, keys: slice, cut: KeyCut) -> Call:
    """The call of a part, for its mask."""
    query, key = (x if at == ALL else x.reshape(-1, *x.shape[-3:])[at] for x in call[:2])
    return call._replace(query=query, key=key[..., keys, :], mask=cut.mask, starts=cut.starts)


def cuts_of(call: Call) -> list[KeyCut]:
    """The keys of all samples, or of each, and the mask that is left for them."""
    whole, mask = KeyCut(0, call.key.shape[-2], call.mask, call.starts), call.mask
    if call.bias is not None or not guards.is_rule_without_flag(mask):
        return [whole]
    if guards.is_of_lengths(mask):
        band = bounds_of(mask)
        ranges = key_ranges(call._replace(mask=rule_of(Band(stop=band.stop, is_exact=True))))
        if ranges is not None and (all(each == ranges[0] for each in ranges) or not guards.is_short(call)):
            ranges = ranges[:1] if all(each == ranges[0] for each in ranges) else ranges
            causal = rule_of(Band(high=band.high, is_exact=True))
            return [KeyCut(each.first, each.stop, causal, (0, 0)) for each in ranges]
    apart = guards.ranges_apart(call)
    if apart is not None:
        return list(sample_cuts(call, apart))
    return [find_cut(call) or whole]


def joined(call: Call, parts: list[Part], arrays: Any) -> torch.Tensor:
    """Outputs or logsumexps of parts with the axes of the call; 0 or -inf of samples without a key."""
    joined = arrays[0]
    if parts[0].at != ALL:
        empty = torch.full_like(joined, 0.0 if joined.dim() == 4 else -math.inf)
        of_samples = [empty] * math.prod(call.query.shape[:-3])
        for part, array in zip(parts, arrays, strict=True):
            of_samples[part.at.start] = array
        joined = torch.cat(of_samples)
    elif parts[0].arrays[0] is call.query:
        return joined
    return sdpa.with_batch_of(call, joined)


def of_no_key(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp of a batch without a key."""
    wide = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    return torch.zeros_like(call.query), call.query.new_full(call.query.shape[:-1], -math.inf, dtype=wide)


def _added_to_scores(call: Call, query: torch.Tensor) -> torch.Tensor:
    """What the mask adds to the scores of a query of `kernel_arrays`.

    What a rule of numbers adds is the same in all layers of a model, and kept for the next of them.
    """
    if not bounds_of(call.mask).is_relative:
        return _added(call, query)
    dims = call.query.shape[:-1], query.shape[:-1], call.key.shape[-2]
    key = flatten(call.mask, []), dims, call.starts, query.dtype
    kept = _kept.get(key)
    if kept is None:
        with torch.inference_mode(False):
            kept = _added(call, query)
        if kept.numel() <= MAX_KEPT_NUMBERS:
            remember(_kept, key, kept, most=MAX_KEPT)
    return kept


def _added(call: Call, query: torch.Tensor) -> torch.Tensor:
    rows, columns = query.shape[-2], call.key.shape[-2]
    added: Any = None
    for part in masked_columns(call):
        starts = call.starts[0], call.starts[1] + part.start
        _, mask = sdpa.kernel_mask(call._replace(key=call.key[..., part, :], starts=starts))
        assert mask is not None
        mask = sdpa.with_axes_of(query, call, mask)
        if added is None:
            added = query.new_zeros((*(mask.shape[:-2] if mask.dim() == 4 else (1, 1)), rows, columns))
        added[..., part].masked_fill_(~mask, -math.inf)
    return query.new_zeros((1, 1, rows, columns)) if added is None else added
