"""Linear maps, normalization, GELU and lookups in the library's own arithmetic: the functions of `reproducible`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._arrays import Array, Arrays, Namespace, dtype_name, one_program, shape, take_rows
from .._backend import backend_for, can_be_read
from ..parameters import PreparedWeight
from ..random import drop as drop  # one of the operations of an arithmetic
from .angles import Rotation, join_pairs, split_pairs, tables
from .elementary import erfc

# Elements above the bound are multiplied by a power of two before they are squared, so no square overflows.
_BOUNDS = {"float32": (2.0**60, 2.0**-96), "float64": (2.0**500, 2.0**-768)}


def affine(x: Array, weight: Array | PreparedWeight, bias: Array | None, /, *, xp: Namespace) -> Array:
    r"""Affine map of the channels, :math:`x W + b`: (..., in) -> (..., out)."""
    if isinstance(weight, PreparedWeight):
        raise TypeError("expected arithmetic='reproducible' with prepared weights; got 'fast'")
    if bias is None:
        return xp.matmul(x, weight)
    fused = backend_for(x, xp).affine
    return xp.add(xp.matmul(x, weight), bias) if fused is None else fused(x, weight, bias)


def normalize(x: Array, /, scale: Array, offset: Array, epsilon: float, *, xp: Namespace) -> Array:
    """Normalize the channels to mean 0 and variance 1, then scale and shift them.

    No shift of the channels changes the result, so that derivatives take the first mean as a constant.
    """
    backend = backend_for(x, xp)
    centred = xp.subtract(x, xp.mean(backend.stop_gradient(x), axis=-1, keepdims=True))
    if backend.normalize is not None:
        return backend.normalize(centred, scale, offset, epsilon)
    centred = xp.subtract(centred, xp.mean(centred, axis=-1, keepdims=True))  # the mean was rounded
    variance = xp.mean(xp.multiply(centred, centred), axis=-1, keepdims=True)
    normal = xp.divide(centred, xp.sqrt(xp.add(variance, epsilon)))
    return xp.add(xp.multiply(normal, scale), offset)


def normalize_rms(x: Array, /, scale: Array, epsilon: float, *, xp: Namespace) -> Array:
    """Divide the channels by the root of their mean square, then scale them."""
    backend, noise = backend_for(x, xp), epsilon
    bound, power = _BOUNDS[dtype_name(x.dtype)]
    if not (can_be_read(x) and float(backend.loops.norm(xp.reshape(backend.stop_gradient(x), (-1,)))) < bound):
        largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
        factor = xp.where(xp.greater(largest, bound), xp.full_like(largest, power), 1.0)
        x = xp.multiply(x, factor)
        noise = xp.multiply(xp.multiply(factor, factor), epsilon)
    square = xp.mean(xp.multiply(x, x), axis=-1, keepdims=True)
    return xp.multiply(xp.divide(x, xp.sqrt(xp.add(square, noise))), scale)


def rotation(plan: Rotation, positions: Array, like: Array, /, *, xp: Namespace) -> Callable[[Array], Array]:
    """A function that rotates pairs of channels, (..., H, L, D), by the angles of positions, (..., 1, L, 1).

    Its cosines and sines have the dtype and the device of ``like``. They are computed here, once for all calls.
    """
    cos, sin = tables(plan, positions, like, xp)
    pairs = {"width": plan.width, "interleaved": plan.interleaved, "xp": xp}
    split, join = one_program(split_pairs, xp), one_program(join_pairs, xp)

    def rotate(x: Array) -> Array:
        first, second = split(x, **pairs)
        rotated = (
            xp.subtract(xp.multiply(first, cos), xp.multiply(second, sin)),
            xp.add(xp.multiply(second, cos), xp.multiply(first, sin)),
        )
        return join(rotated, x, **pairs)

    return rotate


def gelu(x: Array, /, *, xp: Namespace) -> Array:
    """Gaussian error linear unit."""
    doubled = erfc(xp.multiply(x, -math.sqrt(0.5)), xp=xp)
    return xp.multiply(xp.multiply(x, 0.5), doubled)


def gelu_tanh(x: Array, /, *, xp: Namespace) -> Array:
    r"""Approximation of the GELU, :math:`x\, \sigma(2 z)` with :math:`z = \sqrt{2 / \pi}\,(x + 0.044715\, x^3)`."""
    bounded = xp.where(xp.greater(x, 30.0), 30.0, xp.where(xp.less(x, -30.0), -30.0, x))  # beyond, no digit changes
    cube = xp.multiply(xp.multiply(bounded, bounded), xp.multiply(bounded, TANH_CUBE))
    return _times_sigmoid(x, xp.multiply(xp.add(bounded, cube), TANH_FACTOR), xp)


TANH_CUBE, TANH_FACTOR = 0.044715, 2 * math.sqrt(2 / math.pi)  # of the approximation


def silu(x: Array, /, *, xp: Namespace) -> Array:
    r"""Sigmoid linear unit, :math:`x / (1 + e^{-x})`."""
    fused = backend_for(x, xp).silu
    return _times_sigmoid(x, x, xp) if fused is None else fused(x)


def _times_sigmoid(x: Array, t: Array, xp: Namespace) -> Array:
    r"""A number times the logistic function of one with the same sign, :math:`x / (1 + e^{-t})`.

    .. math:: \frac{\max(x, 0) + \min(x, 0)\, e^{-|t|}}{1 + e^{-|t|}}

    This exponential never overflows. Its gradient at 0 is right, whichever side 0 counts to.
    """
    negative = xp.where(xp.less(x, 0.0), x, 0.0)
    positive = xp.subtract(x, negative)
    exponential = xp.exp(xp.negative(xp.abs(t)))
    return xp.divide(xp.add(positive, xp.multiply(negative, exponential)), xp.add(exponential, 1.0))


def relu(x: Array, /, *, xp: Namespace) -> Array:
    """Rectified linear unit, with the gradient 0 at 0, and NaN of NaN."""
    return xp.where(xp.less_equal(x, 0.0), 0.0, x)


def add(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    """Add two arrays."""
    return xp.add(x, y)


def multiply(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    """Multiply two arrays of one shape."""
    return xp.multiply(x, y)


def scale_by(x: Array, factor: float, /, *, xp: Namespace) -> Array:
    """Multiply an array by a constant."""
    return xp.multiply(x, factor)


def cap(x: Array, softcap: float, /, *, xp: Namespace) -> Array:
    r"""Softly bounded values, :math:`c \tanh(x / c)`."""
    return xp.multiply(xp.tanh(xp.divide(x, softcap)), softcap)


def copies(x: Array, count: int, /, *, xp: Namespace) -> Arrays:
    """The same array for each of its uses."""
    return (x,) * count


def blend(x: Array, y: Array, factor: Array, /, *, xp: Namespace) -> Array:
    r"""An array and a multiple of another, :math:`x + \sigma y`."""
    return xp.add(x, xp.multiply(y, factor))


def lookup(table: Array, ids: Array, dims: tuple[Any, ...], /, *, xp: Namespace) -> Array:
    """Rows of a table, (rows, C), for ids that broadcast to these dimensions: (..., C)."""
    rows = take_rows(table, xp.reshape(ids, (-1,)), axis=0, xp=xp)
    return xp.reshape(rows, (*shape(ids, xp=xp), shape(table, xp=xp)[1]))


def max_pool(x: Array, /, *, xp: Namespace) -> Array:
    """The maximum of each window, (..., window, C) -> (..., C)."""
    return xp.max(x, axis=-2)


def unit_vector(x: Array, epsilon: float, /, *, xp: Namespace) -> Array:
    r"""A vector (1, C) over its norm, :math:`x / (\lVert x \rVert + \epsilon)`."""
    return xp.divide(x, xp.add(xp.sqrt(xp.sum(xp.multiply(x, x))), epsilon))


def divide(x: Array, divisor: Array, /, *, xp: Namespace) -> Array:
    """An array over a number, of shape ()."""
    return xp.divide(x, divisor)
