"""Loops over blocks that a graph runs: traced once, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from attention_core.backend import Array, Loops
from attention_tensorflow.programs import is_for_xla


class TensorFlowLoops(Loops):
    """Loops of `tf.while_loop`; a stack is a `tf.TensorArray`, which is written to in place."""

    traced = True

    @property
    def softmax(self) -> Callable[[Array], Array] | None:  # type: ignore[override]
        """TensorFlow's own, but in programs for XLA, which fuses exponentials with what is done to them."""
        return None if is_for_xla() else _softmax

    def loop(
        self,
        start: Any,
        stop: Any,
        body: Callable[[Any, Any], Any],
        state: Any,
        *,
        proceed: Callable[[Any], Array] | None = None,
    ) -> Any:
        leaves = [leaf for leaf in tf.nest.flatten(state) if leaf is not None]

        def filled(values: Any) -> Any:
            remaining = iter(values)
            return tf.nest.map_structure(lambda leaf: None if leaf is None else next(remaining), state)

        def step(index: Array, *values: Any) -> Any:
            found = tf.nest.flatten(body(index, filled(values)))
            return index + 1, *map(_shaped, (leaf for leaf in found if leaf is not None), values)

        first, last = (tf.convert_to_tensor(bound, tf.int32) for bound in (start, stop))

        def goes_on(index: Array, *values: Any) -> Array:
            return index < last if proceed is None else tf.logical_and(index < last, proceed(filled(values)))

        _, *values = tf.while_loop(goes_on, step, (first, *leaves), parallel_iterations=1)
        return filled(values)

    def cond(self, condition: Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        results = tf.cond(condition, then, otherwise)
        if not tf.executing_eagerly():
            _keep_whole(tf.nest.flatten(results)[0])
        return results

    def block(self, x: Array, index: Any, size: int, axis: int) -> Array:
        # A slice from one tensor to another has no size that XLA could see.
        shape = x.shape.as_list()
        shape[axis] = size if isinstance(size, int) else None
        sizes = [tf.shape(x)[at] if dim is None else dim for at, dim in enumerate(shape)]
        sizes[axis] = size
        starts = [0] * len(shape)
        starts[axis] = index * size
        return tf.ensure_shape(tf.slice(x, tf.stack(starts), sizes), shape)

    def zero_blocks(self, count: Any, zero: Callable[[Any], Array], after: Array | None = None) -> Any:
        block = zero(0)
        array = tf.TensorArray(block.dtype, size=count, clear_after_read=False, element_shape=block.shape)
        return array.unstack(tf.zeros(tf.concat([[count], tf.shape(block)], 0), block.dtype))

    def add_block(self, stack: Any, index: Any, block: Array) -> Any:
        return stack.write(index, stack.read(index) + block)

    def concat_blocks(self, stack: Any, count: Any, axis: int) -> Any:
        blocks = self.stack_blocks(stack)
        rank, sizes = blocks.shape.rank, tf.unstack(tf.shape(blocks))
        number = sizes[0] // tf.maximum(count, 1)  # of runs; of nothing there are none
        runs = tf.reshape(blocks, [number, count, *sizes[1:]])
        order = [dim for dim in range(rank + 1) if dim != 1]
        order.insert(rank + axis, 1)
        static = [None, *blocks.shape.as_list()[1:]]
        static[axis] = None
        sizes[0], sizes[axis] = number, count * sizes[axis]
        return tf.ensure_shape(tf.reshape(tf.transpose(runs, order), sizes), static)

    def stack_blocks(self, stack: Any) -> Array:
        return stack.stack() if isinstance(stack, tf.TensorArray) else stack


def _softmax(x: Array) -> Array:
    """TensorFlow's softmax, whose kernel on CPUs takes no more than five axes."""
    if x.shape.rank <= 5:
        return tf.nn.softmax(x)
    dims = tf.shape(x)
    rows = tf.reshape(x, [tf.reduce_prod(dims[:-1]), dims[-1]])
    return tf.ensure_shape(tf.reshape(tf.nn.softmax(rows), dims), x.shape)


def _keep_whole(result: Array) -> None:
    """Have a graph call the branches of a condition, as each program with both of them in place is optimized anew."""
    operation = result.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    operation._set_attr("_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False))  # `tf.cond` has no option


def _shaped(value: Any, before: Any) -> Any:
    """A value of a state with what is known of its shape, which must not change from step to step."""
    return value if isinstance(value, tf.TensorArray) else tf.ensure_shape(value, before.shape)
