"""The kernel or blocks in a compiled program, which reads the values when it runs.

Each operation here has a gradient of its own and is opaque to the compiler. So it can look at its arrays first.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from attention_core.backend import (
    Backend,
    Call,
    Operation,
    attend_automatically,
    blockwise,
    cast_to,
    group_size,
    is_top_left_causal,
    register,
    repeat_kv,
)
from attention_core.masks import Causal, Given, Mask, flatten, unflatten
from attention_torch import sdpa
from attention_torch.flash_cpu import (
    FLASH_CPU,
    FLASH_CPU_BACKWARD,
    added_to_scores,
    attend_to_keys,
    with_unit_stride,
)
from attention_torch.guards import all_products_are_finite, few_queries, looks_in_program
from attention_torch.magnitudes import products_are_finite
from attention_torch.operators import encode, repair

__all__ = ["attend", "attend_and_look"]


def attend(call: Call) -> torch.Tensor:
    """The output of the kernel, or that of blocks if the program finds that something masked could leak."""
    if looks_in_program(call):
        return attend_and_look(call)[0]
    if is_top_left_causal(call.mask) and call.bias is None and _fits_flash_cpu(call):
        return _attend_causal(call)
    scale = None if call.scale is None else float(call.scale)
    few = few_queries(call) or not isinstance(call.mask, torch.Tensor | Given)
    if few and call.query.device.type == "cpu" and not is_top_left_causal(call.mask):
        return _attend_eagerly(call, scale)
    with torch.no_grad():
        is_finite = products_are_finite(call)
    # What torch.func.grad is asked about says that it is differentiated only once something is done with it.
    arrays = [array.view_as(array) for array in (call.query, call.key, call.value)]
    if not (torch.is_grad_enabled() and any(array.requires_grad for array in arrays)):
        return torch.where(is_finite, sdpa.attend(call), _blockwise_if(~is_finite, call))
    forks = [Fork.apply(is_finite, array) for array in arrays]
    first, second = (call._replace(query=x[0], key=x[1], value=x[2]) for x in zip(*forks, strict=True))
    return Select.apply(is_finite, sdpa.attend(first), _blockwise_if(~is_finite, second))


def attend_and_look(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (..., H, M, E) and logsumexp (..., H, M) of the kernel, or of blocks where those show a leak."""
    query, key, value, scale = sdpa.kernel_arrays(call)
    added = None if call.mask is None else added_to_scores(call, query, looks=True)
    *results, total = attend_to_keys(query, key, value, scale, added, looks=True)
    output, logsumexp = (sdpa.with_batch_of(call, x) for x in results)
    mask_arrays: list[torch.Tensor] = []
    mask = flatten(Given(call.mask) if isinstance(call.mask, torch.Tensor) else call.mask, mask_arrays)
    text = encode(*BLOCKS, EagerPlan, mask, None if call.scale is None else float(call.scale), call.starts)
    repair(output, logsumexp, total, [call.query, call.key, call.value, *mask_arrays], text)
    return output, logsumexp


class Fork(torch.autograd.Function):  # type: ignore[misc]
    """An array for each of two ways to go on; its gradient comes by the way that `Select` takes."""

    @staticmethod
    def forward(condition: torch.Tensor, array: torch.Tensor) -> Any:
        """Return the array twice."""
        return array.view_as(array), array.view_as(array)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the condition."""
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Choose, as the other one may be NaN."""
        return None, torch.where(*ctx.saved_tensors, *gradients)


class Select(torch.autograd.Function):  # type: ignore[misc]
    """The result of the first way if a condition is true, else that of the second."""

    @staticmethod
    def forward(condition: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Any:
        """Choose."""
        return torch.where(condition, first, second)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Pass the gradient both ways; `Fork` chooses at the other end."""
        return None, gradient, gradient


# Blocks, computed only if they turn out to be needed


class BlockwiseIfPlan(NamedTuple):
    """What is known of a call while it is compiled: the tree definition of its mask, and its scale."""

    mask: Any
    scale: float | None


def _blockwise_if(is_needed: torch.Tensor, call: Call) -> torch.Tensor:
    """The output of blocks if a 0-d tensor turns out true, else any numbers."""
    mask_arrays: list[torch.Tensor] = []
    mask = call.mask if isinstance(call.mask, Mask) else Given(call.mask)
    plan = BlockwiseIfPlan(flatten(mask, mask_arrays), None if call.scale is None else float(call.scale))
    arrays = (is_needed, call.query, call.key, call.value, *mask_arrays)
    return call.backend.custom_gradient(BLOCKWISE_IF, plan, arrays)[0]


def _blocks(plan: BlockwiseIfPlan, mask_arrays: list[torch.Tensor], backend: Backend) -> Any:
    """Attention in blocks as a function of query, key and value."""
    mask = unflatten(plan.mask, mask_arrays)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        call = Call(query, key, value, backend.namespace, backend=backend, mask=mask, scale=plan.scale)
        return cast_to(blockwise(call)[0], query.dtype, xp=backend.namespace)

    return attend


def _blockwise_if_forward(
    plan: BlockwiseIfPlan, arrays: tuple[torch.Tensor, ...], backend: Backend
) -> tuple[torch.Tensor]:
    is_needed, query, key, value, *mask_arrays = arrays
    if not is_needed:
        return _blockwise_if_empty(plan, arrays, backend)
    return (_blocks(plan, mask_arrays, backend)(query, key, value),)


def _blockwise_if_backward(
    plan: BlockwiseIfPlan, arrays: tuple[torch.Tensor, ...], results: Any, cotangents: Any, backend: Backend
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by computing the output once more, as the forward pass keeps nothing."""
    is_needed, *inputs = arrays[:4]
    mask_arrays = list(arrays[4:])
    if is_needed:
        _, gradients_of = backend.vjp(_blocks(plan, mask_arrays, backend), *inputs)
        gradients = gradients_of(cotangents[0])
    else:
        gradients = tuple(torch.empty_like(array) for array in inputs)
    return None, *gradients, *(None for _ in mask_arrays)


def _blockwise_if_empty(
    plan: BlockwiseIfPlan, arrays: tuple[torch.Tensor, ...], backend: Backend
) -> tuple[torch.Tensor]:
    query, value = arrays[1], arrays[3]
    return (query.new_empty((*query.shape[:-1], value.shape[-1])),)


BLOCKWISE_IF = register(
    "torch.blockwise_if", Operation(_blockwise_if_forward, _blockwise_if_backward, _blockwise_if_empty)
)


# The kernel for CPUs under a causal mask


class CausalPlan(NamedTuple):
    """What is known of a causal call while it is compiled.

    Its arrays are query, key and value (B, M or N, H, D), which is how the kernel lays out their gradients. Its output
    lies in memory as the query does: with heads before rows (B, H, M, D), or behind them.
    """

    scale: float | None
    heads_first: bool


def _fits_flash_cpu(call: Call) -> bool:
    """Whether the kernel for CPUs takes the call without another mask."""
    positive = call.scale is None or float(call.scale) > 0
    return positive and call.query.device.type == "cpu" and call.query.shape[-1] == call.value.shape[-1]


def _attend_causal(call: Call) -> torch.Tensor:
    """The output of the kernel under a causal mask, if nothing leaks once the program runs, or that of blocks."""
    xp = call.xp
    *leading, heads, rows, width = call.query.shape
    key, value = call.key, call.value
    if not sdpa.TAKES_GROUPS:
        key, value = (repeat_kv(array, group_size(call.query, key, xp), xp=xp) for array in (key, value))
    arrays = tuple(_swap_heads(array.reshape(-1, *array.shape[-3:])) for array in (call.query, key, value))
    scale = None if call.scale is None else float(call.scale)  # what is None may depend on a width that is a symbol
    heads_first = True if call.query.stride(-3) >= call.query.stride(-2) else False  # noqa: SIM210 (not a symbol)
    output, _ = call.backend.custom_gradient(CAUSAL, CausalPlan(scale, heads_first), arrays)
    return (output if heads_first else _swap_heads(output)).reshape(*leading, heads, rows, width)


def _causal_forward(
    plan: CausalPlan, arrays: tuple[torch.Tensor, ...], backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and logsumexp (B, M, H), which is NaN if the output is of blocks."""
    query, _, _ = inputs = tuple(map(_swap_heads, arrays))
    call = _causal_call(plan, backend, *inputs)
    if all_products_are_finite(call):
        output, logsumexp = FLASH_CPU(*map(with_unit_stride, inputs), 0.0, True, scale=plan.scale)
    else:
        output = cast_to(blockwise(call)[0], query.dtype, xp=backend.namespace)
        logsumexp = _swap_heads(_causal_empty(plan, arrays, backend)[1]).fill_(math.nan)
    return output if plan.heads_first else _swap_heads(output), _swap_heads(logsumexp)


def _causal_backward(
    plan: CausalPlan, arrays: tuple[torch.Tensor, ...], results: Any, cotangents: Any, backend: Backend
) -> tuple[torch.Tensor, ...]:
    inputs = tuple(map(_swap_heads, arrays))
    output, cotangent = (x if plan.heads_first else _swap_heads(x) for x in (results[0], cotangents[0]))
    if not results[1][0, 0, 0].isnan():
        tensors = map(with_unit_stride, (cotangent, *inputs, output))
        gradients = FLASH_CPU_BACKWARD(*tensors, _swap_heads(results[1]), 0.0, True, scale=plan.scale)
    else:
        _, gradients_of = backend.vjp(lambda *arrays: blockwise(_causal_call(plan, backend, *arrays))[0], *inputs)
        gradients = gradients_of(cotangent.to(results[1].dtype))
    return tuple(map(_swap_heads, gradients))


def _causal_call(plan: CausalPlan, backend: Backend, *inputs: torch.Tensor) -> Call:
    query, key, value = inputs
    return Call(query, key, value, backend.namespace, backend=backend, mask=Causal(), scale=plan.scale)


def _causal_empty(
    plan: CausalPlan, arrays: tuple[torch.Tensor, ...], backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    query = arrays[0]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = _swap_heads(query) if plan.heads_first else query
    return query.new_empty(output.shape), query.new_empty(query.shape[:-1], dtype=wide)


CAUSAL = register("torch.causal", Operation(_causal_forward, _causal_backward, _causal_empty))


def _swap_heads(array: torch.Tensor) -> torch.Tensor:
    """Heads before rows as rows before heads, and back."""
    return array.transpose(1, 2)


# A rule whose numbers are read when the program runs, and a few queries, after which output and logsumexp are looked at


class EagerPlan(NamedTuple):
    """What is known of a call while it is compiled: the tree definition of its mask, and its scale."""

    mask: Any
    scale: float | None
    starts: tuple[int, int]


def _attend_eagerly(call: Call, scale: float | None) -> torch.Tensor:
    """The output that the call has outside of a compiled program."""
    mask_arrays: list[torch.Tensor] = []
    mask = call.mask if isinstance(call.mask, Mask) else Given(call.mask)
    plan = EagerPlan(flatten(mask, mask_arrays), scale, call.starts)
    return call.backend.custom_gradient(EAGER, plan, (call.query, call.key, call.value, *mask_arrays))[0]


def _eager(plan: EagerPlan, mask_arrays: Any, backend: Backend) -> Any:
    """Attention as a function of query, key and value."""
    mask = unflatten(plan.mask, mask_arrays)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        call = Call(query, key, value, backend.namespace, backend=backend, mask=mask, scale=plan.scale)
        return attend_automatically(call._replace(starts=plan.starts))

    return attend


def _eager_forward(plan: EagerPlan, arrays: tuple[torch.Tensor, ...], backend: Backend) -> tuple[torch.Tensor]:
    return (_eager(plan, arrays[3:], backend)(*arrays[:3]),)


def _eager_backward(
    plan: EagerPlan, arrays: tuple[torch.Tensor, ...], results: Any, cotangents: tuple[torch.Tensor], backend: Backend
) -> tuple[torch.Tensor | None, ...]:
    _, gradients_of = backend.vjp(_eager(plan, arrays[3:], backend), *arrays[:3])
    return *gradients_of(cotangents[0]), *(None for _ in arrays[3:])


def _eager_empty(plan: EagerPlan, arrays: tuple[torch.Tensor, ...], backend: Backend) -> tuple[torch.Tensor]:
    query, _, value = arrays[:3]
    return (query.new_empty((*query.shape[:-1], value.shape[-1])),)


EAGER = register("torch.eager", Operation(_eager_forward, _eager_backward, _eager_empty))


def _blocks_forward(
    plan: EagerPlan, arrays: tuple[torch.Tensor, ...], backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, *mask_arrays = arrays
    call = Call(query, key, value, backend.namespace, backend, unflatten(plan.mask, mask_arrays), scale=plan.scale)
    return blockwise(call._replace(starts=plan.starts))


# Of which `repair` computes the results alone.
BLOCKS = register("torch.blocks", Operation(_blocks_forward, _eager_backward, _eager_empty))
