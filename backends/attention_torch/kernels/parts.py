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
    rule_of,
    sample_cuts,
    with_cut,
)
from attention_core.masks import Band, Mask
from attention_torch.kernels import guards, sdpa

CALLS_OF_A_MASK = 8  # which take as long as it takes to make one
MIN_ELEMENTS = 2**16  # of a sample of a batch, from which on a call of its own takes less time than a mask


class Inputs(NamedTuple):
    """What the kernel is given."""

    arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value
    added: torch.Tensor | None  # to scores
    is_causal: bool


def parts_of(call: Call, cuts: list[KeyCut]) -> list[Call]:
    """The calls of the kernel, each with its keys."""
    if len(cuts) == 1:
        return [with_cut(call, cuts[0])]
    samples = zip(*(x.reshape(-1, *x.shape[-3:]).chunk(len(cuts)) for x in call[:3]), cuts, strict=True)
    return [with_cut(call._replace(query=query, key=key, value=value), cut) for query, key, value, cut in samples]


def inputs_of(call: Call) -> Inputs:
    """What the kernel is given of a part that has a key."""
    is_causal = call.bias is None and is_top_left_causal(call.mask) and guards.counts_from_0(call.starts)
    arrays, added = sdpa.kernel_arrays(call, is_causal=is_causal), None
    if call.bias is not None:
        added = sdpa.with_axes_of(arrays[0], call, call.bias)
    elif call.mask is not None and not is_causal:
        added = added_to_scores(call, arrays[0])
    return Inputs(arrays, added, is_causal)


def cuts_of(call: Call) -> list[KeyCut] | None:
    """The keys of all samples, or of each, and the mask that is left for them; ``None`` if that is left to blocks."""
    mask: Any = call.mask
    if isinstance(mask, Mask) and not guards.fits_mask(call):
        return None
    whole = KeyCut(0, call.key.shape[-2], mask, call.starts)
    if call.bias is not None or not guards.is_rule_without_flag(mask):
        return [whole]
    cuts = _cuts_of_samples(call)
    if cuts is not None and all(cut == cuts[0] for cut in cuts):
        return cuts[:1]
    calls_more = math.prod(call.query.shape[:-3]) - CALLS_OF_A_MASK
    is_fast = call.key.numel() >= MIN_ELEMENTS * calls_more or not guards.fits_as_array(call)
    return cuts if cuts is not None and is_fast else [find_cut(call) or whole]


def _cuts_of_samples(call: Call) -> list[KeyCut] | None:
    """The keys of each sample, where these may differ; ``None`` where they are not known."""
    if guards.is_of_lengths(call.mask):
        band = bounds_of(call.mask)
        ranges = key_ranges(call._replace(mask=rule_of(Band(stop=band.stop, is_exact=True))))
        causal = rule_of(Band(high=band.high, is_exact=True))
        return None if ranges is None else [KeyCut(each.first, each.stop, causal, call.starts) for each in ranges]
    return sample_cuts(call)


def joined(call: Call, arrays: list[torch.Tensor]) -> torch.Tensor:
    """Outputs or logsumexps of parts with the axes of the call."""
    return arrays[0] if len(arrays) == 1 else sdpa.with_batch_of(call, torch.cat(arrays))


def of_no_key(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp of a part without a key."""
    wide = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    return torch.zeros_like(call.query), call.query.new_full(call.query.shape[:-1], -math.inf, dtype=wide)


def added_to_scores(call: Call, query: torch.Tensor) -> torch.Tensor:
    """What the mask adds to the scores of a query of `kernel_arrays`."""
    _, mask = sdpa.kernel_mask(call)
    assert mask is not None
    mask = sdpa.with_axes_of(query, call, mask)
    shape = *(mask.shape[:-2] if mask.dim() == 4 else (1, 1)), query.shape[-2], call.key.shape[-2]
    return query.new_zeros(shape).masked_fill_(~mask, -math.inf)
