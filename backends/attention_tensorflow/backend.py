"""TensorFlow as a backend: eager, as a graph, and compiled by XLA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, record  # no public name tells what looks at operations, or all tapes
from tensorflow.python.saved_model import save_context  # no public name tells that a program is being saved

from attention_core.backend import DIFFERENTIATED_ONCE, Array, Backend, Operation, Tuning, explain_class
from attention_numpy.adapter import Adapter
from attention_numpy.trees import (
    NumpyArray,
    known_mode,
    map_arrays,
    value_and_grad,
)
from attention_tensorflow import namespace as tensorflow_namespace, programs
from attention_tensorflow.loops import TensorFlowLoops

__all__ = ["TensorFlowBackend", "backend"]

explain_class(
    "tensorflow", "RaggedTensor", ": its to_tensor() is one, of which KeyLengths hides padding", is_array=True
)
explain_class("tensorflow", "SparseTensor", ": tf.sparse.to_dense makes one", is_array=True)
explain_class("tensorflow", "IndexedSlices", ": tf.convert_to_tensor makes one", is_array=True)


class TensorFlowBackend(Adapter):
    """The backend of TensorFlow."""

    packages = ("numpy", "ml_dtypes", "keras")
    modes: tuple[str, ...] = ("eager", "graph", "xla")
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
    tuning = Tuning(
        queries=4096,
        keys=512,
        min_queries=64,
        dense_below=2048 * 2048,
        dense_most=2**27,
        structured_below=512 * 512,
        backward_keys=256,
        query_chunk=128,
    )
    value_and_grad = value_and_grad

    def versions(self) -> dict[str, str]:
        """Versions of TensorFlow, of Keras where it is installed, and of what tensors pass through."""
        return {"tensorflow": tf.__version__, **super().versions()}

    def owns(self, array: Array, /) -> bool:
        """Whether this is a tensor or a variable; ragged and sparse tensors are not, nor are those of Keras."""
        return isinstance(array, (tf.Tensor, tf.Variable))

    def is_concrete(self, array: Array, /) -> bool:
        """Whether the values can be read now: not those of a graph, nor any while a graph is traced."""
        return tf.executing_eagerly() and not tf.is_symbolic_tensor(array)

    def devices(self) -> list[str]:
        """Names of the devices, such as ``CPU:0``; a GPU comes first, as TensorFlow prefers it."""
        return tensorflow_namespace.__array_namespace_info__().devices()

    def placed(self, array: NumpyArray, device: str | None, /) -> Array:
        return tensorflow_namespace.asarray(array, device=device)

    def to_numpy(self, tree: Any, /) -> Any:
        return map_arrays(lambda array: np.asarray(array.numpy()), tree)  # TensorFlow copies, to be safe

    def compile(self, function: Callable[..., Any], /, *, mode: str | None = None) -> Callable[..., Any]:
        """Make a graph of a function, for XLA or not; Python numbers among its arguments become part of the graph."""
        mode = known_mode(mode, self.modes)
        if mode == "eager":
            return function
        # The functions loop over Python numbers only, so that AutoGraph would rewrite their source for nothing.
        return tf.function(function, autograph=False, jit_compile=mode == "xla")  # type: ignore[no-any-return]

    def has_gradient(self, array: Array, /) -> bool:
        """Whether a tape that is open here records what is computed from a tensor; one around a graph is not seen."""
        return bool(record.should_record_backprop([tf.convert_to_tensor(array)]))  # of a variable, what is read

    def stop_gradient(self, array: Array, /) -> Array:
        return tf.stop_gradient(array)

    def with_tangent(self, function: Callable[..., Array], tangent: Callable[..., Array], *arrays: Array) -> Array:

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def computed(*arrays: Array) -> Any:
            value = function(*arrays)
            found = tf.stop_gradient(value)  # here, as an outer tape differentiates by all that goes backward from here

            def gradients_of(cotangent: Array) -> Any:
                """A linear function is transposed by its gradient, wherever that is taken."""
                zeros = [tf.zeros_like(array) if array.dtype.is_floating else None for array in arrays]
                watched = [zero for zero in zeros if zero is not None]
                with self.without_warnings(), tf.GradientTape() as tape:
                    tape.watch(watched)
                    directional = tangent(arrays, found, zeros)
                gradients = iter(tape.gradient(directional, watched, cotangent))
                return [None if zero is None else next(gradients) for zero in zeros]

            return value, gradients_of

        return computed(*arrays)

    def without_warnings(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which `tf.debugging.enable_check_numerics` raises for no number: a masked score is -inf."""
        return _unseen(context.context()) if context.context().op_callbacks else contextlib.nullcontext()

    def draw_seed(self, source: Any, /) -> Any:
        """Draw two words from a generator of TensorFlow or Keras."""
        if isinstance(source, tf.random.Generator):
            return source.uniform_full_int((2,), tf.int32)
        return source.next() if type(source).__name__ == "SeedGenerator" else source

    def custom_gradient(self, operation: Operation, plan: Any, arrays: tuple[Array, ...], /) -> tuple[Array, ...]:
        """Compute forward, and record how to go backward."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def streamed(*arrays: Array) -> Any:
            results = programs.run(self, operation, plan, arrays)
            ends = len(arrays), len(arrays) + len(results)

            @tf.custom_gradient  # type: ignore[untyped-decorator]
            def gradients(*tensors: Array) -> Any:
                parts = tensors[: ends[0]], tensors[ends[0] : ends[1]], tensors[ends[1] :]
                found = programs.run(self, operation, plan, *parts)
                return [gradient for gradient in found if gradient is not None], lambda *_: _refused(tensors)

            def gradients_of(*cotangents: Array) -> Any:
                with self.without_warnings():
                    found = iter(gradients(*arrays, *results, *cotangents))
                return [next(found) if array.dtype.is_floating else None for array in arrays]

            return results, gradients_of

        return streamed(*arrays)  # type: ignore[no-any-return]

    def vjp(
        self, function: Callable[..., Array], /, *arrays: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
        tensors = [tf.identity(array) for array in arrays]  # an array given twice has two gradients
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)

        def gradients_of(cotangent: Array) -> tuple[Array, ...]:
            gradients = tape.gradient(
                value, tensors, output_gradients=cotangent, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            return tuple(map(tf.convert_to_tensor, gradients))  # that of `take` comes as slices

        return value, gradients_of


@contextlib.contextmanager
def _unseen(current: Any) -> Iterator[None]:
    """A context in which nothing looks at the operations that are run."""
    callbacks = list(current.op_callbacks)
    for callback in callbacks:
        current.remove_op_callback(callback)
    try:
        yield
    finally:
        for callback in callbacks:
            current.add_op_callback(callback)


def _refused(tensors: tuple[Array, ...]) -> Any:
    if not save_context.in_save_context():
        raise NotImplementedError(DIFFERENTIATED_ONCE)
    # To save a program is to trace the gradients of all that it holds, gradients included: that of those raises if run.
    with tf.control_dependencies([tf.debugging.Assert(False, [DIFFERENTIATED_ONCE])]):
        return [tf.zeros_like(tensor) for tensor in tensors]


backend: Backend = TensorFlowBackend(tensorflow_namespace, TensorFlowLoops(tensorflow_namespace))
