"""PyTorch's kernel for small calls on a CPU, which take less time than the verdict on one of them."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch

from attention_core.backend import Call, default_scale, is_top_left_causal
from attention_torch.guards import HALVES, MIN_ELEMENTS, TYPES, few_queries, has_modes, is_on_host
from attention_torch.magnitudes import norms_are_below
from attention_torch.sdpa import KERNEL, TAKES_GROUPS, differentiated_once

__all__ = ["plan"]


def plan(call: Call) -> Callable[[Call], torch.Tensor | None] | None:
    """The output of the kernel as a function of calls of these types, lengths and options; ``None`` for most of them.

    The kernel gives the answer to them wherever norms are small. Then nothing that is masked leaks, no NaN among few
    keys is lost, and no score overflows before it is scaled.
    """
    query, key, value = arrays = call.query, call.key, call.value
    scale: Any = default_scale(query, call.xp) if call.scale is None else call.scale
    fits = (
        all(type(x) in TYPES and is_on_host(x) and x.dim() == 4 and x.numel() < MIN_ELEMENTS for x in arrays)
        and query.dtype not in HALVES
        and query.shape[-1] == value.shape[-1]
        and 2 * query.numel() > key.numel()
        and not few_queries(call)
        and call.softcap is None
        and call.sinks is None
        and isinstance(scale, Real)
        and float(scale) > 0
        and (call.mask is None or (is_top_left_causal(call.mask) and query.shape[-2] == key.shape[-2]))
    )
    has_groups = query.shape[-3] != key.shape[-3]
    if not fits or (has_groups and not TAKES_GROUPS):
        return None
    largest, factor, is_causal = float(torch.finfo(query.dtype).max), float(scale), call.mask is not None

    def output(call: Call) -> torch.Tensor | None:
        query, key, value = call[:3]
        if not is_on_host(query) or has_modes():
            return None
        if not call.assume_finite and not norms_are_below(largest, call, call[:3]):
            return None
        return differentiated_once(KERNEL(query, key, value, is_causal=is_causal, scale=factor, enable_gqa=has_groups))

    return output
