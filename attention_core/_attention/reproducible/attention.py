"""Attention in reproducible arithmetic as an operation with a gradient of its own."""

from __future__ import annotations

from attention_core._arrays import Array, shape
from attention_core._attention.call import Call
from attention_core._attention.reproducible.backward import backward
from attention_core._attention.reproducible.forward import arrange, empty_results, forward
from attention_core._backend import Operation, register


def reproducible_attention(call: Call) -> tuple[Array, Array]:
    """Output (..., H, M, E) and logsumexp (..., H, M) in float32, of which every library computes the same bits."""
    xp = call.xp
    output, logsumexp, _ = call.backend.custom_gradient(REPRODUCIBLE, *arrange(call))
    *leading, heads, rows, _ = shape(call.query, xp=xp)
    width = shape(call.value, xp=xp)[-1]
    return xp.reshape(output, (*leading, heads, rows, width)), xp.reshape(logsumexp, (*leading, heads, rows))


REPRODUCIBLE = register("reproducible", Operation(forward, backward, empty_results, needs_float64=True))
