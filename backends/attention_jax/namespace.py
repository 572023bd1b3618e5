"""The array namespace of JAX: everything in ``jax.numpy``, five functions excepted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy
import jax.scipy.special
from jax.sharding import AxisType

from attention_core.backend import Array
from attention_jax.sharding import in_one_mesh, joinable

__all__ = ["erfc", "matmul", "one_program", "repeat", "reshape", "vecdot"]


def matmul(x1: Array, x2: Array, /) -> Array:
    """Multiply matrices in the precision of their dtype.

    Unless told otherwise, JAX lets an accelerator round float32 operands to fewer bits before it multiplies them.
    """
    return jax.numpy.matmul(x1, x2, precision=jax.lax.Precision.HIGHEST)


def vecdot(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """Multiply vectors along an axis, in the precision of their dtype."""
    return jax.numpy.vecdot(x1, x2, axis=axis, precision=jax.lax.Precision.HIGHEST)


def erfc(x: Array, /) -> Array:
    """Compute the complementary error function, which the standard lacks."""
    return jax.scipy.special.erfc(x)


@functools.cache
def one_program(function: Callable[..., Any], /) -> Callable[..., Any]:
    """Compile a function for its keywords: eager, each of its operations is a program, and one more dispatch."""
    arguments = inspect.signature(function).parameters.values()
    static = [each.name for each in arguments if each.kind is each.KEYWORD_ONLY]
    compiled: Callable[..., Any] = jax.jit(function, static_argnames=static, inline=True)
    return compiled


def repeat(x: Array, repeats: int | Array, /, *, axis: int | None = None) -> Array:
    """Repeat elements; in a mesh of explicit axes they stay sharded as they are, for which JAX has no rule."""
    sharding = jax.typeof(x).sharding
    keeps = axis is not None and AxisType.Explicit in sharding.mesh.axis_types
    function = jax.numpy.repeat if hasattr(repeats, "dtype") else _repeat
    return function(x, repeats, axis=axis, out_sharding=sharding if keeps else None)


def reshape(x: Array, /, shape: Any, *, copy: bool | None = None) -> Array:
    """Reshape; eager, under a mesh of explicit axes, an array in none would have its gradient in another mesh."""
    if not jax.sharding.get_abstract_mesh().empty:
        (x,) = in_one_mesh((x,))
        x = joinable(x, x.ndim - len(shape) + 1) if shape[:1] == (-1,) else x
    return jax.numpy.reshape(x, shape, copy=copy)


_repeat = jax.jit(jax.numpy.repeat, static_argnames=("repeats", "axis", "out_sharding"), inline=True)


def __getattr__(name: str) -> Any:
    return getattr(jax.numpy, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(jax.numpy)})
