"""PyTorch's kernel for CPUs as one guarded operation: run it, look at what came out, and repair that by blocks.

What leaks is seen in the results: in the output and the logsumexp, and going backward in the gradients. Small calls
look at norms of query, key and value instead: if they are small, PyTorch's function runs, with its own gradient. Calls
without gradients run the operation's forward pass itself. Compiled programs hold the operation, and look no further.
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
    cast_to,
    default_scale,
    group_size,
    merge_pieces,
    register,
    repeat_kv,
)
from attention_core.masks import Given, Mask, flatten, unflatten
from attention_torch import guards, sdpa
from attention_torch.parts import ALL, Part, cuts_of, joined, of_no_key, parts_of

FLASH_CPU = torch._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Facts(NamedTuple):
    """What is known of a call for a host before anything is computed, and of all others of its signature."""

    is_alone: bool  # whether nothing but autograd looks at what is called
    is_rule_without_flag: bool  # whether the mask is one that the kernel has no flag for
    may_leak: bool  # whether something may leak, or be lost
    cuts: list[KeyCut] | None  # the keys of all samples, or of each; None if they are found when it is computed
    is_native: bool = False  # whether the kernel takes the call as it is
    has_groups: bool = False  # whether some heads share keys
    folded: tuple[int, ...] | None = None  # axes of the query with these heads as rows of one, where they are few
    scale: float = 1.0  # what is left of the scale for the kernel to multiply by
    factor: torch.Tensor | None = None  # the rest: a query is multiplied by a tensor in half the time of a number


def facts_of(call: Call) -> Facts:
    """What is known of a call."""
    is_plain = all(type(x) in guards.TYPES for x in call[:3])
    is_alone = is_plain and not (torch.compiler.is_compiling() or guards.has_modes())
    may_leak = call.mask is not None or call.bias is not None or guards.overlooks_nan(call)
    facts = Facts(is_alone, guards.is_rule_without_flag(call.mask), may_leak, None)
    if not is_alone:
        return facts
    facts = facts._replace(cuts=cuts_of(call))
    query, key, value = call[:3]
    if not (call.scale is None or isinstance(call.scale, Real)) or query.dtype in guards.HALVES:
        return facts
    scale = default_scale(query, call.xp) if call.scale is None else float(call.scale)
    is_short = guards.is_short(call)
    if is_short or call.assume_finite:  # nobody looks whether a product overflows before it is scaled
        with torch.inference_mode(False):
            facts = facts._replace(factor=torch.tensor(scale, dtype=query.dtype, device="cpu"))
    else:
        facts = facts._replace(scale=scale)
    is_native = not may_leak if is_short else guards.is_small(call) and (facts.factor is not None or scale > 0)
    if not is_native or query.dim() != 4 or query.shape[-1] != value.shape[-1] or not sdpa.TAKES_GROUPS:
        return facts
    batch, num_heads, rows, width = query.shape
    group = num_heads // key.shape[-3]
    folded = (batch, key.shape[-3], group * rows, width) if group > 1 and guards.few_queries(call) else None
    return facts._replace(is_native=True, has_groups=group > 1 and folded is None, folded=folded)


def lasting_facts(call: Call) -> Facts:
    """What is known of all calls of a signature, without an array of this one."""
    facts = facts_of(call)
    has_arrays = any(isinstance(cut.mask, Mask) and not cut.mask.is_relative() for cut in facts.cuts or ())
    return facts._replace(cuts=None) if has_arrays else facts


class GuardedPlan(NamedTuple):
    """What is known of a call besides its arrays."""

    mask: Any  # a tree definition
    factor: float  # what the query is multiplied by, inside of the operation
    scale: float  # what is left to the kernel
    starts: tuple[int, int]
    has_bias: bool  # whether the last array is a bias, which holds the mask, too
    looks: bool  # whether results are looked at
    logsumexp: bool  # whether the logsumexp is asked for, and has a gradient


def run(call: Call, facts: Facts, *, logsumexp: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output (..., H, M, E) and logsumexp (..., H, M), which may be ``None`` if it is not asked for."""
    looks = not call.assume_finite
    if not logsumexp:
        if facts.is_native and (facts.factor is not None or guards.norms_are_small(call, values=True)):
            return _native(call, facts), None
        is_plain = not (facts.is_rule_without_flag or (looks and facts.may_leak))
        if is_plain and (not facts.is_alone or guards.records(call)):
            return sdpa.kernel_output(call), None
    width = call.value.shape[-1]
    factor, scale = sdpa.factors(call) if facts.factor is None else (facts.factor, 1.0)
    if not isinstance(factor, Real):
        factor, call = 1.0, call._replace(query=call.query * factor)
    call = _with_one_width(_with_mask_in_bias(call._replace(scale=scale)))
    if not sdpa.TAKES_GROUPS:
        group = group_size(call.query, call.key, call.xp)
        key, value = (repeat_kv(array, group, xp=call.xp) for array in (call.key, call.value))
        call = call._replace(key=key, value=value)
    plan = GuardedPlan(None, float(factor), scale, call.starts, call.bias is not None, looks, logsumexp)
    if facts.is_alone and not guards.records(call):
        output, found = _run_or_repair(plan, call, facts.cuts)
    else:
        output, found = _recorded(plan, call)
    return (output if output.shape[-1] == width else output[..., :width]), found


def attend_to_piece(call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Output and logsumexp, if these are those of the kernel, and lose no digits where they are merged with others."""
    parts = parts_of(call)
    found = None if parts is None else _by_kernel(_plan_of_piece(call), call, parts)
    return None if found is None or _is_rounded(found[1].nan_to_num(neginf=0.0)) else found


def piece_gradients(
    call: Call, results: tuple[torch.Tensor, ...], cotangents: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...] | None:
    """Gradients of query, key and value by the kernel, if they are finite and precise, given results to all keys."""
    plan = _plan_of_piece(call, logsumexp=bool(cotangents[1].any()))
    parts = None if _is_rounded(results[1].nan_to_num(neginf=0.0)) else parts_of(call)
    found = None if parts is None else _gradients(plan, call, parts, (*results, *cotangents[::-1]))
    return None if found is None or (plan.looks and not _are_finite(found)) else found


def _plan_of_piece(call: Call, *, logsumexp: bool = True) -> GuardedPlan:
    return GuardedPlan(None, 1.0, 1.0, call.starts, False, not call.assume_finite, logsumexp)


def _native(call: Call, facts: Facts) -> torch.Tensor:
    """The output of the kernel, whose gradient is PyTorch's own."""
    query, key, value = call[:3]
    if not (query.stride(-1) == key.stride(-1) == value.stride(-1) == 1):  # else it takes its dense form
        query, key, value = map(sdpa.with_unit_stride, call[:3])
    if facts.factor is not None:
        query = query * facts.factor
    if facts.folded is not None:
        query = query.reshape(facts.folded)
    output = sdpa.KERNEL(
        query, key, value, is_causal=call.mask is not None, scale=facts.scale, enable_gqa=facts.has_groups
    )
    return sdpa.differentiated_once(output if facts.folded is None else output.reshape(call.query.shape))


def _recorded(plan: GuardedPlan, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp by the operation, which autograd or a compiler records."""
    mask_arrays: list[torch.Tensor] = []
    if call.mask is not None:
        mask = call.mask if isinstance(call.mask, Mask) else Given(call.mask)
        plan = plan._replace(mask=flatten(mask, mask_arrays))
    if call.bias is not None:
        mask_arrays.append(call.bias)
    results = call.backend.custom_gradient(GUARDED, plan, (*map(_swapped, call[:3]), *mask_arrays))
    return _swapped(results[0]), results[1].transpose(-2, -1)


def _with_mask_in_bias(call: Call) -> Call:
    """The call with -inf in its bias, where it has one, for what its mask excludes."""
    if call.bias is None:
        return call
    _, bias = sdpa.kernel_mask(call)
    assert bias is not None
    bias = bias.expand(*bias.shape[:-1], call.key.shape[-2]).contiguous()
    return call._replace(mask=None, bias=sdpa.shifted(bias, call))


def _with_one_width(call: Call) -> Call:
    """The call with zeros behind queries and keys, or behind values, so that all are of one width."""
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    if width == value_width:
        return call
    most = max(width, value_width)
    query, key, value = (torch.nn.functional.pad(x, (0, most - x.shape[-1])) for x in call[:3])
    return call._replace(query=query, key=key, value=value)


def _call(plan: GuardedPlan, arrays: tuple[torch.Tensor, ...], backend: Backend) -> Call:
    query, key, value, *others = arrays
    query, key, value = map(_swapped, (query, key, value))
    bias = others.pop() if plan.has_bias else None
    mask = None if plan.mask is None else unflatten(plan.mask, others)
    call = Call(query, key, value, backend.namespace, backend, mask, bias, scale=plan.scale, starts=plan.starts)
    return call._replace(assume_finite=not plan.looks)


def _forward(
    plan: GuardedPlan, arrays: tuple[torch.Tensor, ...], backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    output, found = _run_or_repair(plan, _call(plan, arrays, backend))
    return _swapped(output), found.transpose(-2, -1)


def _run_or_repair(
    plan: GuardedPlan, call: Call, cuts: list[KeyCut] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp of the kernel, or of blocks if it turns out that something leaked, or was lost."""
    call = _multiplied(plan, call)
    parts = parts_of(call, cuts)
    results = None if parts is None else _by_kernel(plan, call, parts)
    if results is not None:
        return results
    output, logsumexp, _ = blockwise(call)
    return cast_to(output, call.query.dtype, xp=call.xp), logsumexp


def _multiplied(plan: GuardedPlan, call: Call) -> Call:
    """The call with its query times the factor of the plan."""
    return call if plan.factor == 1.0 else call._replace(query=call.query * plan.factor)


def _by_kernel(plan: GuardedPlan, call: Call, parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Output and logsumexp, or ``None`` if they show that something leaked, or was lost.

    The kernel multiplies all keys and values by some number, so that they show what is not finite. But it takes a row
    whose scores are NaN, among few keys or behind -inf, for a fully masked one: 0, and 0 as its logsumexp.
    """
    found = [FLASH_CPU(*part.arrays, 0.0, part.is_causal, attn_mask=part.added, scale=plan.scale) for part in parts]
    if _share_rows(parts):
        outputs, logsumexps = map(torch.stack, zip(*found, strict=True))
        if _is_rounded(logsumexps):
            return None
        found = [merge_pieces(outputs, logsumexps, torch.zeros_like(logsumexps), xp=call.xp)[:2]]
    output, logsumexp = (joined(call, parts, each) for each in zip(*found, strict=True)) if parts else of_no_key(call)
    # Whether the kernel may have taken a row of NaN for a masked one.
    may_be_0 = any(part.added is not None or part.arrays[1].shape[-2] < guards.VECTOR_LANES for part in parts)
    if plan.looks and (may_be_0 or plan.logsumexp or any(part.is_causal for part in parts)):
        total = output.sum(dtype=logsumexp.dtype)
        if math.isfinite(total.item()) and not (may_be_0 and not logsumexp.all()):
            return output, logsumexp  # finite, and no row has the logsumexp of a row that the kernel takes for masked
        if not (may_be_0 and math.isfinite((total + call.query.sum() + call.key.sum()).item())):
            return None  # something leaked, or a score may be NaN; where neither is so, rows are masked indeed
    if not may_be_0 or not (plan.looks or plan.logsumexp):
        return output, logsumexp
    return output, joined(
        call, parts, [_with_empty_rows(part, each[1]) for part, each in zip(parts, found, strict=True)]
    )


def _share_rows(parts: list[Part]) -> bool:
    """Whether parts have the same rows, and other keys."""
    return len(parts) > 1 and parts[0].at == ALL


def _is_rounded(logsumexp: torch.Tensor) -> bool:
    """Whether a logsumexp is so large that the kernel, which gives no remainder, loses digits of the sum."""
    return bool(logsumexp.abs().max().item() > sdpa.MAX_PLAIN_BIAS)


def _with_empty_rows(part: Part, logsumexp: torch.Tensor) -> torch.Tensor:
    """The logsumexp with -inf for fully masked rows, for which the kernel has 0."""
    if part.added is None:
        return logsumexp
    return torch.where((part.added > -math.inf).any(dim=-1).expand(logsumexp.shape), logsumexp, -math.inf)


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
    call = _multiplied(plan, _call(plan, arrays, backend))
    output, d_output = _swapped(results[0]), _swapped(cotangents[0])
    rows = [x.transpose(-2, -1) for x in (results[1], cotangents[1])]
    parts = parts_of(call)
    if parts is not None and _share_rows(parts) and _is_rounded(results[1]):
        parts = None
    gradients: Any = None if parts is None else _gradients(plan, call, parts, (output, *rows, d_output))
    if gradients is None or (plan.looks and not _are_finite(gradients)):
        gradients = _gradients_of_blocks(plan, call, d_output, rows[1])
    of_query, *others = gradients
    of_query = of_query if plan.factor == 1.0 else of_query * plan.factor
    return *map(_swapped, (of_query, *others)), *(None for _ in arrays[3:])


def _are_finite(gradients: tuple[torch.Tensor, ...]) -> bool:
    total: Any = sum(each.sum() for each in gradients)
    return math.isfinite(total.item())


def _gradients(
    plan: GuardedPlan, call: Call, parts: list[Part], ends: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value by the kernel."""
    if not parts:
        return tuple(map(torch.zeros_like, call[:3]))
    flat = [x.reshape(-1, *x.shape[call.query.dim() - 3 :]) for x in ends]
    if len(parts) == 1 and parts[0].at == ALL and parts[0].keys == slice(0, call.key.shape[-2]):
        found = _gradients_of_part(plan, parts[0], flat)
        return tuple(x.reshape(like.shape) for x, like in zip(found, call[:3], strict=True))
    query, key, value = (torch.zeros_like(x.reshape(-1, *x.shape[-3:])) for x in call[:3])
    for part in parts:
        of_query, of_key, of_value = _gradients_of_part(plan, part, [x[part.at] for x in flat])
        query[part.at] += of_query.reshape(query[part.at].shape)
        key[part.at, :, part.keys], value[part.at, :, part.keys] = of_key, of_value
    return tuple(x.reshape(like.shape) for x, like in zip((query, key, value), call[:3], strict=True))


def _gradients_of_part(plan: GuardedPlan, part: Part, ends: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gradients by the kernel, which knows no gradient of the logsumexp.

    That one adds to the gradient of the scores: P (dP - delta + d_logsumexp). The kernel sums delta from dO and O. So
    one more channel, 1 in dO and -d_logsumexp in O, subtracts it from delta. It is 0 in all other arrays.
    """
    dims, arrays = part.arrays[0].shape[:-1], part.arrays
    output, logsumexp, d_logsumexp, d_output = (x.reshape(*dims, *x.shape[3:]) for x in ends)
    logsumexp = logsumexp if part.added is None else torch.where(logsumexp == -math.inf, 0.0, logsumexp)
    if plan.logsumexp:
        padded = torch.nn.functional.pad
        arrays = tuple(padded(array, (0, 1)) for array in arrays)
        output = torch.cat([output, -d_logsumexp.unsqueeze(-1).to(output.dtype)], dim=-1)
        d_output = padded(d_output, (0, 1), value=1.0)
    options = {"attn_mask": part.added, "scale": plan.scale}
    gradients = FLASH_CPU_BACKWARD(
        sdpa.with_unit_stride(d_output),
        *arrays,
        sdpa.with_unit_stride(output),
        logsumexp,
        0.0,
        part.is_causal,
        **options,
    )
    return tuple(x[..., :-1] for x in gradients) if plan.logsumexp else gradients


def _gradients_of_blocks(
    plan: GuardedPlan, call: Call, d_output: torch.Tensor, d_logsumexp: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients by computing the results once more."""

    def results(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output, logsumexp, _ = blockwise(call._replace(query=query, key=key, value=value))
        return torch.cat([output, logsumexp.unsqueeze(-1)], dim=-1) if plan.logsumexp else output

    wide = d_output.to(d_logsumexp.dtype)
    cotangent = torch.cat([wide, d_logsumexp.unsqueeze(-1)], dim=-1) if plan.logsumexp else wide
    gradients_of: Callable[..., tuple[torch.Tensor, ...]] = call.backend.vjp(results, *call[:3])[1]
    return gradients_of(cotangent)


def _empty(plan: GuardedPlan, arrays: tuple[Any, ...], backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    query = arrays[0]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=wide)


GUARDED = register("torch.guarded", Operation(_forward, _backward, _empty))


def _swapped(array: torch.Tensor) -> torch.Tensor:
    """Heads before rows as rows before heads, and back: so the kernel lays out its results in memory."""
    return array.transpose(-3, -2)
