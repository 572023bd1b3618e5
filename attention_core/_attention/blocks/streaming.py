"""Attention over blocks as an operation with a gradient of its own."""

from __future__ import annotations

from typing import Any

from attention_core._arrays import Array, cast_to, compute_dtype_name, is_floating, on_device_of, shape, upcast
from attention_core._attention.blocks.backward import backward
from attention_core._attention.blocks.forward import empty_results, forward
from attention_core._attention.blocks.plan import Plan, make_plan, unpack_operands
from attention_core._attention.call import Call, default_scale, upcast_call
from attention_core._backend import Backend, Operation, is_concrete, register


def blockwise(call: Call) -> tuple[Array, Array]:
    """Attention over blocks: output (..., H, M, E) and logsumexp (..., H, M), in the type of the computation."""
    xp, call = call.xp, upcast_call(call)
    plan, operands = make_plan(call)
    output, logsumexp = call.backend.custom_gradient(BLOCKWISE, plan, operands.arrays())
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    width = shape(call.value, xp=xp)[-1]
    return xp.reshape(output, (*leading, heads, rows, width)), xp.reshape(logsumexp, (*leading, heads, rows))


BLOCKWISE = register("blockwise", Operation(forward, backward, empty_results))


# What is computed only if it turns out to be needed


def blockwise_unless(spared: Array, call: Call) -> Array:
    """The output of `blockwise`, in the type of the query, unless a 0-d array turns out true: then any numbers.

    Arrays are widened and scaled where that is needed only. The scale is a Python number.
    """
    plan, operands = make_plan(call)
    operands = operands._replace(query=call.xp.reshape(call.query, shape(operands.query, xp=call.xp)))
    scale: Any = default_scale(call.query, call.xp) if call.scale is None else call.scale
    arrays = operands.arrays()
    output, _ = call.backend.custom_gradient(SPARE, plan._replace(score_scale=float(scale)), (spared, *arrays))
    return cast_to(call.xp.reshape(output, (*shape(call.query, xp=call.xp)[:-1], -1)), call.query.dtype, xp=call.xp)


def _is_spared(spared: Array) -> bool:
    return is_concrete(spared) and bool(spared)


def _upcast_and_scale(plan: Plan, arrays: tuple[Array, ...], xp: Any) -> tuple[Array, ...]:
    query, *others = upcast(arrays, xp=xp)
    return xp.multiply(query, plan.score_scale), *others


def _spare_forward(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array]:
    spared, *others = arrays
    if _is_spared(spared):
        return _spare_results(plan, arrays, backend)
    return forward(plan, _upcast_and_scale(plan, tuple(others), backend.namespace), backend)


def _spare_results(plan: Plan, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, Array]:
    xp, operands = backend.namespace, unpack_operands(plan, arrays[1:])
    *dims, _ = shape(operands.query, xp=xp)
    width = shape(operands.value, xp=xp)[-1]
    like = {"dtype": getattr(xp, compute_dtype_name(operands.query.dtype)), **on_device_of(operands.query)}
    return xp.empty((*dims, width), **like), xp.empty(tuple(dims), **like)


def _spare_backward(
    plan: Plan,
    arrays: tuple[Array, ...],
    results: tuple[Array, Array],
    cotangents: tuple[Array, Array],
    backend: Backend,
) -> tuple[Array | None, ...]:
    xp, (spared, *others) = backend.namespace, arrays
    if _is_spared(spared):
        return None, *(xp.empty_like(array) if is_floating(array) else None for array in others)
    wide = _upcast_and_scale(plan, tuple(others), xp)
    query, *found = backward(plan, wide, results, cotangents, backend)
    gradients = (xp.multiply(query, plan.score_scale), *found)
    return None, *(
        None if gradient is None else cast_to(gradient, array.dtype, xp=xp)
        for array, gradient in zip(others, gradients, strict=True)
    )


SPARE = Operation(_spare_forward, _spare_backward, _spare_results)
