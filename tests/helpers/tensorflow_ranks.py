"""A program of its own on two logical processors of TensorFlow, which share a sequence; it writes what it found."""

import functools
import pickle
import sys
from pathlib import Path

import tensorflow as tf
from shard_helpers import inputs, joined, of_rank, whole

import attention_core as ac

CASES = [
    ("causal", "zigzag", "gather", 13, "fast", "float64"),
    ("dropout", "contiguous", "gather", 13, "fast", "float64"),
    ("bias of bhmn", "zigzag", "gather", 13, "fast", "float64"),
    ("causal", "zigzag", "gather", 13, "reproducible", "float32"),
    ("causal", "zigzag", "merge", 13, "reproducible", "float32"),
    ("sinks", "contiguous", "merge", 13, "fast", "float64"),
]


@functools.cache
def two_replicas():
    """A strategy of two logical processors: another one in this process would count its collectives from the first."""
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def main(path):
    """Run all cases."""
    strategy, backend, found = two_replicas(), ac.backend.get_backend("tensorflow"), {}
    for case in CASES:
        name, split, way, length, arithmetic, dtype = case
        more = {"length": length, "arithmetic": arithmetic, "dtype": dtype, "put": tf.constant}
        ranks, shards = [None, None], ac.Shards(strategy, split, way, length)

        def of_replica(shards=shards, name=name, more=more, ranks=ranks):
            rank = backend.collectives.rank(backend.collectives.name_of(strategy))
            ranks[rank] = of_rank(backend, shards, name, **more)

        strategy.run(of_replica)
        is_merged = way == "merge"
        expected = whole(backend, name, differentiate=not is_merged, **more)
        found[case] = ranks[-1] if is_merged else joined(ranks, split, expected), expected
    found["graph"] = in_a_graph(strategy)
    found["errors"] = errors(strategy)
    found["differentiated"] = undifferentiated(strategy)
    Path(path).write_bytes(pickle.dumps(found))


def in_a_graph(strategy):
    """Gradients of one program for all replicas, and those of one device."""
    wholes = tuple(map(tf.constant, inputs(length=13)[:3]))

    def gradients(*arrays, **options):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            total = tf.reduce_sum(ac.scaled_dot_product_attention(*arrays, is_causal=True, **options) ** 2)
        return tape.gradient(total, arrays)

    def of_replica():
        shards = ac.Shards(strategy, strategy="gather", length=13)
        parts = [ac.shard(x, shards) for x in wholes]
        return [ac.unshard(x, shards) for x in gradients(*parts, shards=shards)]

    found = tf.function(lambda: strategy.run(of_replica), autograph=False)()
    ranks = zip(*map(strategy.experimental_local_results, found), strict=True)
    return [[x.numpy() for x in rank] for rank in ranks], [x.numpy() for x in gradients(*wholes)]


def undifferentiated(strategy):
    """What each replica is told of a differentiated merge."""
    told = []

    def of_replica():
        x = tf.zeros((1, 2, 4, 3))
        with tf.GradientTape() as tape:
            tape.watch(x)
            try:
                ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards(strategy, strategy="merge"))
            except NotImplementedError as error:
                told.append(str(error))

    strategy.run(of_replica)
    return told


def errors(strategy):
    """What is told of groups that are none, and of strategies that would send from rank to rank."""
    x, told = tf.zeros((1, 2, 4, 3)), []

    def attend(group, way="auto"):
        try:
            ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards(group, strategy=way))
        except (TypeError, ValueError) as error:
            told.append(str(error))

    attend("group")
    attend(strategy)
    for way in ("heads", "ring"):
        strategy.run(attend, (strategy, way))
    return told


if __name__ == "__main__":
    main(sys.argv[1])
