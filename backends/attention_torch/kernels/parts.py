"""A call of PyTorch's kernel for CPUs as its parts: all samples, or each with the keys that a mask leaves for it."""

from __future__ import annotations

import math

import torch

from attention_core.backend import Call, KeyCut, bounds_of, find_cut, sample_cuts, with_cut
from attention_core.masks import Mask
from attention_torch.kernels import guards, sdpa

CALLS_OF_A_MASK = 8  # which take as long as it takes to make one
MIN_ELEMENTS = 2**16  # of a sample of a batch, from which on a call of its own takes less time than a mask


def parts_of(call: Call, cuts: list[KeyCut]) -> list[Call]:
    """The calls of the kernel, each with its keys."""
    if len(cuts) == 1:
        return [with_cut(call, cuts[0])]
    samples = zip(*(x.reshape(-1, *x.shape[-3:]).chunk(len(cuts)) for x in call[:3]), cuts, strict=True)
    return [with_cut(call._replace(query=query, key=key, value=value), cut) for query, key, value, cut in samples]


def cuts_of(call: Call) -> list[KeyCut] | None:
    """The keys of all samples, or of each, and the mask that is left for them; ``None`` if that is left to blocks."""
    if isinstance(call.mask, Mask) and not guards.fits_mask(call):
        return None
    whole = KeyCut(0, call.key.shape[-2], call.mask, call.starts)
    if call.bias is not None or not guards.is_rule_without_flag(call.mask):
        return [whole]
    cuts = sample_cuts(call)
    if cuts is not None and len({cut._replace(mask=bounds_of(cut.mask)) for cut in cuts}) == 1:
        return cuts[:1]
    calls_more = math.prod(call.query.shape[:-3]) - CALLS_OF_A_MASK
    is_fast = call.key.numel() >= MIN_ELEMENTS * calls_more or not guards.fits_as_array(call)
    return cuts if cuts is not None and is_fast else [find_cut(call) or whole]


def joined(arrays: list[torch.Tensor]) -> torch.Tensor:
    """Outputs, logsumexps or gradients of all parts."""
    return arrays[0] if len(arrays) == 1 else torch.cat(arrays)


def inputs_of(call: Call) -> sdpa.Inputs:
    """What the kernel is given of a part, whose mask it adds to scores."""
    inputs = sdpa.inputs_of(call)
    (query, key, _), mask, _ = inputs
    if mask is None or call.bias is not None:
        return inputs
    shape = *(mask.shape[:-2] if mask.dim() == 4 else (1, 1)), query.shape[-2], key.shape[-2]
    return inputs._replace(mask=query.new_zeros(shape).masked_fill_(~mask, -math.inf))
