"""PyTorch's kernel for calls that take less time than the verdict on one: small ones, and those of an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch

from attention_core.backend import Call, default_scale, is_top_left_causal
from attention_torch.guards import (
    HALVES,
    MIN_ELEMENTS,
    TYPES,
    few_queries,
    has_modes,
    is_on_accelerator,
    is_on_host,
)
from attention_torch.magnitudes import norms_are_below
from attention_torch.sdpa import KERNEL, TAKES_GROUPS, differentiated_once, run_kernel, scaled_query

__all__ = ["plan"]


def plan(call: Call) -> Callable[[Call], torch.Tensor | None] | None:
    """The output of the kernel as a function of calls of these types, lengths and options; ``None`` for most of them.

    The kernel gives the answer to them wherever norms are small. Then nothing that is masked leaks, no NaN among few
    keys is lost, and no score overflows before it is scaled.
    """
    query, key, value = arrays = call.query, call.key, call.value
    scale: Any = default_scale(query, call.xp) if call.scale is None else call.scale
    is_plain = (
        all(type(x) in TYPES and x.dim() == 4 and 0 not in x.shape for x in arrays)
        and query.shape[-1] == value.shape[-1]
        and call.softcap is None
        and call.sinks is None
        and isinstance(scale, Real)
        and float(scale) > 0
        and (call.mask is None or (is_top_left_causal(call.mask) and query.shape[-2] == key.shape[-2]))
    )
    has_groups = query.shape[-3] != key.shape[-3]
    if is_plain and is_on_accelerator(query):
        return _on_accelerator(is_causal=call.mask is not None) if not has_groups or query.dtype in HALVES else None
    fits = (
        is_plain
        and all(is_on_host(x) and x.numel() < MIN_ELEMENTS for x in arrays)
        and query.dtype not in HALVES
        and 2 * query.numel() > key.numel()
        and not few_queries(call)
    )
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


def _on_accelerator(*, is_causal: bool) -> Callable[[Call], torch.Tensor | None]:
    """The output where the kernel has a flag for the mask, so that nothing is hidden from all queries."""

    def output(call: Call) -> torch.Tensor | None:
        if not is_on_accelerator(call.query) or has_modes() or (is_causal and call.assume_finite is False):
            return None
        query, factor = scaled_query(call)
        return run_kernel(query, call.key, call.value, is_causal=is_causal, scale=factor)

    return output
