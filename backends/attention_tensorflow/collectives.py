"""Collectives of TensorFlow, between the replicas of a `tf.distribute.Strategy`, which cannot send to each other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from attention_core.backend import Array, Collectives


class TensorFlowCollectives(Collectives):
    """The collectives of a replica context, in which the group is the strategy."""

    strategies = ("gather", "merge")

    def name_of(self, group: Any, /) -> str:
        """The name of a strategy, inside of its ``run``."""
        if not isinstance(group, tf.distribute.Strategy):
            kind = type(group).__name__
            raise TypeError(f"expected the group of shards as a tf.distribute.Strategy; got {kind}")
        name = type(group).__name__
        if tf.distribute.in_cross_replica_context() or tf.distribute.get_strategy() is not group:
            raise ValueError(f"expected a call with shards inside of {name}.run; got one outside")
        return name

    def size(self, group: str, /) -> int:
        return int(_context().num_replicas_in_sync)

    def rank(self, group: str, /) -> int | Array:
        rank = _context().replica_id_in_sync_group
        number = tf.get_static_value(rank)
        return rank if number is None else int(number)

    def all_gather(self, x: Array, group: str, /) -> Array:
        gathered = _context().all_gather(tf.expand_dims(x, 0), axis=0)
        return tf.ensure_shape(gathered, (self.size(group), *x.shape))

    def sum_scatter(self, x: Array, group: str, /) -> Array:
        """The sum over replicas of their entry for this one: the others are summed, too."""
        return self.total(x, group)[self.rank(group)]

    def largest(self, x: Array, group: str, /) -> Array:
        """The maxima of the tensors of all replicas, which are gathered: no reduction is a maximum."""
        return tf.reduce_max(self.all_gather(x, group), 0)

    def total(self, x: Array, group: str, /) -> Array:
        return _context().all_reduce(tf.distribute.ReduceOp.SUM, x)


def _context() -> Any:
    return tf.distribute.get_replica_context()
