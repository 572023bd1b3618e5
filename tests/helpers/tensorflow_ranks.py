"""A program of its own on two logical processors of TensorFlow, which share a sequence."""

import functools

import tensorflow as tf
from shard_helpers import check_close, check_told, inputs, joined, of_rank, whole

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


def main():
    """Compare all cases with one device."""
    strategy, backend = two_replicas(), ac.backend.get_backend("tensorflow")
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
        found = ranks[-1] if is_merged else joined(ranks, split, expected)
        check_close(found, expected, 0 if arithmetic == "reproducible" else 1e-13)
    check_graph(strategy)
    check_errors(strategy)
    check_told(undifferentiated(strategy), 2)


def check_graph(strategy):
    """One program for all replicas has the gradients of one device."""
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
    expected = dict(enumerate(x.numpy() for x in gradients(*wholes)))
    for rank in zip(*map(strategy.experimental_local_results, found), strict=True):
        check_close(dict(enumerate(x.numpy() for x in rank)), expected)


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


def check_errors(strategy):
    """Groups that are none are named, and strategies that would send from rank to rank, on each of them."""
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
    assert told[0] == "expected the group of shards as a tf.distribute.Strategy; got str"
    assert told[1] == "expected a call with shards inside of MirroredStrategy.run; got one outside"
    sent = "ranks of tensorflow cannot send to each other: 'gather' has the same numbers"
    assert [text.endswith(sent) for text in told[2:]] == [True] * 4


if __name__ == "__main__":
    main()
