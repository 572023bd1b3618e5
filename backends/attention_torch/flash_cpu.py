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
    remember,
)
from attention_core.masks import Causal, Mask, SlidingWindow, flatten
from attention_torch.guards import HALVES, all_products_are_finite, looks_afterwards, looks_in_program
from attention_torch.sdpa import (
    kernel_arrays,
    kernel_inputs,
    kernel_mask,
    with_axes_of,
    with_batch_of,
)

__all__ = [
    "FLASH_CPU",
    "FLASH_CPU_BACKWARD",
    "added_to_scores",
    "attend",
    "attend_and_look",
    "attend_to_keys",
    "attend_to_samples",
    "fits",
    "is_clean",
    "with_unit_stride",
]

FLASH_CPU = torch._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
QUERIES_AT_ONCE = 32  # that the kernel computes together, of up to 192
MAX_KEPT, MAX_KEPT_NUMBERS = 4, 2**20  # masks, and numbers of one
_kept: dict[Any, torch.Tensor] = {}


def fits(call: Call) -> bool:
    """Whether the operator gives the output of the function, bit for bit, and the logsumexp of the definition.

    Its logsumexp is not that of the definition in fully masked rows, nor where scores are not finite.
    """
    if looks_afterwards(call) or looks_in_program(call):
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


def attend_to_samples(call: Call, cuts: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (..., H, M, E) and logsumexp (..., H, M) of samples with keys of their own cuts, looked at together.

    Every query has a key, so that the logsumexp of the kernel is that of the definition, where all is finite.
    """
    looks = not call.assume_finite
    query, key, value, scale = kernel_arrays(call)
    rows, is_masked = query.shape[-2], any(cut.mask is not None for cut in cuts)
    is_probed = looks and is_masked and has_probe(rows)
    probed = torch.cat([query, -query[..., :1, :]], dim=-2) if is_probed else query
    queries, samples = call.query.reshape(-1, *call.query.shape[-3:]), []
    for index, (first, stop, mask, starts) in enumerate(cuts):
        at = slice(index, index + 1)
        run = at, slice(None), slice(first, stop)
        if is_top_left_causal(mask):  # for which the kernel has a flag, that does not count a probe
            mask = torch.ones((call.query.shape[-2], stop - first), dtype=torch.bool).tril()
        samples.append(call._replace(query=queries[at], key=key[run], value=value[run], mask=mask, starts=starts))
    masks = _masks_of_samples(samples, query, rows + is_probed)
    results = [
        FLASH_CPU(probed[index : index + 1], sample.key, sample.value, attn_mask=added, scale=scale)
        for index, (sample, added) in enumerate(zip(samples, masks, strict=True))
    ]
    output, sums = map(torch.cat, zip(*results, strict=True))
    total = _total(output, sums) if looks else None
    if total is not None and is_masked and not is_probed:
        total += torch.stack([sample.key.sum() for sample in samples]).sum()
    if is_clean(total):
        output, sums = output[..., :rows, :], sums[..., :rows]
    else:
        output, sums = map(torch.cat, zip(*map(_attend_to_sample, samples), strict=True))
    return with_batch_of(call, output), with_batch_of(call, sums)


def _masks_of_samples(samples: list[Call], query: torch.Tensor, count: int) -> list[torch.Tensor | None]:
    """What is added to the scores of each sample, in so many rows.

    Rules that say the same of keys as counted from the last one are made once, for the longest sample.
    """
    made: dict[Any, torch.Tensor] = {}
    masks: list[torch.Tensor | None] = [None] * len(samples)
    by_length = sorted(range(len(samples)), key=lambda index: -samples[index].key.shape[-2])
    for index in by_length:
        sample, columns = samples[index], samples[index].key.shape[-2]
        if sample.mask is None:
            continue
        rule = _rule_from_end(sample)
        if rule is None or rule not in made:
            made[rule] = _added(sample, query[index : index + 1], count)
        masks[index] = made[rule][..., made[rule].shape[-1] - columns :]
    return masks


def _rule_from_end(call: Call) -> Any:
    """A rule of numbers, as one of keys that are counted from the last; ``None`` for other masks."""
    mask, stop = call.mask, call.starts[1] + call.key.shape[-2]
    if type(mask) is Causal:
        return Causal, mask.offset - stop
    return (SlidingWindow, mask.left, mask.right, mask.offset - stop) if type(mask) is SlidingWindow else None


def _attend_to_sample(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    if call.mask is not None:
        return attend_and_look(call)
    output, sums, total = attend_to_keys(*kernel_arrays(call), None, looks=True)
    if not is_clean(total):
        output, sums = blockwise(call)
    return with_batch_of(call, output).to(call.query.dtype), with_batch_of(call, sums)


def attend_and_look(call: Call, *, logsumexp: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (..., H, M, E) and logsumexp (..., H, M), of blocks if those of the kernel show that something leaked.

    Where nobody asks for the logsumexp, that of fully masked rows may be what the kernel returns.
    """
    query, key, value, scale = kernel_arrays(call)
    is_added_to = call.mask is not None or call.bias is not None
    looks = not call.assume_finite
    added = added_to_scores(call, query, looks=looks) if is_added_to else None
    output, sums, total = attend_to_keys(query, key, value, scale, added, looks=looks)
    output, sums = with_batch_of(call, output), with_batch_of(call, sums)
    if is_clean(total) and (looks or not (is_added_to and logsumexp)):
        return output, sums
    if added is not None and all_products_are_finite(call):
        some = (added[..., : query.shape[-2], :] > -math.inf).any(dim=-1)
        return output, torch.where(with_batch_of(call, some.expand(*query.shape[:-1])), sums, -math.inf)
    blocks = blockwise(call)
    return blocks[0].to(output.dtype) if is_added_to else output, blocks[1]


def attend_to_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    added: torch.Tensor | None,
    *,
    looks: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Output and logsumexp of the kernel, and a number that is finite only if nothing leaked, unless nobody looks.

    The kernel multiplies all keys and values by some number. So nothing leaks into a finite output, but for two cases:

    * Scores of -inf vanish. A probe, the first query times -1, makes inf of them, and then NaN. Where one query more
      would cost as much as `QUERIES_AT_ONCE`, the sum of the keys shows the same.
    * The kernel takes a row whose scores are NaN, or -inf, for a fully masked one, and returns 0 as its logsumexp.
    """
    rows = query.shape[-2]
    is_probed = looks and added is not None and has_probe(rows)
    if is_probed:
        query = torch.cat([query, -query[..., :1, :]], dim=-2)
    output, logsumexp = FLASH_CPU(query, key, value, attn_mask=added, scale=scale)
    if not looks:
        return output, logsumexp, None
    total = _total(output, logsumexp)
    if is_probed:
        return output[..., :rows, :], logsumexp[..., :rows], total
    return output, logsumexp, total if added is None else total + key.sum()


def has_probe(rows: int) -> bool:
    """Whether one query more takes little time."""
    return rows % QUERIES_AT_ONCE != 0


def _total(output: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """A sum that is finite only if results of the kernel are of finite numbers alone, and no logsumexp is 0."""
    return output.sum() + (logsumexp + logsumexp.reciprocal()).sum()


def is_clean(total: torch.Tensor | None) -> bool:
    """Whether nothing leaked, or nobody is to look."""
    return total is None or math.isfinite(total.item())


def added_to_scores(call: Call, query: torch.Tensor, *, looks: bool) -> torch.Tensor:
    """What is added to the scores of a query of `kernel_arrays`: bias and mask, and nothing in the row of a probe.

    What a rule of numbers adds is the same in all layers of a model, and kept for the next of them.
    """
    rows, columns = query.shape[-2], call.key.shape[-2]
    is_probed = looks and has_probe(rows)
    is_rule_of_numbers = call.bias is None and isinstance(call.mask, Mask) and call.mask.is_relative()
    if not is_rule_of_numbers or torch.compiler.is_compiling():
        return _added(call, query, rows + is_probed)
    key = flatten(call.mask, []), call.query.shape[-2], rows, columns, is_probed, call.starts, query.dtype
    kept = _kept.get(key)
    if kept is None:
        with torch.inference_mode(False):
            kept = _added(call, query, rows + is_probed)
        if kept.numel() <= MAX_KEPT_NUMBERS:
            remember(_kept, key, kept, most=MAX_KEPT)
    return kept


def _added(call: Call, query: torch.Tensor, count: int) -> torch.Tensor:
    """What is added to scores, in an array of so many rows."""
    rows, columns = query.shape[-2], call.key.shape[-2]
    added: Any = None
    for part in masked_columns(call):
        starts = call.starts[0], call.starts[1] + part.start
        _, mask = kernel_mask(call._replace(key=call.key[..., part, :], starts=starts))
        mask = with_axes_of(query, call, mask)
        assert mask is not None
        if added is None:
            added = query.new_zeros((*(mask.shape[:-2] if mask.dim() == 4 else (1, 1)), count, columns))
        if mask.dtype == torch.bool:
            added[..., :rows, part].masked_fill_(~mask, -math.inf)
        else:
            added[..., :rows, part].copy_(mask)
    return query.new_zeros((1, 1, count, columns)) if added is None else added


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
