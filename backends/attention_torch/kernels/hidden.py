"""Keys and values that nobody attends to, cleared without a look at what they hold: line 5 on an accelerator."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from attention_core.backend import Call, group_size, key_ranges
from attention_core.masks import Given, Mask, Spans


def with_hidden_cleared(call: Call) -> Call:
    """The call with zeros for keys and values that its mask, or its bias, hides from all queries of their sample.

    These are padding, and the unused part of a cache. Of a rule, ends of blocks tell: one block of all queries.
    """
    masks = [call.mask, None if call.bias is None else call.bias != -math.inf]
    attended = [_attended_by(mask, call) for mask in masks if mask is not None]
    kept = [_of_groups(each, call) for each in attended if isinstance(each, torch.Tensor)]
    if not kept:
        return call
    key, value = (torch.where(functools.reduce(torch.logical_and, kept), x, 0.0) for x in (call.key, call.value))
    return call._replace(key=key, value=value)


def _attended_by(mask: Any, call: Call) -> Any:
    """Which keys some query may attend to, (..., H or 1, 1, N), or a boolean for all."""
    if isinstance(mask, Given):
        mask = mask.mask
    if isinstance(mask, torch.Tensor):
        return mask.any(dim=-2, keepdim=True) if mask.dim() > 1 else mask
    rows, columns = call.query.shape[-2], call.key.shape[-2]
    band = mask.bounds()
    if type(mask).blocks is Mask.blocks and band.ends == (None, None) and not band.has_stop:
        return True
    ranges = key_ranges(call._replace(mask=mask)) if band.is_relative else None
    if ranges is not None and all(each.first <= 0 and each.stop >= columns for each in ranges):
        return True
    start, device = call.starts[0], call.query.device
    first = torch.arange(1, dtype=torch.int32, device=device)[:, None] + start
    at = torch.arange(columns, dtype=torch.int32, device=device) + call.starts[1]
    some, _ = mask.blocks(Spans(first, first + (rows - 1), rows), Spans(at, at, 1), xp=call.xp)
    return some


def _of_groups(attended: torch.Tensor, call: Call) -> torch.Tensor:
    """Which keys (..., G or 1, N, 1) some head of those that share them attends to, from (..., H or 1, 1, N)."""
    attended = (attended if attended.dim() > 1 else attended.reshape(1, -1)).transpose(-2, -1)
    group = group_size(call.query, call.key, call.xp)
    if attended.dim() < 3 or attended.shape[-3] == 1 or group == 1:
        return attended
    return attended.unflatten(-3, (-1, group)).any(dim=-3)
