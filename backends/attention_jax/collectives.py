"""Collectives of JAX, along an axis of the mesh under `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from attention_core.backend import Array, Collectives


class JaxCollectives(Collectives):
    """The collectives of `jax.lax`, along an axis by its name."""

    def name_of(self, group: Any, /) -> str:
        """The name of an axis, which is there under `jax.shard_map`."""
        if not isinstance(group, str):
            raise TypeError(f"expected the group of shards as the name of an axis; got {type(group).__name__}")
        try:
            lax.axis_index(group)
        except NameError as error:
            raise ValueError(
                f"expected the name of an axis under jax.shard_map; got {group!r}, which is none"
            ) from error
        return group

    def size(self, group: str, /) -> int:
        return int(lax.psum(1, group))

    def rank(self, group: str, /) -> Array:
        return lax.axis_index(group)

    def all_gather(self, x: Array, group: str, /) -> Array:
        return lax.all_gather(x, group)

    def sum_scatter(self, x: Array, group: str, /) -> Array:
        return lax.psum_scatter(x, group)

    def exchange(self, x: Array, group: str, /) -> Array:
        return lax.all_to_all(x, group, split_axis=0, concat_axis=0)

    def rotate(self, arrays: tuple[Array, ...], group: str, by: int, /) -> Callable[[], tuple[Array, ...]]:
        """What the device so many places behind has: XLA waits where it is used."""
        size = self.size(group)
        came = lax.ppermute(arrays, group, [(rank, (rank + by) % size) for rank in range(size)])
        return lambda: came

    def largest(self, x: Array, group: str, /) -> Array:
        return lax.pmax(jax.lax.stop_gradient(x), group)

    def total(self, x: Array, group: str, /) -> Array:
        return lax.psum(x, group)
