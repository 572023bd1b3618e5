"""Loops over blocks that XLA runs: traced once, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_core._typing import Array

__all__ = ["JaxLoops"]


class JaxLoops:
    """Loops of `jax.lax`; a stack is an array whose first axis counts blocks."""

    traced = True

    def exp_difference(self, x: Array, y: Array) -> Array:
        """The exponential of a difference."""
        return jnp.exp(x - y)

    def loop(self, start: Any, stop: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
        """Run a body from start to before stop."""
        return jax.lax.fori_loop(jnp.int32(start), jnp.int32(stop), body, state)

    def choose(self, condition: Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Run one of two functions."""
        return jax.lax.cond(condition, then, otherwise)

    def item(self, x: Any, index: Any) -> Any:
        """The entry at an index of the first axis."""
        return jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False)

    def cut(self, x: Array, size: int) -> Array:
        """The blocks of an array along axis -2, side by side in memory."""
        *dims, length, width = x.shape
        return jnp.moveaxis(x.reshape(*dims, length // size, size, width), -3, 0)

    def block(self, x: Array, index: Any, size: int, axis: int) -> Array:
        """The block at an index along an axis."""
        return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=x.ndim + axis)

    def read(self, x: Array) -> Any:
        """Raise: values are traced."""
        raise TypeError("expected nothing to be read while a function is traced")

    def stack(self, count: Any, zero: Callable[[Any], Array]) -> Any:
        """So many blocks of zeros."""
        block = jax.eval_shape(zero, 0)
        return jnp.zeros((count, *block.shape), dtype=block.dtype)

    def add(self, stack: Any, index: Any, block: Array) -> Any:
        """Add to one block."""
        return stack.at[index].add(block)

    def join(self, stack: Any, count: Any, axis: int) -> Any:
        """Join runs of blocks along an axis."""
        *dims, width = stack.shape
        apart = jnp.moveaxis(stack.reshape(dims[0] // count, count, *dims[1:], width), 1, axis - 1)
        shape = list(stack.shape)
        shape[0], shape[axis] = dims[0] // count, count * stack.shape[axis]
        return apart.reshape(shape)

    def array(self, stack: Any) -> Array:
        """The blocks as one array."""
        return stack
