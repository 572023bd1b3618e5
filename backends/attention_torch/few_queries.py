"""PyTorch's kernel for few queries on a CPU, such as a step of decoding, without a verdict on each call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Real

import torch

from attention_core.backend import (
    Attention,
    Call,
    cut_keys,
    default_scale,
    find_cut,
    once_per_lengths,
    sample_cuts,
    with_cut,
    with_sinks,
)
from attention_torch.flash_cpu import added_to_scores, attend_to_keys, attend_to_samples, is_clean
from attention_torch.guards import (
    TYPES,
    VECTOR_LANES,
    few_queries,
    has_modes,
    may_look_afterwards,
    ranges_apart,
    refusal,
    slower,
    takes_flash_cpu,
)
from attention_torch.sdpa import TAKES_GROUPS

__all__ = ["plan"]

# In quotes: the documentation is built without PyTorch, and what stands for its types cannot be joined.
OutputOf = Callable[[Call], "torch.Tensor | None"]


def plan(call: Call) -> OutputOf | None:
    """The output of the kernel as a function of calls of these types, lengths and options; ``None`` for most of them.

    Numbers of a mask are those of the signature. Arrays of lengths are read in every call.
    """
    arrays = call.query, call.key, call.value
    if not all(type(x) in TYPES and x.dim() == 4 for x in arrays) or not may_look_afterwards(call):
        return None
    if call.softcap is not None or not (call.scale is None or isinstance(call.scale, Real)) or not TAKES_GROUPS:
        return None
    factor = default_scale(call.query, call.xp) if call.scale is None else float(call.scale)
    of_numbers = functools.partial(_plan_of_numbers, factor=factor)
    if call.mask is None or call.mask.is_relative():
        planned = of_numbers(call)
    else:
        planned = once_per_lengths(call, of_numbers, functools.partial(_plan_of_samples, factor=factor))
    if planned is None:
        return None

    def output(call: Call) -> torch.Tensor | None:
        return None if has_modes() or not takes_flash_cpu(call) else planned(call)

    return output


def _plan_of_numbers(call: Call, factor: float) -> OutputOf | None:
    """The output under a mask of numbers, or none, which say what keys are left."""
    cut = None if call.mask is None else find_cut(call)
    return (lambda call: _attend(with_cut(call, cut), factor)) if _is_answered(with_cut(call, cut)) else None


def _plan_of_samples(call: Call, factor: float) -> OutputOf | None:
    """The output of a ragged batch: of samples apart, or under an array."""
    cut = find_cut(call)
    call = with_cut(call, cut)
    ranges = ranges_apart(call)
    if ranges is None:
        return (lambda call: _attend(cut_keys(call), factor)) if _is_answered(call) else None
    cuts = sample_cuts(call, ranges)
    of_all = None if cut is None else cut._replace(mask=None)  # a plan holds no lengths, and samples have their own
    return lambda call: _with_sinks(call, *attend_to_samples(with_cut(call, of_all), cuts))


def _is_answered(call: Call) -> bool:
    """Whether the kernel answers a call whose keys are cut, of few queries next to these."""
    if call.key.shape[-2] < VECTOR_LANES or not may_look_afterwards(call):
        return False
    with torch.no_grad():
        return call.mask is None or (slower(call) is None and refusal(call) is None)


def _attend(call: Call, factor: float) -> torch.Tensor | None:
    """The output of the kernel, or ``None`` if something leaked."""
    query, key, value = call[:3]
    dims, num_kv_heads = query.shape, key.shape[-3]
    is_folded = dims[-3] != num_kv_heads and few_queries(call)
    if is_folded:  # as `fold_group` does
        query = query.reshape(*dims[:-3], num_kv_heads, -1, dims[-1])
    query = query * _as_tensor(factor, query.dtype)
    is_masked = call.mask is not None
    if call.assume_finite and is_masked and call.sinks is not None:  # the kernel's logsumexp may be of no key
        return None
    looks = (is_masked or call.sinks is not None) and not call.assume_finite
    added = added_to_scores(call, query, looks=looks) if is_masked else None
    output, logsumexp, total = attend_to_keys(query, key, value, 1.0, added, looks=looks)
    if not is_clean(total):
        return None
    if is_folded:
        output = output.reshape(dims)
    return _with_sinks(call, output, logsumexp)


@functools.lru_cache(maxsize=64)
def _as_tensor(number: float, dtype: torch.dtype) -> torch.Tensor:
    """A number, which PyTorch multiplies by in half the time; kept, also for calls that autograd records."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype, device="cpu")


def _with_sinks(call: Call, output: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    if call.sinks is None:
        return output
    return with_sinks(Attention(output, None, logsumexp.reshape(output.shape[:-1])), call).output
