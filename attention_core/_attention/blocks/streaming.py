"""Attention over blocks as an operation with a gradient of its own."""

from __future__ import annotations

from attention_core._arrays import Array, shape
from attention_core._attention.blocks.backward import backward
from attention_core._attention.blocks.forward import empty_results, forward
from attention_core._attention.blocks.plan import make_plan
from attention_core._attention.call import Call, upcast_call
from attention_core._backend import Operation, register


def blockwise(call: Call) -> tuple[Array, Array]:
    """Attention over blocks: output (..., H, M, E) and logsumexp (..., H, M), in the type of the computation."""
    xp, call = call.xp, upcast_call(call)
    plan, operands = make_plan(call)
    output, logsumexp = call.backend.custom_gradient(BLOCKWISE, plan, operands.arrays())
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    width = shape(call.value, xp=xp)[-1]
    return xp.reshape(output, (*leading, heads, rows, width)), xp.reshape(logsumexp, (*leading, heads, rows))


BLOCKWISE = register("blockwise", Operation(forward, backward, empty_results))
