"""PyTorch's kernel on an accelerator, under a mask: what is masked cannot leak, and the host reads no value.

The kernel gets queries, keys and values in which 0 or the largest number stands for what could leak, and returns what
it makes of these. Then the device puts NaN and infinities where a row attended to such a query, key or value:

* Under a causal mask, rows from the first such key on. To find that one takes a pass over keys and values.
* Under any other mask, which is an array, rows that a product of the mask and of indicators shows.

What could leak is what is not finite, or so large that products could be infinite: no number in float16, and about
1e18 in float32 and bfloat16. Under a mask, those that are attended to count as infinite. In the backward pass, the same
holds of the gradient of the output. A row that shows one of them gives NaN to the gradients of what it attends to.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from attention_core.backend import Call
from attention_torch import sdpa
from attention_torch.guards import NEAR_LOWEST

__all__ = ["attend"]

BEHIND_ALL = torch.iinfo(torch.int32).max


class Bounds(NamedTuple):
    """Magnitudes up to which numbers cannot leak: of queries and keys, of values, and of gradients of the output."""

    score: float
    value: float


def attend(call: Call) -> torch.Tensor:
    """The output of the kernel (..., H, M, E), repaired."""
    dims = (*call.query.shape[:-1], call.value.shape[-1])
    call = _with_one_batch_axis(_with_number_as_scale(sdpa.with_array_mask(call)))
    is_causal, added = sdpa.kernel_mask(call)
    allowed = spoilt_rows = None
    if not is_causal:
        assert added is not None
        added = added.reshape(*(1,) * (4 - added.dim()), *added.shape)
        allowed, spoilt_rows, added = _split_bias(added)
        call = call._replace(
            mask=added if added.dtype == torch.bool else None, bias=None if added.dtype == torch.bool else added
        )
    arrays = call.query, call.key, call.value
    bounds = _bounds(call)
    if torch.is_grad_enabled() and any(array.requires_grad for array in arrays):
        *arrays, marks = Sanitized.apply(*arrays, allowed, bounds)
        output = sdpa.attend(call._replace(query=arrays[0], key=arrays[1], value=arrays[2]))
        poison = _poison(call, allowed, spoilt_rows, bounds)
        return Repaired.apply(output, marks, *poison, bounds.value).reshape(dims)
    sanitized = [_sanitize(x, bound) for x, bound in zip(arrays, (bounds[0], *bounds), strict=True)]
    output = sdpa.attend(call._replace(query=sanitized[0], key=sanitized[1], value=sanitized[2]))
    return _repair(output, *_poison(call, allowed, spoilt_rows, bounds)).reshape(dims)


def _with_number_as_scale(call: Call) -> Call:
    if not isinstance(call.scale, torch.Tensor):
        return call
    return call._replace(query=call.query * call.scale.to(call.query.dtype), scale=1.0)


def _with_one_batch_axis(call: Call) -> Call:
    """The call with arrays of four axes, and a mask and a bias of as many."""
    leading = call.query.shape[:-3]
    if len(leading) == 1:
        return call
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value))

    def merged(array: Any) -> Any:
        if not isinstance(array, torch.Tensor) or array.dim() <= 3:
            return array
        return array.expand(*leading, *array.shape[-3:]).reshape(-1, *array.shape[-3:])

    mask = getattr(call.mask, "mask", call.mask)  # of a rule that holds an array
    return call._replace(query=query, key=key, value=value, mask=merged(mask), bias=merged(call.bias))


def _bounds(call: Call) -> Bounds:
    """Bounds such that half of the largest number is not exceeded by any sum of products."""
    dtype, width = call.query.dtype, call.query.shape[-1]
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max
    scale = 1.0 if call.scale is None else max(1.0, abs(float(call.scale)))
    score, value = (math.sqrt(wide / 2 / max(1, width) / factor) for factor in (scale, 1.0))
    most = torch.finfo(dtype).max
    return Bounds(min(score, most), min(value, most))


def _sanitize(x: torch.Tensor, bound: float) -> torch.Tensor:
    """The array with numbers within the bound in place of all others."""
    finite = torch.nan_to_num(x, nan=0.0, posinf=bound, neginf=-bound)
    return finite if bound >= torch.finfo(x.dtype).max else finite.clamp_(-bound, bound)


def _split_bias(added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Where a mask or a bias allows to attend, the rows in which it is no number, and what the kernel is to add.

    Scores of a row may be shifted: a bias near the least number is, until its greatest number is none for a mask.
    """
    if added.dtype == torch.bool:
        return added, None, added
    allowed = added != -math.inf
    wrong = ~(added < math.inf)
    clean = added.masked_fill(wrong, 0.0)
    if torch.finfo(added.dtype).min < NEAR_LOWEST:
        top = clean.amax(dim=-1, keepdim=True)
        is_extreme = (top < NEAR_LOWEST) & (top > -math.inf)
        clean = torch.where(is_extreme, clean - torch.where(is_extreme, top, 0.0) + NEAR_LOWEST, clean)
    return allowed, wrong.any(dim=-1), clean


Poison = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (B, G, R or 1, M or 1, E or 1)


def _poison(call: Call, allowed: torch.Tensor | None, spoilt_rows: torch.Tensor | None, bounds: Bounds) -> Poison:
    """Which outputs attended to inf, which to -inf, and which rows are NaN."""
    with torch.no_grad():
        query, key, value = (x.detach() for x in (call.query, call.key, call.value))
        groups, columns = key.shape[1:3]
        # Comparisons with NaN are false, so that these ask for what is right, and not for what is wrong.
        keys = (key.abs() <= bounds.score).all(dim=-1, keepdim=True)
        below, above = value <= bounds.value, value >= -bounds.value
        rows = ~(query.abs() <= bounds.score).all(dim=-1, keepdim=True).unflatten(1, (groups, -1))
        if allowed is None:
            numbers = torch.arange(columns, dtype=torch.int32, device=key.device).unsqueeze(-1)
            at = torch.arange(query.shape[-2], dtype=torch.int32, device=key.device).unsqueeze(-1)
            firsts = (  # of no such key: behind all queries, of which there may be more than keys
                torch.where(each, BEHIND_ALL, numbers).amin(dim=-2, keepdim=True).unsqueeze(2)
                for each in (below, above, keys)
            )
            inf, minus_inf, nan = (first <= at for first in firsts)
            return inf, minus_inf, nan | rows
        places = _by_group(allowed, groups)
        indicators = torch.cat([below, above, keys], dim=-1).logical_not().unsqueeze(2).to(query.dtype)
        attended = torch.matmul(places.to(query.dtype), indicators) > 0
        inf, minus_inf, nan = attended.split([value.shape[-1], value.shape[-1], 1], dim=-1)
        nan = nan | (rows & places.any(dim=-1, keepdim=True))
        if spoilt_rows is not None:
            nan = nan | _by_group(spoilt_rows.unsqueeze(-1), groups)
        return inf, minus_inf, nan


def _by_group(array: torch.Tensor, groups: int) -> torch.Tensor:
    """An array (B, H or 1, M, N) as one of (B, G or 1, R or 1, M, N)."""
    return array.unsqueeze(2) if array.shape[1] == 1 else array.unflatten(1, (groups, -1))


def _repair(output: torch.Tensor, inf: torch.Tensor, minus_inf: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """The output (B, H, M, E) with NaN and infinities where they were attended to."""
    apart = output.unflatten(1, (nan.shape[1], -1))
    apart = torch.where(inf, math.inf, apart)
    apart = torch.where(minus_inf, torch.where(inf, math.nan, -math.inf).to(output.dtype), apart)
    return torch.where(nan, math.nan, apart).flatten(1, 2)


class Sanitized(torch.autograd.Function):  # type: ignore[misc]
    """Sanitized queries, keys and values, and marks of rows (B, H, M, 2), which are 0, and whose gradient counts.

    The gradient of a mark is NaN for a row whose gradients are. The first is one of queries and keys, the second one of
    values: an attended infinity leaves the weights as they are, by which the gradient of values is averaged.
    """

    @staticmethod
    def forward(*arguments: Any) -> Any:
        """Sanitize."""
        query, key, value, _, bounds = arguments
        marks = query.new_zeros((*query.shape[:-1], 2))
        return *(_sanitize(x, bound) for x, bound in zip((query, key, value), (bounds[0], *bounds), strict=True)), marks

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the mask, and how many heads there are."""
        ctx.has_mask = inputs[3] is not None
        ctx.save_for_backward(*(inputs[3:4] if ctx.has_mask else ()))
        ctx.groups = inputs[1].shape[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Give NaN to what rows attended to that are marked."""
        d_query, d_key, d_value, marks = gradients
        marked = marks.isnan().unflatten(1, (ctx.groups, -1))  # (B, G, R, M, 2)
        allowed = ctx.saved_tensors[0] if ctx.has_mask else None
        d_query = torch.where(marks[..., :1].isnan(), math.nan, d_query)
        seen = _keys_of(marked, allowed, d_key.shape[-2])
        return (
            d_query,
            torch.where(seen[..., :1], math.nan, d_key),
            torch.where(seen[..., 1:], math.nan, d_value),
            None,
            None,
        )


def _keys_of(marked: torch.Tensor, allowed: torch.Tensor | None, columns: int) -> torch.Tensor:
    """Which keys (B, G, N, 2) are attended to by marked rows (B, G, R, M, 2)."""
    rows = marked.shape[3]
    if allowed is None:
        at = torch.arange(rows, dtype=torch.int32, device=marked.device).unsqueeze(-1)
        last = torch.where(marked, at, -1).amax(dim=(2, 3)).unsqueeze(-2)
        return torch.arange(columns, dtype=torch.int32, device=marked.device).unsqueeze(-1) <= last
    places = _by_group(allowed, marked.shape[1])
    places = places.expand(*places.shape[:3], rows, columns).to(torch.float32)
    return (places.transpose(-2, -1) @ marked.to(torch.float32)).sum(dim=2) > 0


class Repaired(torch.autograd.Function):  # type: ignore[misc]
    """The repaired output. Its gradient goes to the kernel sanitized, and marks rows where that or it is spoilt."""

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor:
        """Repair."""
        output, _, inf, minus_inf, nan, _ = arguments
        return _repair(output, inf, minus_inf, nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep which rows are spoilt."""
        with_infinity = (inputs[2] | inputs[3]).any(dim=-1, keepdim=True) | inputs[4]
        heads = inputs[0].shape[1:3]
        rows = torch.cat([with_infinity, inputs[4].expand(with_infinity.shape)], dim=-1)
        ctx.save_for_backward(rows)
        ctx.group, ctx.rows, ctx.bound = heads[0] // rows.shape[1], heads[1], inputs[5]

    @staticmethod
    def backward(ctx: Any, d_output: Any) -> Any:
        """Sanitize, and mark."""
        (rows,) = ctx.saved_tensors
        rows = rows.expand(*rows.shape[:2], ctx.group, ctx.rows, 2).flatten(1, 2)
        wrong = ~(d_output.abs() <= ctx.bound).all(dim=-1, keepdim=True)
        marks = torch.where(rows | wrong, math.nan, torch.zeros((), dtype=d_output.dtype, device=d_output.device))
        return _sanitize(d_output, ctx.bound), marks, None, None, None, None
