"""Operations under `jax.shard_map`, and in a mesh whose axes are explicit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attention_core.backend import Array


def varying_axes(arrays: Iterable[Array]) -> frozenset[str]:
    """The axes of a mesh over which one of these arrays varies, under `jax.shard_map`."""
    return frozenset().union(*map(_varying_axes, arrays))


def _varying_axes(array: Array) -> frozenset[str]:
    kind = jax.typeof(array)
    return frozenset(kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma)  # before 0.10


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """Let the arrays of a tree vary over these axes, too."""

    def cast(array: Array) -> Array:
        missing = axes - _varying_axes(array)
        return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array

    return jax.tree.map(cast, tree) if axes else tree


def in_one_mesh(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The arrays, in a mesh of explicit axes if one is in use: those in none would have gradients in another mesh."""
    mesh = _explicit_mesh(arrays)
    if mesh is None:
        return arrays
    everywhere = NamedSharding(mesh, PartitionSpec())
    return tuple(jax.sharding.reshard(x, everywhere) if jax.typeof(x).sharding.mesh.empty else x for x in arrays)


def joinable(x: Array, count: int) -> Array:
    """An array whose first axes can be joined; JAX has no rule for one that is sharded behind one that is not."""
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    is_sharded = [name is not None for name in spec[:count]]
    gathered = NamedSharding(mesh, PartitionSpec(*(None,) * count, *spec[count:]))
    return x if is_sharded == sorted(is_sharded, reverse=True) else jax.sharding.reshard(x, gathered)


def _explicit_mesh(arrays: tuple[Array, ...]) -> Any:
    meshes = (*(jax.typeof(array).sharding.mesh for array in arrays), jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def run_in_automatic_axes(
    function: Callable[..., Any], static: Any, arrays: tuple[Array, ...], abstract: Callable[..., tuple[Array, ...]]
) -> Any:
    """The results of ``function(static, arrays)``; in a mesh of explicit axes, sharded like the first array.

    There, XLA shards what is inside: a slice of an explicit axis, as of a block, has no rule.
    """
    mesh = _explicit_mesh(arrays)
    if mesh is None:
        return function(static, arrays)
    first, results = jax.typeof(arrays[0]), jax.eval_shape(abstract, *arrays)
    return _automatic(function, static, tuple(NamedSharding(mesh, _spec_like(first, x.shape)) for x in results), arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _automatic(function: Any, static: Any, shardings: tuple[NamedSharding, ...], arrays: tuple[Array, ...]) -> Any:
    return jax.sharding.auto_axes(functools.partial(function, static), out_sharding=shardings)(arrays)


def _spec_like(first: Any, shape: tuple[int, ...]) -> PartitionSpec:
    """How a result is sharded: like another array along the axes that have its length, the last axis excepted."""
    specs = zip(first.sharding.spec[:-1], first.shape, shape, strict=False)
    return PartitionSpec(*(name if size == length else None for name, size, length in specs))
