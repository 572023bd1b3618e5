"""PyTorch's kernel for CPUs by its operator, which returns the logsumexp as well."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from attention_core.backend import (
    Backend,
    Call,
    Operation,
    blockwise,
    is_concrete,
    is_top_left_causal,
    masked_columns,
    register,
)
from attention_torch.guards import HALVES, all_products_are_finite, looks_afterwards
from attention_torch.sdpa import kernel_arrays, kernel_inputs, kernel_mask, with_axes_of, with_batch_of

__all__ = ["FLASH_CPU", "FLASH_CPU_BACKWARD", "attend", "attend_and_look", "attend_to_run", "fits", "with_unit_stride"]

FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fits(call: Call) -> bool:
    """Whether the operator gives the output of the function, bit for bit, and the logsumexp of the definition.

    Its logsumexp is not that of the definition in fully masked rows, nor where scores are not finite.
    """
    if looks_afterwards(call):
        return True
    arrays = call.query, call.key, call.value
    if call.query.device.type != "cpu" or call.query.dtype in HALVES or call.query.shape[-1] != call.value.shape[-1]:
        return False
    if not all(map(is_concrete, arrays)) or any(0 in array.shape for array in arrays) or call.bias is not None:
        return False
    if any(array.stride(-1) != 1 for array in arrays):  # for which the function takes another way
        return False
    if torch.is_autocast_enabled("cpu") or not torch.backends.cuda.flash_sdp_enabled():
        return False
    with torch.no_grad():
        return (call.mask is None or is_top_left_causal(call.mask)) and all_products_are_finite(call)


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (..., H, M, E) and logsumexp (..., H, M)."""
    query, key, value, _, is_causal, scale = kernel_inputs(call)
    results = call.backend.custom_gradient(FLASH, FlashPlan(is_causal, scale), (query, key, value))
    return with_batch_of(call, results[0]), with_batch_of(call, results[1])


def attend_to_run(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `attend_and_look` for the run of keys that a mask has left."""
    return attend_and_look(call, is_masked=True)


def attend_and_look(
    call: Call, *, is_masked: bool = False, logsumexp: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (..., H, M, E) and logsumexp (..., H, M), of blocks if those of the kernel show that something leaked.

    The kernel multiplies all keys and values by some number. So nothing leaks into a finite output, but for two cases:

    * Scores of -inf vanish. A probe, the first query times -1, makes inf of them, and then NaN.
    * The kernel takes a row whose scores are NaN, or -inf, for a fully masked one, and returns 0 as its logsumexp.

    Where nobody asks for the logsumexp, that of fully masked rows may be what the kernel returns.
    """
    query, key, value, scale = kernel_arrays(call)
    rows = query.shape[-2]
    is_added_to = call.mask is not None or call.bias is not None
    if is_added_to and not call.assume_finite:
        query = torch.cat([query, -query[..., :1, :]], dim=-2)
    added = _added(call, query, rows) if is_added_to else None
    results = FLASH_CPU(query, key, value, 0.0, False, attn_mask=added, scale=scale)
    is_clean = not (is_added_to and logsumexp) if call.assume_finite else _is_clean(*results)
    output, sums = (with_batch_of(call, x) for x in (results[0][..., :rows, :], results[1][..., :rows]))
    if is_clean:
        return output, sums
    if added is not None and all_products_are_finite(call):
        some = (added[..., :rows, :] > -math.inf).any(dim=-1).expand(results[1][..., :rows].shape)
        return output, torch.where(with_batch_of(call, some), sums, -math.inf)
    blocks = blockwise(call)
    return blocks[0].to(output.dtype) if is_masked or is_added_to else output, blocks[1]


def _is_clean(output: torch.Tensor, logsumexp: torch.Tensor) -> bool:
    """Whether results of the kernel are of finite numbers alone, and no logsumexp is 0: no sum is then finite."""
    return math.isfinite((output.sum() + (logsumexp + logsumexp.reciprocal()).sum()).item())


def _added(call: Call, query: torch.Tensor, rows: int) -> torch.Tensor:
    """What is added to the scores of a query: bias and mask; nothing in rows beyond those of the call."""
    *_, columns, _ = call.key.shape
    added: Any = None
    for part in masked_columns(call):
        starts = call.starts[0], call.starts[1] + part.start
        _, mask = kernel_mask(call._replace(key=call.key[..., part, :], starts=starts))
        mask = with_axes_of(query, call, mask)
        assert mask is not None
        if added is None:
            added = query.new_zeros((*(mask.shape[:-2] if mask.dim() == 4 else (1, 1)), query.shape[-2], columns))
        if mask.dtype == torch.bool:
            added[..., :rows, part].masked_fill_(~mask, -math.inf)
        else:
            added[..., :rows, part].copy_(mask)
    return query.new_zeros((1, 1, query.shape[-2], columns)) if added is None else added


def with_unit_stride(array: torch.Tensor) -> torch.Tensor:
    """What the kernel can read: vectors in one piece."""
    return array if array.stride(-1) == 1 else array.contiguous()


class FlashPlan(NamedTuple):
    """What is known of a call besides its arrays."""

    is_causal: bool
    scale: float


def _forward(plan: FlashPlan, arrays: tuple[torch.Tensor, ...], backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    output, logsumexp = FLASH_CPU(*map(with_unit_stride, arrays), 0.0, plan.is_causal, scale=plan.scale)
    return output, logsumexp


def _backward(
    plan: FlashPlan,
    arrays: tuple[torch.Tensor, ...],
    results: tuple[torch.Tensor, ...],
    cotangents: tuple[torch.Tensor, ...],
    backend: Backend,
) -> tuple[torch.Tensor, ...]:
    """Gradients by the kernel, which knows no gradient of the logsumexp.

    That one adds to the gradient of the scores: P (dP - delta + d_logsumexp). The kernel sums delta from dO and O. So
    one more channel, 1 in dO and -d_logsumexp in O, subtracts it from delta. It is 0 in all other arrays.
    """
    output, logsumexp = results
    d_output, d_logsumexp = cotangents
    padded = [
        torch.nn.functional.pad(d_output, (0, 1), value=1.0),
        *(torch.nn.functional.pad(array, (0, 1)) for array in arrays),
        torch.cat([output, -d_logsumexp.unsqueeze(-1)], dim=-1),
    ]
    gradients = FLASH_CPU_BACKWARD(*padded, logsumexp, 0.0, plan.is_causal, scale=plan.scale)
    return tuple(gradient[..., :-1] for gradient in gradients)


def _empty(plan: FlashPlan, arrays: tuple[Any, ...], backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    query = arrays[0]
    return torch.empty_like(query), query.new_empty(query.shape[:-1])


FLASH = register("torch.flash_cpu", Operation(_forward, _backward, _empty))
