"""PyTorch's flash attention for CPUs, whose results tell whether they are those of the definition.

It multiplies queries and keys before it scales them, and computes with some of what a causal mask excludes. Where that
goes wrong, it shows:

- A score that is nan or inf makes its row's logarithm of the normalizer nan or inf. A row in which it finds no score
  above -inf, be it that all overflowed or that there are but a few and all are nan, has exactly 0, as few others have.
- What is masked has the weight 0, and 0 times what is not finite is nan in the output; going backward, in the gradient
  of the query.

Each is one look at what has just been written, instead of one at each argument. What does not pass is computed in
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Real
from typing import Any, NamedTuple

import torch

from attention_core._blockwise import blockwise
from attention_core._call import Call, default_scale, known_finite, repeats
from attention_core._heads import repeat_heads
from attention_core._namespace import is_concrete, narrow
from attention_core.backend import Backend, Operation
from attention_core.masks import And, Causal, KeyLengths, Mask

__all__ = ["attend", "causal_and_lengths", "has_few_keys", "is_open_to", "is_read_later", "lengths_of"]

COMPUTE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
LANES = 16  # of the longest vectors of a processor
LEAST_SEEN = 2**16  # elements of the query
DIFFERENTIATE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Flash(NamedTuple):
    """What is known of a call before its arrays.

    These are query, key and value (B, M or N, H, D), which is how the kernel lays out their gradients, and lengths (B),
    if any. The output lies in memory as the query does: with heads before rows (B, H, M, D), or behind them.
    """

    scale: float
    causal: bool
    heads_first: bool


def is_open_to(call: Call) -> bool:
    """Whether `attend` takes the call. No values are read.

    A small call without a mask is left to the public function: another query takes less time than a look at results.
    """
    arrays = call.query, call.key, call.value
    return (
        call.query.device.type == "cpu"
        and call.bias is None
        and causal_and_lengths(call.mask) is not None
        and (call.scale is None or (isinstance(call.scale, Real) and call.scale > 0))  # type: ignore[operator]
        and (is_read_later(call) or all(map(is_concrete, arrays)))
        and call.query.shape[-1] == call.value.shape[-1]
        and not any(0 in array.shape for array in arrays)
        and (call.mask is not None or call.query.numel() >= LEAST_SEEN or has_few_keys(call))
    )


def has_few_keys(call: Call) -> bool:
    """Whether there are so few that the kernel gives a query whose scores are all nan the output 0."""
    columns = call.key.shape[-2]
    return isinstance(columns, int) and columns < LANES


def is_read_later(call: Call) -> bool:
    """Whether an operator of ours can read, when a compiled program runs, what cannot be read now."""
    arrays = call.query, call.key, call.value
    return (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and (call.scale is None or isinstance(call.scale, Real))
        and not any(torch._C._functorch.is_batchedtensor(array) or 0 in array.shape for array in arrays)
    )


def causal_and_lengths(mask: Any) -> tuple[bool, KeyLengths | None] | None:
    """Whether a mask is causal, and the lengths it allows, where it says nothing else."""
    if mask is None or isinstance(mask, KeyLengths):
        return False, mask
    if isinstance(mask, Causal) and isinstance(mask.offset, int) and mask.offset == 0:
        return True, None
    if isinstance(mask, And):
        parts = sorted((mask.first, mask.second), key=lambda part: isinstance(part, KeyLengths))
        if causal_and_lengths(parts[0]) == (True, None) and isinstance(parts[1], KeyLengths):
            return True, parts[1]
    return None


def attend(call: Call) -> torch.Tensor:
    """The output of the kernel, or that of blocks where the kernel's is not that of the definition."""
    xp = call.xp
    causal, lengths = causal_and_lengths(call.mask)  # type: ignore[misc]
    *leading, heads, rows, width = call.query.shape
    times = repeats(call.query, call.key, xp)
    key, value = (repeat_heads(array, times, xp=xp) for array in (call.key, call.value))
    arrays = [_exchanged(array.reshape(-1, *array.shape[-3:])) for array in (call.query, key, value)]
    if lengths is not None:
        arrays.append(lengths_of(lengths, call))
    scale = default_scale(call.query, xp) if call.scale is None else call.scale
    heads_first = call.query.stride(-3) >= call.query.stride(-2)
    plan = Flash(float(scale), causal, heads_first)
    output, _ = _backend().custom_gradient(FLASH, plan, tuple(arrays))
    return (output if heads_first else _exchanged(output)).reshape(*leading, heads, rows, width)


def lengths_of(mask: KeyLengths, call: Call) -> torch.Tensor:
    """How many keys each entry has (B)."""
    leading = call.query.shape[:-3]
    lengths = mask.lengths
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.full((), lengths, dtype=torch.int64)
    return lengths.clamp(0, call.key.shape[-2]).expand(leading).reshape(-1)


def _forward(plan: Flash, arrays: tuple[torch.Tensor, ...], backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the logarithm of the normalizer (B, M, H): finite unless the output is of blocks."""
    output, logsumexp = _computed(plan, arrays)
    seen = logsumexp.sum() + logsumexp.reciprocal().sum()  # neither nan nor inf nor 0 is lost in it
    if plan.causal:
        seen = seen + output.sum()
    if not (math.isfinite(seen.item()) or _is_sound(plan, arrays, output, logsumexp, backend)):
        output = _in_blocks(plan, arrays, backend)(*map(_exchanged, arrays[:3]))
        logsumexp.fill_(math.nan)
    return (output if plan.heads_first else _exchanged(output)), _exchanged(logsumexp)


def _is_sound(
    plan: Flash, arrays: tuple[torch.Tensor, ...], output: torch.Tensor, logsumexp: torch.Tensor, backend: Backend
) -> bool:
    """The same, looked at closely: sums may overflow, and a row of zeros has 0 by right."""
    checked = (logsumexp, output) if plan.causal else (logsumexp,)
    fits = known_finite(arrays[:2], plan.scale, backend.namespace)
    return fits and all(bool(array.isfinite().all().item()) for array in checked)


def _computed(plan: Flash, arrays: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the kernel, with the heads first."""
    parts = list(_parts(plan, arrays))
    if len(parts) == 1 and parts[0].keys:
        return COMPUTE(*parts[0].inputs, 0.0, plan.causal, scale=plan.scale)  # type: ignore[no-any-return]
    output, logsumexp = _empty(plan, arrays, None)
    output, logsumexp = output if plan.heads_first else _exchanged(output), _exchanged(logsumexp)
    output.zero_()
    logsumexp.fill_(1.0)  # which nobody asks for where there are no keys, but for a finite number
    for entries, keys, inputs in parts:
        if keys:
            output[entries], logsumexp[entries] = COMPUTE(*inputs, 0.0, plan.causal, scale=plan.scale)
    return output, logsumexp


class Part(NamedTuple):
    """Entries that have as many keys, how many of these some query may attend, and query, key and value of them."""

    entries: slice
    keys: int
    inputs: tuple[torch.Tensor, ...]


def _parts(plan: Flash, arrays: tuple[torch.Tensor, ...]) -> Iterator[Part]:
    query, key, value = (_with_unit_stride(_exchanged(array)) for array in arrays[:3])
    columns = key.shape[-2]
    most = min(columns, query.shape[-2]) if plan.causal else columns
    counts = [min(length, most) for array in arrays[3:] for length in array.tolist()] or [most]
    if len(set(counts)) > 1:
        for entry, count in enumerate(counts):
            entries = slice(entry, entry + 1)
            yield Part(entries, count, (query[entries], key[entries, :, :count], value[entries, :, :count]))
    elif counts[0] == columns:
        yield Part(slice(None), columns, (query, key, value))
    else:
        yield Part(slice(None), counts[0], (query, key[:, :, : counts[0]], value[:, :, : counts[0]]))


def _backward(
    plan: Flash, arrays: tuple[torch.Tensor, ...], results: Any, cotangents: Any, backend: Backend
) -> tuple[torch.Tensor | None, ...]:
    output, cotangent = (x if plan.heads_first else _exchanged(x) for x in (results[0], cotangents[0]))
    logsumexp = _exchanged(results[1])
    gradients = None
    if math.isfinite(logsumexp.sum().item()) or bool(logsumexp.isfinite().all().item()):
        gradients = _differentiated(plan, arrays, output, logsumexp, _with_unit_stride(cotangent))
        if plan.causal and not math.isfinite(gradients[0].sum().item()):
            gradients = None
    if gradients is None:
        _, pull = backend.vjp(_in_blocks(plan, arrays, backend), *map(_exchanged, arrays[:3]))
        gradients = pull(cotangent)
    return *map(_exchanged, gradients), *(None for _ in arrays[3:])


def _differentiated(
    plan: Flash,
    arrays: tuple[torch.Tensor, ...],
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    cotangent: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients for query, key and value by the kernel, with the heads first."""

    def differentiated(part: Part) -> Any:
        results = output[part.entries], logsumexp[part.entries]
        return DIFFERENTIATE(cotangent[part.entries], *part.inputs, *results, 0.0, plan.causal, scale=plan.scale)

    parts = list(_parts(plan, arrays))
    if len(parts) == 1 and parts[0].keys == arrays[1].shape[1]:
        return differentiated(parts[0])  # type: ignore[no-any-return]
    gradients = tuple(_exchanged(array.new_zeros(array.shape)) for array in arrays[:3])
    for part in parts:
        if part.keys:
            of_query, *of_keys = differentiated(part)
            gradients[0][part.entries] = of_query
            for whole, found in zip(gradients[1:], of_keys, strict=True):
                whole[part.entries, :, : part.keys] = found
    return gradients


def _in_blocks(plan: Flash, arrays: tuple[torch.Tensor, ...], backend: Backend) -> Any:
    """The definition as a function of query, key and value, with the heads first."""
    mask: Mask | None = Causal() if plan.causal else None
    if len(arrays) > 3:
        mask = KeyLengths(arrays[3]) if mask is None else mask & KeyLengths(arrays[3])

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        nothing = (None,) * 3
        call = Call(query, key, value, mask, None, plan.scale, *nothing, (0, 0), backend.namespace)
        return narrow(blockwise(call, backend)[0], query.dtype, xp=backend.namespace)

    return attend


def _exchanged(array: torch.Tensor) -> torch.Tensor:
    """Rows before heads as heads before rows, and back."""
    return array.transpose(1, 2)


def _with_unit_stride(array: torch.Tensor) -> torch.Tensor:
    """What the kernel can read: vectors in one piece."""
    return array if array.stride(-1) == 1 else array.contiguous()


def _empty(plan: Flash, arrays: tuple[torch.Tensor, ...], backend: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query = arrays[0]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = _exchanged(query) if plan.heads_first else query
    return query.new_empty(output.shape), query.new_empty(query.shape[:-1], dtype=wide)


FLASH = Operation(_forward, _backward, _empty)


def _backend() -> Any:
    from attention_torch.backend import backend  # noqa: PLC0415 (which imports this module)

    return backend
