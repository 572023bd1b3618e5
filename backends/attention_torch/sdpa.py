"""One call of PyTorch's `scaled_dot_product_attention`, from a call that `guards` let through."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_core.backend import Call, default_scale, group_size, is_top_left_causal, repeat_kv, score_positions
from attention_core.masks import Given, KeyLengths
from attention_torch.guards import causal_part, may_leak, scores_are_finite

__all__ = ["attend", "attend_per_length"]

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Inputs(NamedTuple):
    """What the kernel is given: arrays (B, H, M or N, D) with all heads, its mask, and its two options."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    scale: float


def attend(call: Call) -> torch.Tensor:
    """The output of the kernel (..., H, M, E)."""
    query, key, value, mask, is_causal, scale = kernel_inputs(call)
    # cuDNN gives nan gradients with a mask and some lengths (pytorch#196678).
    choice = sdpa_kernel(WITHOUT_CUDNN) if mask is not None and query.is_cuda else contextlib.nullcontext()
    with choice:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale
        )
    return with_batch_of(call, output)


def attend_per_length(call: Call, attend: Callable[[Call], torch.Tensor]) -> torch.Tensor:
    """The output of a function of calls for each of the batch apart, with as many keys as its length says."""
    causal, lengths = causal_part(call.mask)
    query, key, value = (array.reshape(-1, *array.shape[-3:]) for array in (call.query, call.key, call.value))
    outputs = [
        attend(
            call._replace(
                query=query[index : index + 1],
                key=key[index : index + 1, :, :length],
                value=value[index : index + 1, :, :length],
                mask=causal,
            )
        )
        for index, length in enumerate(_lengths(call, lengths))
    ]
    return torch.cat(outputs).reshape(*call.query.shape[:-1], call.value.shape[-1])


def _lengths(call: Call, mask: KeyLengths) -> list[int]:
    """How many keys each of the batch has."""
    lengths: Any = mask.lengths
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.expand(call.query.shape[:-3]).reshape(-1).tolist()
    else:
        lengths = [lengths] * math.prod(call.query.shape[:-3])
    return [min(length, call.key.shape[-2]) for length in lengths]


def kernel_inputs(call: Call) -> Inputs:
    """A call as the kernel takes it, with one axis for the batch."""
    query, scale = _scaled(call)
    times = group_size(query, call.key, call.xp)
    key, value = (repeat_kv(x, times, xp=call.xp) for x in (call.key, call.value))
    is_causal, mask = _mask(call)
    *leading, _, _, _ = query.shape
    if len(leading) != 1:
        batch = math.prod(leading)
        query, key, value = (x.reshape(batch, *x.shape[-3:]) for x in (query, key, value))
        if mask is not None:
            mask = mask.expand(*leading, *(mask.shape[-3:] if mask.dim() > 2 else (1, *mask.shape)))
            mask = mask.reshape(batch, *mask.shape[-3:])
    return Inputs(query=query, key=key, value=value, mask=mask, is_causal=is_causal, scale=scale)


def with_batch_of(call: Call, array: torch.Tensor) -> torch.Tensor:
    """An array (B, H, ...) with the leading axes of the call."""
    leading = call.query.shape[:-3]
    return array if len(leading) == 1 else array.reshape(*leading, *array.shape[1:])


def _scaled(call: Call) -> tuple[torch.Tensor, float]:
    """The query, and the scale that is left to the kernel.

    The query is multiplied where scores that fit might overflow on the way. The kernel multiplies what it has masked
    with -inf already, so that it gets no scale but a positive one.
    """
    scale: Any = default_scale(call.query, call.xp) if call.scale is None else call.scale
    if isinstance(scale, torch.Tensor):
        return call.query * scale.to(call.query.dtype), 1.0
    if scale > 0 and (may_leak(call) or scores_are_finite(call)):  # what may leak gets here only if all is finite
        return call.query, float(scale)
    return call.query * (scale if call.scale is None else float(scale)), 1.0  # of a Fraction, too


def _mask(call: Call) -> tuple[bool, torch.Tensor | None]:
    """Whether the kernel is to be causal, and its mask: boolean, or a bias."""
    mask: Any = call.mask
    bias = call.bias
    is_causal = is_top_left_causal(mask)
    if is_causal and bias is None:
        return True, None
    if is_causal:
        rows, columns = call.query.shape[-2], call.key.shape[-2]
        mask = torch.ones((rows, columns), dtype=torch.bool, device=call.query.device).tril()
    elif isinstance(mask, Given):
        mask = mask.mask
    elif isinstance(mask, KeyLengths):
        mask = mask.allowed(score_positions(call.query, call.key, call.starts, call.xp), xp=call.xp)
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -math.inf)
    return False, mask if mask is None or mask.dim() > 1 else mask.reshape(1, -1)
