r"""Maps out of the logistic function, in reproducible arithmetic: the SiLU, the GELU by tanh, and the softcap."""

from __future__ import annotations

import math

from .._arrays import Array, Arrays, Namespace, scalar_like
from .elementary import exp2, tanh
from .exact import LN_2, uncontracted
from .fast import TANH_CUBE, TANH_FACTOR
from .operations import Constants, applied


def _sigmoids(x: Array, xp: Namespace) -> tuple[Array, Array]:
    r"""The logistic function :math:`\sigma(x) = 1 / (1 + e^{-x})`, and :math:`\sigma(-x)`."""
    exponential = exp2(xp.multiply(xp.negative(xp.abs(x)), 1 / LN_2), xp)
    total = xp.add(exponential, 1.0)
    above, below = xp.divide(1.0, total), uncontracted(xp.divide(exponential, total), xp)
    negative = xp.less(x, 0.0)
    return xp.where(negative, below, above), xp.where(negative, above, below)


def _times_sigmoid(x: Array, t: Array, xp: Namespace) -> Array:
    r"""A number times the logistic function of one with the same sign, :math:`x\, \sigma(t)`; nan of -inf."""
    share = xp.where(xp.less(t, -104.0), 0.0, _sigmoids(t, xp)[0])  # the product is below all numbers of float32
    return xp.where(xp.equal(x, -math.inf), math.nan, xp.multiply(x, share))


def _times_sigmoid_backward(d_output: Array, x: Array, t: Array, slope: Array, xp: Namespace) -> Arrays:
    r"""The gradient of x, :math:`\sigma(t) (1 + s\, \sigma(-t))` times that of the output, for a slope x dt/dx."""
    share, rest = _sigmoids(t, xp)
    relative = xp.add(uncontracted(xp.multiply(slope, rest), xp), 1.0)  # the derivative over the logistic function
    derivative = xp.where(xp.less(t, -150.0), 0.0, uncontracted(xp.multiply(share, relative), xp))
    return (xp.multiply(d_output, xp.where(xp.isnan(x), x, derivative)),)


def _bounded(x: Array, bound: float, xp: Namespace) -> Array:
    """Numbers of at most this magnitude, beyond which no digit of a result changes."""
    return xp.maximum(xp.minimum(x, scalar_like(bound, x, xp)), scalar_like(-bound, x, xp))


silu = applied(
    "reproducible.silu",
    lambda xp, plan, x: _times_sigmoid(x, x, xp),
    lambda xp, plan, d_output, x: _times_sigmoid_backward(d_output, x, x, _bounded(x, 150.0, xp), xp),
    num_rows=1,
)


def _tanh_argument(x: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """The bounded input, its square, and the argument of the logistic function."""
    x = _bounded(x, 30.0, xp)
    square = uncontracted(xp.multiply(x, x), xp)
    growth = xp.add(uncontracted(xp.multiply(square, TANH_CUBE), xp), 1.0)
    return x, square, uncontracted(xp.multiply(uncontracted(xp.multiply(x, growth), xp), TANH_FACTOR), xp)


def _gelu_tanh(xp: Namespace, plan: Constants, x: Array) -> Array:
    return _times_sigmoid(x, _tanh_argument(x, xp)[2], xp)


def _gelu_tanh_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array) -> Arrays:
    bounded, square, argument = _tanh_argument(x, xp)
    growth = xp.add(uncontracted(xp.multiply(square, 3 * TANH_CUBE), xp), 1.0)
    slope = uncontracted(xp.multiply(uncontracted(xp.multiply(growth, TANH_FACTOR), xp), bounded), xp)
    return _times_sigmoid_backward(d_output, x, argument, slope, xp)


gelu_tanh = applied("reproducible.gelu_tanh", _gelu_tanh, _gelu_tanh_backward, num_rows=1)


def _cap(xp: Namespace, plan: Constants, x: Array) -> Array:
    ratio = uncontracted(xp.multiply(x, 1 / plan.number), xp)
    return xp.multiply(tanh(_bounded(ratio, 40.0, xp), xp), plan.number)


def _cap_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array) -> Arrays:
    r"""The derivative is :math:`4 \sigma(2 x / c)\, \sigma(-2 x / c)`."""
    above, below = _sigmoids(uncontracted(xp.multiply(x, 2 / plan.number), xp), xp)
    derivative = uncontracted(xp.multiply(uncontracted(xp.multiply(above, below), xp), 4.0), xp)
    return (xp.multiply(d_output, derivative),)


cap = applied("reproducible.softcap", _cap, _cap_backward, num_rows=1, has_number=True)
