"""PyTorch's kernel for few queries on a CPU, such as a step of decoding, without a verdict on each call."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch

from attention_core.backend import Call, cut_keys, default_scale, find_cut, with_cut
from attention_core.masks import flatten
from attention_torch.flash_cpu import added_to_scores, attend_and_look, attend_to_keys, attend_to_runs, is_clean
from attention_torch.guards import (
    VECTOR_LANES,
    few_queries,
    is_taken_apart,
    may_look_afterwards,
    refusal,
    slower,
    takes_flash_cpu,
)
from attention_torch.sdpa import TAKES_GROUPS
from attention_torch.small_calls import TYPES, has_modes

__all__ = ["plan"]

OutputOf = Callable[[Call], torch.Tensor | None]


def plan(call: Call) -> OutputOf | None:
    """The output of the kernel as a function of calls of these types, lengths and options; ``None`` for most of them.

    Numbers of a mask are those of the signature. Arrays of lengths are read in every call.
    """
    arrays = call.query, call.key, call.value
    if not all(type(x) in TYPES and x.dim() == 4 for x in arrays) or not may_look_afterwards(call):
        return None
    if call.softcap is not None or not (call.scale is None or isinstance(call.scale, Real)) or not TAKES_GROUPS:
        return None
    lengths: list[Any] = []
    flatten(call.mask, lengths)
    return _output_by_lengths if lengths else _plan_of_numbers(call)


def _is_judged(call: Call) -> bool:
    """Whether a call, whose keys are cut, is one that the kernel answers as a plan does."""
    if call.key.shape[-2] < VECTOR_LANES or not may_look_afterwards(call):
        return False
    with torch.no_grad():
        return slower(call) is None and refusal(call) is None


def _output_by_lengths(call: Call) -> torch.Tensor | None:
    """The output under a mask whose lengths are read."""
    if has_modes() or not takes_flash_cpu(call):
        return None
    call = cut_keys(call)
    if not _is_judged(call):
        return None
    if call.mask is None:
        output = _plan_of_numbers(call)
        return None if output is None else output(call)
    return attend_to_runs(call)[0] if is_taken_apart(call) else attend_and_look(call, logsumexp=False)[0]


def _plan_of_numbers(call: Call) -> OutputOf | None:
    """The output under a mask of numbers, or none: the keys that are left, and what is added to scores, are known."""
    cut = None if call.mask is None else find_cut(call)
    call = with_cut(call, cut)
    if not _is_judged(call):
        return None
    dims, num_kv_heads = call.query.shape, call.key.shape[-3]
    factor = default_scale(call.query, call.xp) if call.scale is None else float(call.scale)
    is_folded = dims[-3] != num_kv_heads and few_queries(call)
    folded = (*dims[:-3], num_kv_heads, -1, dims[-1])  # as `fold_group` does
    is_masked = call.mask is not None

    def output(call: Call) -> torch.Tensor | None:
        if has_modes() or not takes_flash_cpu(call):
            return None
        query, key, value = (call := with_cut(call, cut))[:3]
        query = query.reshape(folded) * factor if is_folded else query * factor
        looks = is_masked and not call.assume_finite
        added = added_to_scores(call, query, looks=looks) if is_masked else None
        found, _, total = attend_to_keys(query, key, value, 1.0, added, looks=looks)
        if not is_clean(total):
            return None
        return found.reshape(dims) if is_folded else found

    return output
