"""Weights that are cut into slices once, and read by every product of reproducible arithmetic that follows."""

from __future__ import annotations

from .._arrays import Array, Arrays, Namespace, on_device_of, shape, upcast
from .._backend import Backend, Operation, register
from ..parameters import PreparedWeight
from .exact import LONGEST, round_to_float32, slice_bits, to_float64
from .operations import Constants, in_row_blocks, rounded_once, run
from .products import cut_columns, join_products, multiply_slices

PRODUCTS = 2**18  # elements of a product: with fewer rows at a time, libraries multiply matrices more slowly
REFUSAL = "expected weights that are not prepared where gradients are computed; got prepared ones"


def prepare(weight: Array, /, *, xp: Namespace) -> PreparedWeight:
    """Cut a weight (in, out) as `matmul` cuts it."""
    high, low, power = run(CUT, Constants(), upcast(weight, xp=xp), xp=xp)
    return PreparedWeight(high, low, power, like=xp.zeros((0,), dtype=weight.dtype, **on_device_of(weight)))


def _cut(plan: Constants, arrays: Arrays, backend: Backend) -> Arrays:
    xp, (weight,) = backend.namespace, arrays
    return cut_columns(to_float64(weight, xp), shape(weight, xp=xp)[0], xp=xp)


def _no_gradient(*_: object) -> Arrays:
    raise TypeError(REFUSAL)


CUT = register("reproducible.cut", Operation(_cut, _no_gradient, _cut, needs_float64=True))


def affine_by_slices(x: Array, cut: Arrays, bias: Array | None, /, *, xp: Namespace) -> Array:
    """An affine map of rows, rounded once, by the two slices and the powers of two of its weight."""
    high, low, power = cut
    channels, width = shape(high, xp=xp)
    bits = slice_bits(min(channels, LONGEST))
    bias = None if bias is None else to_float64(bias, xp)

    def add_up(large: Array, cross: Array, row_power: Array) -> Array:
        y = join_products(large, cross, row_power, power, bits=bits, xp=xp)
        return round_to_float32(y if bias is None else xp.add(y, bias), xp)

    def map_rows(rows: Array) -> Array:
        return in_row_blocks(add_up, multiply_slices(to_float64(rows, xp), high, low, xp=xp), xp=xp)

    return in_row_blocks(map_rows, (x,), width=width, block=PRODUCTS, xp=xp)


def _affine(xp: Namespace, plan: Constants, x: Array, *cut_and_bias: Array) -> Array:
    cut, bias = cut_and_bias[:3], cut_and_bias[3:]
    return affine_by_slices(x, cut, *(bias or (None,)), xp=xp)


def _abstract(xp: Namespace, plan: Constants, x: Array, high: Array, *_: Array) -> Array:
    return xp.matmul(x, xp.astype(high, x.dtype))


PREPARED_AFFINE = rounded_once(
    "reproducible.prepared_affine", _affine, _no_gradient, abstract=_abstract, raw_forward=True
)


def restored(weight: PreparedWeight, /, *, xp: Namespace) -> Array:
    """The weight in float32, whose elements are off by at most 2**-40 of the largest of their column."""
    return run(RESTORE, Constants(), *weight[:3], xp=xp)[0]


def _restored(xp: Namespace, plan: Constants, high: Array, low: Array, power: Array) -> Array:
    bits = slice_bits(min(shape(high, xp=xp)[0], LONGEST))
    short = xp.multiply(xp.add(high, xp.multiply(low, 2.0**-bits)), 2.0**-bits)
    return round_to_float32(xp.multiply(short, power), xp)


RESTORE = rounded_once(
    "reproducible.restored",
    _restored,
    _no_gradient,
    abstract=lambda xp, plan, high, *_: xp.astype(high, xp.float32),
    raw_forward=True,
)
