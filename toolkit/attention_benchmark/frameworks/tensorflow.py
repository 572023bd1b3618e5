"""TensorFlow; its peers are those of Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from attention_benchmark.frameworks import Engine, Step
from attention_tensorflow import backend


class TensorFlowEngine(Engine):
    """TensorFlow: a function and its gradients are one graph, compiled by XLA or not."""

    def wait(self, result: Any, /) -> None:
        """Wait for the GPU; on the CPU, results are computed when they are returned."""
        if "GPU" in result[0].device:
            tf.test.experimental.sync_devices()

    def peak_memory(self, step: Step, arguments: tuple[Any, ...], /) -> int | None:
        """Ask the allocator."""
        if "GPU" not in arguments[2].device:
            return None
        self.wait(step(*arguments))
        tf.config.experimental.reset_memory_stats("GPU:0")
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        self.wait(step(*arguments))
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"] - before)


engine = TensorFlowEngine(backend)
