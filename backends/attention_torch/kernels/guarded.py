"""PyTorch's kernel for CPUs, which is looked at: what is masked may leak through it, and scores may overflow in it.

It multiplies all keys and values by some number, so that its results show what leaks, and blocks repair that. Where a
gradient is recorded under a mask, norms of query, key and value are looked at first. If they show that nothing leaks or
overflows, the kernel runs with its own gradient. A compiler cannot look: its programs hold one operation, which looks
when it runs, and at gradients, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch

from attention_core.backend import (
    Backend,
    Call,
    KeyCut,
    Operation,
    blockwise,
    bounds_of,
    cast_to,
    group_size,
    is_top_left_causal,
    pack,
    register,
    repeat_kv,
    unpack,
)
from attention_torch import modes
from attention_torch.kernels import guards, sdpa
from attention_torch.kernels.parts import cuts_of, inputs_of, joined, parts_of
from attention_torch.kernels.sdpa import Inputs, Scale

MIN_ROWS = 64  # from which on norms take less time than to scale queries in new memory, and to look at outputs
MAX_ADDED = 2**14  # numbers of a mask that is kept with a plan, and of keys that are read whole next to it
FLASH_CPU = torch._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
padded = torch.nn.functional.pad


class Facts(NamedTuple):
    """What is known of a call for a host before anything is computed, and of all others of its signature."""

    is_alone: bool  # whether nothing but autograd looks at what is called
    cuts: list[KeyCut] | None = None  # the keys of all samples, or of each; None if they are read in each call
    scale: Scale | None = None  # of a call that the kernel takes as it is; its factor is a tensor: half the time
    is_causal: bool = False  # whether that takes its mask as a flag
    added: torch.Tensor | None = None  # to its scores, by a rule that is no flag


def facts_of(call: Call) -> Facts:
    """What is known of a call, without an array of its own."""
    is_plain = all(type(x) in modes.TYPES for x in call[:3])
    is_alone = is_plain and not (torch.compiler.is_compiling() or modes.has_modes())
    if not is_alone:
        return Facts(is_alone)
    cuts = cuts_of(call)
    has_arrays = any(not bounds_of(cut.mask).is_relative for cut in cuts or ())
    facts = Facts(is_alone, None if has_arrays else cuts)
    query, key = call[:2]
    is_causal = is_top_left_causal(call.mask) and guards.counts_from_0(call.starts)
    needs_array = call.mask is not None and not is_causal
    numbers = max(math.prod(query.shape[:-3]) * query.shape[-2] * key.shape[-2], key.numel())
    if needs_array and (cuts is None or numbers > MAX_ADDED or not guards.is_rule_without_flag(call.mask)):
        return facts
    is_number = call.scale is None or isinstance(call.scale, Real)
    is_folded = query.shape[-3] != key.shape[-3] and guards.few_queries(call)
    if is_folded or not is_number or call.bias is not None or query.dim() != 4 or not sdpa.TAKES_GROUPS:
        return facts
    scale = sdpa.scale_of(call)
    with torch.inference_mode(False):
        added = inputs_of(call).mask if needs_array else None
        factor = None if scale.factor is None else torch.tensor(scale.factor, dtype=query.dtype, device="cpu")
    return facts._replace(scale=scale._replace(factor=factor), is_causal=is_causal, added=added)


class GuardedPlan(NamedTuple):
    """What is known of a call besides its arrays."""

    call: Call  # tree definitions of its fields
    logsumexp: bool  # whether the logsumexp is asked for, and has a gradient
    records: bool  # whether autograd does: then query, key, value and gradients have their rows before their heads
    outer: int  # the axis of rows or heads that is the outer one in memory


def run(call: Call, facts: Facts, *, logsumexp: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output (..., H, M, E) and logsumexp (..., H, M), which may be ``None`` if it is not asked for."""
    by_operation = not facts.is_alone or (logsumexp and guards.records(call))
    if facts.scale is not None and not by_operation:
        arrays = tuple([sdpa.with_unit_stride(x) for x in call[:3]])
        found = _guarded_kernel(call, Inputs(arrays, facts.added, facts.is_causal), facts.scale, logsumexp=logsumexp)
        if found is not None:
            return found
    is_direct = not (logsumexp or facts.is_alone or guards.is_rule_without_flag(call.mask))
    if is_direct and not guards.may_leak(call):
        return sdpa.kernel_output(call), None
    call = _with_mask_in_bias(call)
    if not sdpa.TAKES_GROUPS:
        group = group_size(call.query, call.key, call.xp)
        key, value = (repeat_kv(array, group, xp=call.xp) for array in (call.key, call.value))
        call = call._replace(key=key, value=value)
    if by_operation:
        return _recorded(call, logsumexp=logsumexp)
    return _by_kernel_or_blocks(_shifted(call) if guards.records(call) else call, facts.cuts, logsumexp=logsumexp)


def _guarded_kernel(
    call: Call, inputs: Inputs, scale: Scale, *, logsumexp: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Output and logsumexp of the kernel; ``None`` if something may leak into gradients, or has leaked.

    The kernel takes a row whose scores are NaN, among few keys or behind -inf, or -inf by overflow, for a fully masked
    one: 0, and 0 as its logsumexp. Norms tell it from these, and that no product overflows before it is scaled.
    """
    (query, key, value), added, is_causal = inputs
    looks, is_masked = not call.assume_finite, is_causal or added is not None
    records = guards.records(call)
    looks_first = looks and ((is_masked and records) or query.shape[-2] >= MIN_ROWS)
    if looks_first and not _are_small(call, inputs, scale):
        return None
    is_whole = looks_first and scale.number > 0.0  # as no product overflows before it is scaled
    query = query if is_whole or scale.factor is None else query * scale.factor
    number = scale.number if is_whole else scale.left
    output, rows = FLASH_CPU(query, key, value, 0.0, is_causal, attn_mask=added, scale=number)
    if looks and not looks_first:
        is_seen = not (is_masked or records) or _is_finite(output)  # if all is attended to, nothing leaks
        if not (is_seen and (rows.count_nonzero().item() == rows.numel() or _are_small(call, inputs, scale))):
            return None
    if logsumexp and added is not None:  # of fully masked rows it is 0
        has_keys = (added > -math.inf).any(dim=-1)
        rows = torch.where(has_keys.expand(rows.shape), rows, -math.inf)
    return sdpa.differentiated_again(output), rows


def _is_finite(output: torch.Tensor) -> bool:
    """Whether all numbers are; a sum of float16 would overflow."""
    total = output.detach().sum(dtype=torch.float32) if output.dtype == torch.float16 else output.detach().sum()
    return math.isfinite(total.item())


def _are_small(call: Call, inputs: Inputs, scale: Scale) -> bool:
    """Whether norms show that no score is NaN or overflows, even unscaled, and no product with values does."""
    is_number = call.bias is None or (inputs.mask is not None and inputs.mask.amax().item() < math.inf)
    return is_number and guards.norms_are_small(inputs.arrays, scale.number)


def attend_to_piece(call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Output and logsumexp, if these are those of the kernel, and lose no digits where they are merged with others."""
    found = _by_kernel(call)
    return None if found is None or _is_rounded(found[1]) else found


def piece_gradients(
    call: Call, results: tuple[torch.Tensor, ...], cotangents: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...] | None:
    """Gradients of query, key and value by the kernel, if they are finite and precise, given results to all keys."""
    ends = *results, *cotangents[::-1]
    return None if _is_rounded(results[1]) else _gradients(call, ends, logsumexp=bool(cotangents[1].any()))


def _is_rounded(logsumexp: torch.Tensor) -> bool:
    """Whether a logsumexp is so large that the kernel, which gives no remainder, loses digits of the sum."""
    return bool(logsumexp.nan_to_num(neginf=0.0).abs().max().item() > sdpa.MAX_PLAIN_BIAS)


def _recorded(call: Call, *, logsumexp: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and logsumexp by the operation, which autograd or a compiler records."""
    if isinstance(call.scale, torch.Tensor):
        call = sdpa.scaled(call)
    scale = call.scale if call.scale is None else float(call.scale)  # of a Fraction, too
    records = guards.records(call)
    call = call._replace(scale=scale, sinks=None, dropout=None)
    definitions, arrays = pack(_swapped_call(call) if records else call)
    plan = GuardedPlan(definitions, logsumexp, records, _outer_axis(call.query))
    output, rows = call.backend.custom_gradient(GUARDED, plan, arrays)
    return output.transpose(-3, plan.outer), rows.transpose(-2, -1) if logsumexp else None


def _with_mask_in_bias(call: Call) -> Call:
    """The call with -inf in its bias, where it has one, for what its mask excludes."""
    if call.bias is None:
        return call
    _, bias = sdpa.kernel_mask(call)
    assert bias is not None
    return call._replace(mask=None, bias=bias.expand(*bias.shape[:-1], call.key.shape[-2]).contiguous())


def _shifted(call: Call) -> Call:
    return call if call.bias is None else call._replace(bias=sdpa.shifted(call.bias, call))


def _call_of(plan: GuardedPlan, arrays: tuple[torch.Tensor, ...], backend: Backend) -> Call:
    call = unpack(plan, arrays, backend)
    return _shifted(_swapped_call(call)) if plan.records else call


def _forward(
    plan: GuardedPlan, arrays: tuple[torch.Tensor, ...], backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call_of(plan, arrays, backend)
    output, found = _by_kernel_or_blocks(call, logsumexp=plan.logsumexp)
    return output.transpose(-3, plan.outer), found.transpose(-2, -1)


def _by_kernel_or_blocks(
    call: Call, cuts: list[KeyCut] | None = None, *, logsumexp: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    results = _by_kernel(call, cuts, logsumexp=logsumexp)
    if results is not None:
        return results
    output, rows, _ = blockwise(call)
    return cast_to(output, call.query.dtype, xp=call.xp), rows


def _by_kernel(
    call: Call, cuts: list[KeyCut] | None = None, *, logsumexp: bool = True
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Output and logsumexp of all parts; ``None`` if the kernel is not to be asked, or if something leaks in one."""
    cuts = cuts_of(call) if cuts is None else cuts
    if cuts is None:
        return None
    call = sdpa.scaled(call) if isinstance(call.scale, torch.Tensor) else call
    scale, outer, found = sdpa.scale_of(call), _outer_axis(call.query), []
    for part in parts_of(call, cuts):
        results = _guarded_kernel(part, inputs_of(part), scale, logsumexp=logsumexp)
        if results is None:
            return None
        output, rows = (sdpa.with_batch_of(part, x) for x in results)
        found.append((output.transpose(-3, outer), rows))
    output, rows = (joined(list(each)) for each in zip(*found, strict=True))
    return output.transpose(-3, outer).reshape(call.query.shape), rows.reshape(call.query.shape[:-1])


def _backward(
    plan: GuardedPlan,
    arrays: tuple[torch.Tensor, ...],
    results: tuple[torch.Tensor, ...],
    cotangents: tuple[torch.Tensor, ...],
    backend: Backend,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients, of blocks if those of the kernel are not finite.

    Where the output is of blocks, what leaked shows in the gradients of the kernel, too.
    """
    call = _call_of(plan, arrays, backend)
    output, d_output = (x[0].transpose(-3, plan.outer) for x in (results, cotangents))
    rows = [x.transpose(-2, -1) for x in (results[1], cotangents[1])]
    gradients = _gradients(call, (output, *rows, d_output), logsumexp=plan.logsumexp)
    if gradients is None:
        gradients = _gradients_of_blocks(call, d_output, rows[1])
    return *(map(_swapped, gradients) if plan.records else gradients), *(None for _ in arrays[3:])


def _gradients(call: Call, ends: tuple[torch.Tensor, ...], *, logsumexp: bool) -> tuple[torch.Tensor, ...] | None:
    """Gradients of query, key and value by the kernel; ``None`` if they are not finite, and somebody looks."""
    cuts = cuts_of(call)
    if cuts is None:
        return None
    factor = sdpa.scale_of(call).factor
    parts = parts_of(sdpa.scaled(call), cuts)
    of_parts = zip(*(x.reshape(-1, *x.shape[call.query.dim() - 3 :]).chunk(len(cuts)) for x in ends), strict=True)
    found = []
    for part, cut, each in zip(parts, cuts, of_parts, strict=True):
        behind = 0, 0, cut.first, call.key.shape[-2] - cut.stop
        d_query, *of_keys = _gradients_of_part(part, *each, logsumexp=logsumexp)
        found.append((d_query, *(padded(x, behind) if any(behind) else x for x in of_keys)))
    gradients = [joined(list(each)) for each in zip(*found, strict=True)]
    total: Any = 0.0 if call.assume_finite else sum(each.sum() for each in gradients)
    if not math.isfinite(total):
        return None
    gradients[0] = gradients[0] if factor is None else gradients[0] * factor
    return tuple(x.reshape(like.shape) for x, like in zip(gradients, call[:3], strict=True))


def _gradients_of_part(part: Call, *ends: torch.Tensor, logsumexp: bool) -> list[torch.Tensor]:
    """Gradients by the kernel, which knows no gradient of the logsumexp.

    That one adds to the gradient of the scores: P (dP - delta + d_logsumexp). The kernel sums delta from dO and O. So
    one more channel, 1 in dO and -d_logsumexp in O, subtracts it from delta. It is 0 in all other arrays.
    """
    arrays, added, is_causal = inputs_of(part)
    output, rows, d_rows, d_output = (x.reshape(*arrays[0].shape[:-1], *x.shape[3:]) for x in ends)
    rows = rows if added is None else torch.where(rows == -math.inf, 0.0, rows)
    if logsumexp:
        arrays = tuple(padded(array, (0, 1)) for array in arrays)
        output = torch.cat([output, -d_rows.unsqueeze(-1).to(output.dtype)], dim=-1)
        d_output = padded(d_output, (0, 1), value=1.0)
    d_output, output = map(sdpa.with_unit_stride, (d_output, output))
    gradients = FLASH_CPU_BACKWARD(d_output, *arrays, output, rows, 0.0, is_causal, attn_mask=added, scale=part.scale)
    width = part.query.shape[-1]
    return [x[..., :width].reshape(like.shape) for x, like in zip(gradients, part[:3], strict=True)]


def _gradients_of_blocks(call: Call, d_output: torch.Tensor, d_logsumexp: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients by computing the results once more."""

    def results(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output, logsumexp, _ = blockwise(call._replace(query=query, key=key, value=value))
        return torch.cat([output, logsumexp.unsqueeze(-1)], dim=-1)

    gradients_of: Callable[..., tuple[torch.Tensor, ...]] = call.backend.vjp(results, *call[:3])[1]
    return gradients_of(torch.cat([d_output.to(d_logsumexp.dtype), d_logsumexp.unsqueeze(-1)], dim=-1))


def _empty(plan: GuardedPlan, arrays: tuple[Any, ...], backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    query = _swapped(arrays[0]) if plan.records else arrays[0]
    rows = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty(query.shape).transpose(-3, plan.outer), rows.transpose(-2, -1)


GUARDED = register("torch.guarded", Operation(_forward, _backward, _empty))


def _outer_axis(query: torch.Tensor) -> int:
    """The outer one in memory of the axes of heads and rows, -3 and -2, as it is in the output of the kernel."""
    return -2 if query.stride(-3) < query.stride(-2) else -3


def _swapped(array: torch.Tensor) -> torch.Tensor:
    """Heads before rows as rows before heads, and back: so the kernel lays out its gradients in memory."""
    return array.transpose(-3, -2)


def _swapped_call(call: Call) -> Call:
    query, key, value = map(_swapped, call[:3])
    return call._replace(query=query, key=key, value=value)
