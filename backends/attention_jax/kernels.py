"""JAX's fused attention, which is cuDNN's, and when it gives the answer of the definition."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from attention_core.backend import (
    Call,
    Verdict,
    blockwise,
    default_scale,
    is_top_left_causal,
    products_are_finite,
    shape,
)

__all__ = ["DotProduct"]

HALVES = (jnp.float16, jnp.bfloat16)


class DotProduct:
    """`jax.nn.dot_product_attention` by cuDNN, on a GPU."""

    name = "jax.nn.dot_product_attention, implementation='cudnn'"

    def judge(self, call: Call) -> Verdict:
        """Say why the kernel would not give the answer, from shapes and dtypes alone."""
        return Verdict(self._refusal(call))

    def _refusal(self, call: Call) -> str | None:
        if jax.default_backend() != "gpu":
            return "needs a GPU"
        if call.query.dtype not in HALVES:
            return "computes in 16 bits only (line 8)"
        for name in ("softcap", "score_mod", "bias"):
            if getattr(call, name) is not None:
                return f"has no {name}, or is not known to treat it as the definition does (line 7)"
        if call.dropout is not None and call.dropout.rate:
            return "drops no weights (line 11)"
        if call.mask is not None and not is_top_left_causal(call.mask):
            return "averages all values where a mask leaves nothing, and would need it as an array (line 4)"
        if not all(isinstance(start, int) and start == 0 for start in call.starts):
            return "counts positions from 0 (line 3)"
        query, key, value = (shape(x, xp=call.xp) for x in (call.query, call.key, call.value))
        known = all(isinstance(size, int) for size in (*query, *key, *value))
        if (
            not known
            or query[-1] != value[-1]
            or query[-1] % 8
            or not 0 < query[-1] <= 128
            or 0 in (query[-2], key[-2])
        ):
            return "takes keys and values of one width, a multiple of 8 up to 128, and known lengths"
        return None

    def attend(self, call: Call) -> jax.Array:
        """The output of the kernel, or that of blocks if something that is masked could leak from it."""
        if call.mask is None or call.assume_finite:
            return _cudnn(call)
        return jax.lax.cond(products_are_finite(call), lambda: _cudnn(call), lambda: _blocks(call))


def _blocks(call: Call) -> jax.Array:
    return blockwise(call)[0].astype(call.query.dtype)


def _cudnn(call: Call) -> jax.Array:
    *leading, heads, rows, width = call.query.shape
    batch = math.prod(leading)
    # The axes of the kernel are batch, length, head, width.
    query, key, value = (
        jnp.moveaxis(x.reshape(batch, *x.shape[-3:]), -3, -2) for x in (call.query, call.key, call.value)
    )
    scale: Any = default_scale(call.query, call.xp) if call.scale is None else call.scale
    if not isinstance(scale, float):
        query, scale = query * jnp.asarray(scale, query.dtype), 1.0
    output = jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=call.mask is not None, implementation="cudnn"
    )
    return jnp.moveaxis(output, -2, -3).reshape(*leading, heads, rows, width)
