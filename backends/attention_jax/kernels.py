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
from attention_core.masks import Band

EXCLUDED = float(-2 << 40)  # added for -inf, as cuDNN subtracts such numbers from each other; JAX takes this one, too
BOUND = 1e11  # of scores and biases, to which EXCLUDED is as good as -inf


class DotProduct(Kernel):
    """`jax.nn.dot_product_attention` by cuDNN, on a GPU."""

    name = "jax.nn.dot_product_attention, implementation='cudnn'"

    takes = Takes(("float16", "bfloat16"), options=("bias",), masks=("causal", "window", "lengths"), one_width=True)

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
        if band.has_stop and call.bias is not None:
            return "is not known to leave out rows by a bias and by lengths (line 4)"
        return None if call.bias is None else _refusal_of_bias(call)

    def attend(self, call: Call) -> jax.Array:
        """The output of the kernel; that of blocks where the program is to look, and something could leak.

        Of scores next to a bias, it looks in any case: numbers that stand for -inf have a bound.
        """
        if call.bias is None and (call.mask is None or call.assume_finite is not False):
            return _cudnn(call if call.assume_finite else _with_hidden_cleared(call))
        return jax.lax.cond(_is_safe(call), lambda: _cudnn(call), lambda: _blocks(call))


def _refusal_of_bias(call: Call) -> str | None:
    bias: Any = call.bias
    dims = shape(call.query, xp=call.xp)
    if bias.dtype != jnp.bfloat16 or call.query.dtype != jnp.bfloat16:
        return "takes a bias in bfloat16 alone, with query: others have no number for -inf (line 4)"
    if math.prod(bias.shape[:-3]) != 1:
        return "gives no gradient of a bias that differs between samples, in some versions"
    if dims[-2] % 2 or call.key.shape[-2] % 2:
        return "takes a bias of even lengths"
    return None


def _is_safe(call: Call) -> jax.Array:
    """Whether query, key and value are finite, and nothing that is masked is attended to instead of what is not."""
    is_safe = inputs_are_finite(call)
    if call.bias is None:
        return is_safe
    scale: Any = default_scale(call.query, call.xp) if call.scale is None else call.scale
    sizes = [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (call.query, call.key, _finite_bias(call.bias, 0.0))]
    scores = sizes[0] * sizes[1] * call.query.shape[-1] * jnp.abs(jnp.asarray(scale, jnp.float32))
    return is_safe & (scores < BOUND) & (sizes[2] < BOUND)


def _finite_bias(bias: jax.Array, number: float) -> jax.Array:
    """A bias with a number for -inf."""
    return jnp.where(bias == -math.inf, jnp.asarray(number, bias.dtype), bias)


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
    band, options, kept = bounds_of(call.mask), dict[str, Any](), list[Any]()
    left, right = band.ends
    if left is not None:
        options["local_window_size"] = (-left, 0)
    if band.has_stop:
        lengths = jnp.broadcast_to(jnp.asarray(band.stop), tuple(leading)).reshape(batch)
        # At least one key is attended to, whose gradient is that of an output that is not used.
        options["key_value_seq_lengths"] = jnp.clip(lengths, 1, call.key.shape[-2]).astype(jnp.int32)
        kept.append((lengths > 0)[:, None, None, None])
    if call.bias is not None:
        bias = jnp.broadcast_to(call.bias, (1, heads, rows, call.key.shape[-2]))
        options["bias"] = _finite_bias(bias, EXCLUDED)
        kept.append(jnp.moveaxis(_has_keys(bias, band), 1, 2)[..., None])
    output = jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=right == 0, implementation="cudnn", **options
    )
    for rows_with_keys in kept:  # the kernel averages values for the others
        output = jnp.where(rows_with_keys, output, jnp.zeros((), output.dtype))
    return jnp.moveaxis(output, -2, -3).reshape(*leading, heads, rows, width)


def _has_keys(bias: jax.Array, band: Band) -> jax.Array:
    """Whether a bias leaves any key to a query (1, H, M), among those that flag, window and lengths leave."""
    some = bias != -math.inf
    rows, columns = bias.shape[-2:]
    left, right = band.ends
    if right is not None:
        some &= jnp.tri(rows, columns, dtype=bool)
    if left is not None:
        some &= ~jnp.tri(rows, columns, left - 1, dtype=bool)
    return jnp.any(some, axis=-1)
