r"""Maps out of the logistic function, in reproducible arithmetic: the SiLU, the GELU by tanh, and the softcap."""

from __future__ import annotations

import math

from .._arrays import Array, Arrays, Namespace, scalar_like
from .elementary import exp2, tanh
from .exact import LN_2, uncontracted
from .fast import TANH_CUBE, TANH_FACTOR
from .operations import Constants, applied


def _sigmoid(x: Array, xp: Namespace) -> Array:
    r"""The logistic function :math:`\sigma(x) = 1 / (1 + e^{-x})`."""
    exponential = exp2(xp.multiply(xp.negative(xp.abs(x)), 1 / LN_2), xp)
    total = xp.add(exponential, 1.0)
    return xp.divide(xp.where(xp.less(x, 0.0), exponential, 1.0), total)


def _sigmoids(x: Array, xp: Namespace) -> tuple[Array, Array]:
    r"""The logistic function :math:`\sigma(x) = 1 / (1 + e^{-x})`, and :math:`\sigma(-x)`."""
    exponential = exp2(xp.multiply(xp.negative(xp.abs(x)), 1 / LN_2), xp)
    total = xp.add(exponential, 1.0)
    above, below = xp.divide(1.0, total), uncontracted(xp.divide(exponential, total), xp)
    negative = xp.less(x, 0.0)
    return xp.where(negative, below, above), xp.where(negative, above, below)


def _silu(xp: Namespace, plan: Constants, x: Array) -> Array:
    share = _sigmoid(x, xp)
    vanishes = xp.logical_and(xp.less(x, -104.0), xp.greater(x, -math.inf))  # below all numbers of float32
    return xp.where(vanishes, 0.0, xp.where(xp.equal(x, -math.inf), math.nan, xp.multiply(x, share)))


def _silu_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array) -> Arrays:
    share, rest = _sigmoids(x, xp)
    bounded = xp.maximum(xp.minimum(x, scalar_like(150.0, x, xp)), scalar_like(-150.0, x, xp))  # where no digit changes
    relative = xp.add(uncontracted(xp.multiply(bounded, rest), xp), 1.0)  # the derivative over the logistic function
    derivative = xp.where(xp.less(x, -150.0), 0.0, uncontracted(xp.multiply(share, relative), xp))
    return (xp.multiply(d_output, xp.where(xp.isnan(x), x, derivative)),)


silu = applied("reproducible.silu", _silu, _silu_backward, num_rows=1)


def _tanh_argument(x: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """The bounded input, beyond which no digit changes, its square, and the argument of the logistic function."""
    x = xp.maximum(xp.minimum(x, scalar_like(30.0, x, xp)), scalar_like(-30.0, x, xp))
    square = uncontracted(xp.multiply(x, x), xp)
    growth = xp.add(uncontracted(xp.multiply(square, TANH_CUBE), xp), 1.0)
    return x, square, uncontracted(xp.multiply(uncontracted(xp.multiply(x, growth), xp), TANH_FACTOR), xp)


def _gelu_tanh(xp: Namespace, plan: Constants, x: Array) -> Array:
    _, _, argument = _tanh_argument(x, xp)
    share = _sigmoid(argument, xp)
    share = xp.where(xp.less(argument, -104.0), 0.0, share)  # the product is below all numbers of float32
    return xp.where(xp.equal(x, -math.inf), math.nan, xp.multiply(x, share))


def _gelu_tanh_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array) -> Arrays:
    bounded, square, argument = _tanh_argument(x, xp)
    share, rest = _sigmoids(argument, xp)
    growth = xp.add(uncontracted(xp.multiply(square, 3 * TANH_CUBE), xp), 1.0)
    growth = uncontracted(xp.multiply(uncontracted(xp.multiply(growth, TANH_FACTOR), xp), bounded), xp)
    derivative = xp.multiply(share, xp.add(uncontracted(xp.multiply(growth, rest), xp), 1.0))
    derivative = xp.where(xp.less(argument, -150.0), 0.0, uncontracted(derivative, xp))
    return (xp.multiply(d_output, xp.where(xp.isnan(x), x, derivative)),)


gelu_tanh = applied("reproducible.gelu_tanh", _gelu_tanh, _gelu_tanh_backward, num_rows=1)


def _cap(xp: Namespace, plan: Constants, x: Array) -> Array:
    ratio = uncontracted(xp.multiply(x, 1 / plan.number), xp)
    bounded = xp.maximum(xp.minimum(ratio, scalar_like(40.0, x, xp)), scalar_like(-40.0, x, xp))  # no overflow
    return xp.multiply(tanh(bounded, xp), plan.number)


def _cap_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array) -> Arrays:
    r"""The derivative is :math:`4 \sigma(2 x / c)\, \sigma(-2 x / c)`."""
    above, below = _sigmoids(uncontracted(xp.multiply(x, 2 / plan.number), xp), xp)
    derivative = uncontracted(xp.multiply(uncontracted(xp.multiply(above, below), xp), 4.0), xp)
    return (xp.multiply(d_output, derivative),)


cap = applied("reproducible.softcap", _cap, _cap_backward, num_rows=1, has_number=True)
