"""PyTorch's kernel on an accelerator, under a mask: what is masked cannot leak, and the host reads no value.

The kernel gets queries, keys and values in which 0 or the largest number stands for what could leak, and returns what
it makes of these. Then the device puts NaN and infinities where a row attended to such a query, key or value:

* Under a causal mask, rows from the first such key on. To find that one takes a pass over keys and values.
* Under an array, rows that a product of the array and of indicators shows.
* Under a rule of FlexAttention, rows to which FlexAttention gives an average of indicators above 0. The device leaves
  all of its blocks out unless something could leak.

What could leak is what is not finite, or so large that products could be infinite: no number in float16, and about
1e18 in float32 and bfloat16. Under a mask, those that are attended to count as infinite. In the backward pass, the same
holds of the gradient of the output. A row that shows one of them gives NaN to the gradients of what it attends to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from attention_core.backend import Call
from attention_torch import sdpa
from attention_torch.guards import records

__all__ = ["NAN_SCORE", "Attended", "attend", "bounds_of", "results", "vectors_within", "with_number_as_scale"]

NAN_SCORE = 1e37  # instead of a score that is NaN or inf; times log2(e), it is still finite

BEHIND_ALL = torch.iinfo(torch.int32).max


class Bounds(NamedTuple):
    """Magnitudes up to which numbers cannot leak: of queries and keys, of values, and of gradients of the output."""

    score: float
    value: float


class Attended(Protocol):
    """Who attends to whom, where that is no array.

    Attributes
    ----------
    scores_tell : bool
        Whether the kernel gives `NAN_SCORE` to scores of spoilt queries and keys, so that its logsumexp shows them.
    """

    scores_tell: bool

    def rows(self, indicators: torch.Tensor, is_any: torch.Tensor) -> torch.Tensor:
        """Which rows (B, H, M, C) attend to a key that is indicated (B, G, N, C), where any is."""

    def keys(self, marked: torch.Tensor, is_any: torch.Tensor) -> torch.Tensor:
        """Which keys (B, H, N, C) are attended to by a row that is marked (B, H, M, C), where any is."""


def attend(call: Call) -> torch.Tensor:
    """The output of the kernel (..., H, M, E), repaired."""
    dims = (*call.query.shape[:-1], call.value.shape[-1])
    call = _with_one_batch_axis(with_number_as_scale(sdpa.with_array_mask(call)))
    is_causal, added = sdpa.kernel_mask(call)
    allowed = spoilt_rows = None
    if not is_causal:
        assert added is not None
        added = added.reshape(*(1,) * (4 - added.dim()), *added.shape)
        allowed, spoilt_rows, added = _split_bias(added)
        call = call._replace(
            mask=added if added.dtype == torch.bool else None, bias=None if added.dtype == torch.bool else added
        )

    def kernel(*arrays: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sdpa.attend(call._replace(query=arrays[0], key=arrays[1], value=arrays[2])), None

    return results(call, allowed, kernel, spoilt_rows)[0].reshape(dims)


def results(
    call: Call,
    allowed: torch.Tensor | Attended | None,
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    spoilt_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and logsumexp of a kernel, repaired, for a call with one axis for the batch.

    Rows attend to what an array allows; to what comes before them where that is ``None``.
    """
    bounds, arrays = bounds_of(call), (call.query, call.key, call.value)
    recorded = records(call)
    marks = None
    if recorded:
        *clean, marks = Sanitized.apply(*arrays, allowed, bounds)
    else:
        clean = [_sanitize(x, bound) for x, bound in zip(arrays, (bounds[0], *bounds), strict=True)]
    output, logsumexp = kernel(*clean)
    poison = _poison(call, allowed, spoilt_rows, bounds, logsumexp)
    if not recorded:
        return _repair(output, *poison), _repair_logsumexp(logsumexp, poison[2])
    if logsumexp is None:
        return Repaired.apply(output, marks, *poison, bounds.value), None
    return RepairedWithLogsumexp.apply(output, logsumexp, marks, *poison, bounds.value)  # type: ignore[no-any-return]


def with_number_as_scale(call: Call) -> Call:
    """The call with its query multiplied by a scale that is a tensor, which could not be read without waiting."""
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


def bounds_of(call: Call) -> Bounds:
    """Bounds such that half of the largest number is not exceeded by any sum of products."""
    dtype, width = call.query.dtype, call.query.shape[-1]
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max
    scale = 1.0 if call.scale is None else max(1.0, abs(float(call.scale)))
    score, value = (math.sqrt(wide / 2 / max(1, width) / factor) for factor in (scale, 1.0))
    most = torch.finfo(dtype).max
    return Bounds(min(score, most), min(value, most))


def vectors_within(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Which vectors (..., 1) have no number beyond a bound. NaN is: comparisons with it are false."""
    return (x.abs() <= bound).all(dim=-1, keepdim=True)


def _sanitize(x: torch.Tensor, bound: float) -> torch.Tensor:
    """The array with numbers within the bound in place of all others."""
    finite = torch.nan_to_num(x, nan=0.0, posinf=bound, neginf=-bound)
    return finite if bound >= torch.finfo(x.dtype).max else finite.clamp_(-bound, bound)


def _split_bias(added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Where a mask or a bias allows to attend, the rows in which it is no number, and what the kernel is to add."""
    if added.dtype == torch.bool:
        return added, None, added
    allowed = added != -math.inf
    wrong = ~(added < math.inf)
    return allowed, wrong.any(dim=-1), added.masked_fill(wrong, 0.0)


Poison = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (B, G, R or 1, M or 1, E or 1)


def _poison(
    call: Call,
    allowed: torch.Tensor | Attended | None,
    spoilt_rows: torch.Tensor | None,
    bounds: Bounds,
    logsumexp: torch.Tensor | None,
) -> Poison:
    """Which outputs attended to inf, which to -inf, and which rows are NaN."""
    with torch.no_grad():
        query, key, value = (x.detach() for x in (call.query, call.key, call.value))
        groups, columns = key.shape[1:3]
        keys = vectors_within(key, bounds.score)
        below, above = value <= bounds.value, value >= -bounds.value
        rows = ~vectors_within(query, bounds.score).unflatten(1, (groups, -1))
        if allowed is None:
            numbers = torch.arange(columns, dtype=torch.int32, device=key.device).unsqueeze(-1)
            at = torch.arange(query.shape[-2], dtype=torch.int32, device=key.device).unsqueeze(-1)
            firsts = (  # of no such key: behind all queries, of which there may be more than keys
                torch.where(each, BEHIND_ALL, numbers).amin(dim=-2, keepdim=True).unsqueeze(2)
                for each in (below, above, keys)
            )
            inf, minus_inf, nan = (first <= at for first in firsts)
            return inf, minus_inf, nan | rows
        if not isinstance(allowed, torch.Tensor):
            assert logsumexp is not None
            lines = logsumexp.detach().unflatten(1, (groups, -1)).unsqueeze(-1)
            nan = lines > NAN_SCORE / 2
            if not allowed.scores_tell:
                nan = nan | (rows & (lines > -math.inf)) | _attends_to(allowed, ~keys, groups)
            return _attends_to(allowed, ~below, groups), _attends_to(allowed, ~above, groups), nan
        places = _by_group(allowed, groups)
        indicators = torch.cat([below, above, keys], dim=-1).logical_not().unsqueeze(2).to(query.dtype)
        attended = torch.matmul(places.to(query.dtype), indicators) > 0
        inf, minus_inf, nan = attended.split([value.shape[-1], value.shape[-1], 1], dim=-1)
        nan = nan | (rows & places.any(dim=-1, keepdim=True))
        if spoilt_rows is not None:
            nan = nan | _by_group(spoilt_rows.unsqueeze(-1), groups)
        return inf, minus_inf, nan


def _attends_to(allowed: Attended, indicators: torch.Tensor, groups: int) -> torch.Tensor:
    return allowed.rows(indicators, indicators.any()).unflatten(1, (groups, -1))


def _by_group(array: torch.Tensor, groups: int) -> torch.Tensor:
    """An array (B, H or 1, M, N) as one of (B, G or 1, R or 1, M, N)."""
    return array.unsqueeze(2) if array.shape[1] == 1 else array.unflatten(1, (groups, -1))


def _repair(output: torch.Tensor, inf: torch.Tensor, minus_inf: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """The output (B, H, M, E) with NaN and infinities where they were attended to."""
    apart = output.unflatten(1, (nan.shape[1], -1))
    apart = torch.where(inf, math.inf, apart)
    apart = torch.where(minus_inf, torch.where(inf, math.nan, -math.inf).to(output.dtype), apart)
    return torch.where(nan, math.nan, apart).flatten(1, 2)


def _repair_logsumexp(logsumexp: torch.Tensor | None, nan: torch.Tensor) -> torch.Tensor | None:
    """The logsumexp (B, H, M) with NaN where a score is."""
    if logsumexp is None:
        return None
    apart = logsumexp.unflatten(1, (nan.shape[1], -1))
    return torch.where(nan.squeeze(-1), math.nan, apart).flatten(1, 2)


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
        ctx.has_array = isinstance(inputs[3], torch.Tensor)
        ctx.save_for_backward(*(inputs[3:4] if ctx.has_array else ()))
        ctx.rule = None if ctx.has_array else inputs[3]
        ctx.groups = inputs[1].shape[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Give NaN to what rows attended to that are marked."""
        d_query, d_key, d_value, marks = gradients
        marked = marks.isnan().unflatten(1, (ctx.groups, -1))  # (B, G, R, M, 2)
        allowed = ctx.saved_tensors[0] if ctx.has_array else ctx.rule
        d_query = torch.where(marks[..., :1].isnan(), math.nan, d_query)
        seen = _keys_of(marked, allowed, d_key.shape[-2])
        return (
            d_query,
            torch.where(seen[..., :1], math.nan, d_key),
            torch.where(seen[..., 1:], math.nan, d_value),
            None,
            None,
        )


def _keys_of(marked: torch.Tensor, allowed: torch.Tensor | Attended | None, columns: int) -> torch.Tensor:
    """Which keys (B, G, N, 2) are attended to by marked rows (B, G, R, M, 2)."""
    rows = marked.shape[3]
    if allowed is None:
        at = torch.arange(rows, dtype=torch.int32, device=marked.device).unsqueeze(-1)
        last = torch.where(marked, at, -1).amax(dim=(2, 3)).unsqueeze(-2)
        return torch.arange(columns, dtype=torch.int32, device=marked.device).unsqueeze(-1) <= last
    if not isinstance(allowed, torch.Tensor):
        return allowed.keys(marked.flatten(1, 2), marked.any()).unflatten(1, (marked.shape[1], -1)).any(dim=2)
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
        ctx.save_for_backward(_spoilt_rows(inputs[0], *inputs[2:5]))
        ctx.bound = inputs[5]

    @staticmethod
    def backward(ctx: Any, d_output: Any) -> Any:
        """Sanitize, and mark."""
        (rows,) = ctx.saved_tensors
        marks = _marks(rows, d_output, ctx.bound)
        return _sanitize(d_output, ctx.bound), marks, None, None, None, None


class RepairedWithLogsumexp(torch.autograd.Function):  # type: ignore[misc]
    """The same for output and logsumexp."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Repair."""
        output, logsumexp, _, inf, minus_inf, nan, _ = arguments
        repaired = _repair_logsumexp(logsumexp, nan)
        assert repaired is not None
        return _repair(output, inf, minus_inf, nan), repaired

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep which rows are spoilt."""
        ctx.save_for_backward(_spoilt_rows(inputs[0], *inputs[3:6]))
        ctx.bound = inputs[6]

    @staticmethod
    def backward(ctx: Any, d_output: Any, d_logsumexp: Any) -> Any:
        """Sanitize, and mark."""
        (rows,) = ctx.saved_tensors
        marks = _marks(rows, d_output, ctx.bound)
        wrong = ~(d_logsumexp.abs() <= ctx.bound)
        marks = torch.where(torch.stack([wrong, torch.zeros_like(wrong)], dim=-1), math.nan, marks)
        return _sanitize(d_output, ctx.bound), _sanitize(d_logsumexp, ctx.bound), marks, None, None, None, None


def _spoilt_rows(output: torch.Tensor, inf: torch.Tensor, minus_inf: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """Rows (B, H, M, 2) whose gradients are NaN: those of queries and keys, and those of values."""
    with_infinity = (inf | minus_inf).any(dim=-1, keepdim=True) | nan
    rows = torch.cat([with_infinity, nan.expand(with_infinity.shape)], dim=-1)
    return rows.expand(*rows.shape[:2], output.shape[1] // rows.shape[1], output.shape[2], 2).flatten(1, 2)


def _marks(rows: torch.Tensor, d_output: torch.Tensor, bound: float) -> torch.Tensor:
    """The gradients of marks: NaN where rows are spoilt, or the gradient of their output."""
    wrong = ~(d_output.abs() <= bound).all(dim=-1, keepdim=True)
    return torch.where(rows | wrong, math.nan, torch.zeros((), dtype=d_output.dtype, device=d_output.device))
