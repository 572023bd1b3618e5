"""Print the memory of a process that calls attention on TensorFlow with one new shape after the other.

``python tools/memory_of_shapes.py [core | plain]``: with the core, or with TensorFlow's own functions alone.
"""

import sys
import time
from pathlib import Path

import tensorflow as tf

from attention_core import scaled_dot_product_attention

CALLS, STEP = 3000, 300


def plain(query, key, value):
    """Attention of TensorFlow alone."""
    scores = tf.matmul(query, key, transpose_b=True) / query.shape[-1] ** 0.5
    return tf.matmul(tf.nn.softmax(scores), value)


def resident():
    """MiB of resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20


def main(attention):
    """Call with up to 64 queries and ever more keys."""
    started = time.perf_counter()
    for index in range(CALLS + 1):
        query, key = tf.ones((1, 2, 8 + index % 64, 8)), tf.ones((1, 2, 8 + index // 64, 8))
        attention(query, key, key)
        if index % STEP == 0:
            print(f"{index:5} calls  {resident():5} MiB  {time.perf_counter() - started:6.1f} s", flush=True)


if __name__ == "__main__":
    main(plain if sys.argv[1:] == ["plain"] else scaled_dot_product_attention)
