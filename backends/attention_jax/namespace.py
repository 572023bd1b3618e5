"""The array namespace of JAX: everything in ``jax.numpy``, four functions excepted."""

from __future__ import annotations

from typing import Any

import jax.numpy
import jax.scipy.special
from jax.sharding import AxisType

from attention_core.backend import Array

__all__ = ["erfc", "matmul", "repeat", "vecdot"]


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


def repeat(x: Array, repeats: int | Array, /, *, axis: int | None = None) -> Array:
    """Repeat elements; in a mesh of explicit axes they stay sharded as they are, for which JAX has no rule."""
    sharding = jax.typeof(x).sharding
    keeps = axis is not None and AxisType.Explicit in sharding.mesh.axis_types
    return jax.numpy.repeat(x, repeats, axis=axis, out_sharding=sharding if keeps else None)


def __getattr__(name: str) -> Any:
    return getattr(jax.numpy, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(jax.numpy)})
