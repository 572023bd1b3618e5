"""JAX's fused attention, which is cuDNN's, and when it gives the answer of the definition.

Its logsumexp is not taken: JAX rounds it to the 16 bits of the output, and does not differentiate by it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from attention_core.backend import (
    Call,
    Kernel,
    Takes,
    Verdict,
    blockwise,
    bounds_of,
    default_scale,
    inputs_are_finite,
    shape,
)


class DotProduct(Kernel):
    """`jax.nn.dot_product_attention` by cuDNN, on a GPU."""

    name = "jax.nn.dot_product_attention, implementation='cudnn'"

    takes = Takes(("float16", "bfloat16"), masks=("causal", "window", "lengths"), one_width=True)

    def judge(self, call: Call) -> Verdict:
        """Say why the kernel would not give the answer, from shapes and dtypes alone."""
        return super().judge(call) if jax.default_backend() == "gpu" else Verdict("needs a GPU")

    def refusal(self, call: Call) -> str | None:
        """Why the kernel does not give the answer to a call that it takes."""
        if not all(isinstance(start, int) and start == 0 for start in call.starts):
            return "counts positions from 0 (line 3)"
        query, key = (shape(x, xp=call.xp) for x in call[:2])
        are_known = all(isinstance(size, int) for size in (*query, *key))
        if not are_known or query[-1] not in range(8, 129, 8) or 0 in (query[-2], key[-2]):
            return "takes a width that is a multiple of 8 up to 128, and known lengths"
        band = bounds_of(call.mask)
        if band.ends[0] is not None and band.has_stop:
            return "is not known to count windows and lengths (line 3)"
        if band.ends[0] is not None and query[-2] != key[-2]:
            return "is not known to count windows as line 3 does where there are more keys than queries, or fewer"
        return None

    def attend(self, call: Call) -> jax.Array:
        """The output of the kernel; that of blocks where the program is to look, and something could leak."""
        if call.mask is None or call.assume_finite is not False:
            return _cudnn(call if call.assume_finite else _with_hidden_cleared(call))
        return jax.lax.cond(inputs_are_finite(call), lambda: _cudnn(call), lambda: _blocks(call))


def _with_hidden_cleared(call: Call) -> Call:
    """The call with zeros for the keys and values behind its lengths, which nobody attends to."""
    band = bounds_of(call.mask)
    if not band.has_stop:
        return call
    lengths = jnp.broadcast_to(jnp.asarray(band.stop), call.key.shape[:-3])[..., None, None, None]
    is_key = jnp.arange(call.key.shape[-2])[:, None] < lengths
    key, value = (jnp.where(is_key, x, jnp.zeros((), x.dtype)) for x in (call.key, call.value))
    return call._replace(key=key, value=value)


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
    band, options = bounds_of(call.mask), dict[str, Any]()
    left, right = band.ends
    if left is not None:
        options["local_window_size"] = (-left, 0)
    if band.has_stop:
        lengths = jnp.broadcast_to(jnp.asarray(band.stop), tuple(leading)).reshape(batch)
        # At least one key is attended to, whose gradient is that of an output that is not used.
        options["key_value_seq_lengths"] = jnp.clip(lengths, 1, call.key.shape[-2]).astype(jnp.int32)
    output = jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=right == 0, implementation="cudnn", **options
    )
    if band.has_stop:  # without a key, the kernel averages values
        output = jnp.where((lengths > 0)[:, None, None, None], output, jnp.zeros((), output.dtype))
    return jnp.moveaxis(output, -2, -3).reshape(*leading, heads, rows, width)
