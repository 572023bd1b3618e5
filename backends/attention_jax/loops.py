"""Loops over blocks that XLA runs: traced once, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_core.backend import Array, Loops, Namespace
from attention_jax.sharding import vary


class JaxLoops(Loops):
    """Loops of `jax.lax`; a stack is an array whose first axis counts blocks.

    Under `jax.shard_map`, states vary over the same axes of the mesh as the arrays that go into them.
    """

    traced = True

    def __init__(self, xp: Namespace, axes: frozenset[str] = frozenset()) -> None:
        super().__init__(xp)
        self.axes = axes

    def loop(
        self,
        start: Any,
        stop: Any,
        body: Callable[[Any, Any], Any],
        state: Any,
        *,
        proceed: Callable[[Any], Array] | None = None,
    ) -> Any:

        def step(index: Any, state: Any) -> Any:
            return vary(body(index, state), self.axes)

        state, first, last = vary(state, self.axes), jnp.int32(start), jnp.int32(stop)
        if proceed is None:
            return jax.lax.fori_loop(first, last, step, state)
        return jax.lax.while_loop(
            lambda carry: jnp.logical_and(carry[0] < last, proceed(carry[1])),
            lambda carry: (carry[0] + jnp.int32(1), step(*carry)),
            (first, state),
        )[1]

    def cond(self, condition: Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return jax.lax.cond(condition, lambda: vary(then(), self.axes), lambda: vary(otherwise(), self.axes))

    def block_at(self, x: Any, index: Any) -> Any:
        return jnp.squeeze(_sliced(x, index, 1, 0), axis=0)

    def block(self, x: Array, index: Any, size: int, axis: int) -> Array:
        return _sliced(x, index * size, size, x.ndim + axis)

    def norm(self, x: Array) -> Array:
        return jnp.linalg.norm(x, axis=-1)

    def zero_blocks(self, count: Any, zero: Callable[[Any], Array], after: Array | None = None) -> Any:
        """So many blocks of zeros: XLA would make them first of all, if they did not depend on what comes later."""
        block = jax.eval_shape(zero, 0)
        number: Any = 0
        if after is not None:
            one = after[(0,) * after.ndim]
            number = jnp.abs(jnp.where(jnp.isfinite(one), one, 1)) * 0
        return jnp.full((count, *block.shape), number, dtype=block.dtype)

    def add_block(self, stack: Any, index: Any, block: Array) -> Any:
        return stack.at[index].add(block)

    def concat_blocks(self, stack: Any, count: Any, axis: int) -> Any:
        *dims, width = stack.shape
        apart = jnp.moveaxis(stack.reshape(dims[0] // count, count, *dims[1:], width), 1, axis - 1)
        shape = list(stack.shape)
        shape[0], shape[axis] = dims[0] // count, count * stack.shape[axis]
        return apart.reshape(shape)

    def stack_blocks(self, stack: Any) -> Array:
        return stack


def _sliced(x: Array, start: Any, size: int, axis: int) -> Array:
    """A slice along one axis, from a place that is not negative."""
    sizes = [size if dim == axis else whole for dim, whole in enumerate(x.shape)]
    # Where it starts: integers of one type, whatever JAX is told that Python's are.
    starts = [jnp.asarray(start, jnp.int32) if dim == axis else np.int32(0) for dim in range(x.ndim)]
    return jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
