r"""Linear maps, normalization, GELU and lookups in reproducible arithmetic, each with a gradient of its own.

Arrays come and go as float32; formulas are computed in float64 and rounded once. Sums over positions are sums of
integers, so neither the order of the positions nor the size of the batch changes their bits. Gradients of an array that
is used several times are added in the order in which `copies` returned it. A library would add them as float32, in an
order of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._arrays import Array, Arrays, Gradients, Namespace, scalar_like, shape, take_rows
from .._backend import Backend, Operation, register
from ..parameters import PreparedWeight
from ..random import Dropout, dropout_mask
from . import fast
from .angles import Rotation, exact_tables, join_pairs, split_pairs
from .elementary import SERIES, exp2, horner, tanh
from .exact import (
    LN_2,
    ceil_log2,
    divide_rows,
    power_above_max,
    round_to_float32,
    slices,
    to_float64,
    uncontracted,
)
from .operations import Constants, applied, rounded_once, run
from .products import (
    PREPARED_AFFINE,
    SUM_BITS,
    add_in_order,
    affine_by_slices,
    cut_columns,
    exact_sum,
    matmul,
    matmul_over_positions,
    row_dots,
)

TINY = 2.0**-600  # negligible against the square of any normal float32, and still a normal float64


def affine(x: Array, weight: Array | PreparedWeight, bias: Array | None, /, *, xp: Namespace) -> Array:
    r"""Affine map of the channels, :math:`x W + b`: (..., in) -> (..., out)."""
    *leading, channels = shape(x, xp=xp)
    if isinstance(channels, int) and channels == 0:
        return fast.affine(x, weight, bias, xp=xp)
    is_cut = isinstance(weight, PreparedWeight)
    factors, operation = (weight[:3], PREPARED_AFFINE) if is_cut else ((weight,), AFFINE)
    arrays = (xp.reshape(x, (-1, channels)), *factors, *(() if bias is None else (bias,)))
    (output,) = run(operation, Constants(), *arrays, xp=xp)
    return xp.reshape(output, (*leading, shape(factors[0], xp=xp)[-1]))


def _affine(xp: Namespace, plan: Constants, x: Array, weight: Array, bias: Array | None = None) -> Array:
    cut = cut_columns(to_float64(weight, xp), shape(weight, xp=xp)[0], xp=xp)
    return affine_by_slices(x, cut, bias, xp=xp)


def _affine_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array, weight: Array, *bias: Array) -> Arrays:
    d_x = matmul(d_output, xp.matrix_transpose(weight), xp=xp)
    d_weight = matmul_over_positions(x, d_output, xp=xp)
    return (d_x, d_weight, *(_sum_over_positions(d_output, xp) for _ in bias))


def _sum_over_positions(x: Array, xp: Namespace) -> Array:
    return xp.squeeze(exact_sum(x, -2, xp=xp), axis=-2)


AFFINE = rounded_once(
    "reproducible.affine",
    _affine,
    _affine_backward,
    abstract=lambda xp, plan, x, weight, *_: xp.matmul(x, weight),
    raw_forward=True,
)


def normalize(x: Array, /, scale: Array, offset: Array, epsilon: float, *, xp: Namespace) -> Array:
    """Normalize the channels to mean 0 and variance 1, then scale and shift them."""
    return _of_rows(NORMALIZE, epsilon, x, scale, offset, xp=xp)


def _of_rows(operation: Operation, number: float, x: Array, *others: Array, xp: Namespace) -> Array:
    """The result of an operation on the rows of an array, in the shape of that."""
    (output,) = run(operation, Constants(number), xp.reshape(x, (-1, shape(x, xp=xp)[-1])), *others, xp=xp)
    return xp.reshape(output, shape(x, xp=xp))


def _standardize(x: Array, epsilon: float, xp: Namespace) -> tuple[Array, Array]:
    r"""Channels with mean 0 and variance 1, and the standard deviation that they were divided by.

    Let :math:`r_i` be the integers :math:`2^g x_i / P`, where :math:`g + \lceil \log_2 C \rceil \le 51`. Then the
    differences :math:`c_i = C r_i - \sum_j r_j` are exact, and

    .. math:: y_i = \frac{c_i \sqrt C}{\sqrt{\sum_j c_j^2 + \epsilon\, C^3 (2^g / P)^2}}.
    """
    channels = shape(x, xp=xp)[-1]
    bits = min(40, 51 - ceil_log2(channels))
    power = power_above_max(x, -1, xp)
    integers = xp.round(xp.multiply(x, xp.divide(2.0**bits, power)))
    centred = xp.subtract(xp.multiply(integers, float(channels)), xp.sum(integers, axis=-1, keepdims=True))
    step = xp.divide(2.0**bits, power)
    noise = xp.multiply(xp.multiply(step, step), max(epsilon, TINY) * float(channels**3))
    root = uncontracted(xp.sqrt(xp.add(row_dots(centred, centred, xp), uncontracted(noise, xp))), xp)
    normal = divide_rows(uncontracted(xp.multiply(centred, math.sqrt(channels)), xp), root, xp)
    deviation = xp.multiply(xp.divide(root, step), 1 / (channels * math.sqrt(channels)))
    return normal, uncontracted(deviation, xp)


def _normalize(xp: Namespace, plan: Constants, x: Array, scale: Array, offset: Array) -> Array:
    normal, _ = _standardize(x, plan.number, xp)
    return xp.add(uncontracted(xp.multiply(normal, scale), xp), offset)


def _normalize_backward(
    xp: Namespace, plan: Constants, d_output: Array, x: Array, scale: Array, offset: Array
) -> Arrays:
    normal, deviation = _standardize(x, plan.number, xp)
    channels = shape(x, xp=xp)[-1]
    d_normal = uncontracted(xp.multiply(d_output, scale), xp)
    mean = uncontracted(xp.multiply(exact_sum(d_normal, -1, xp=xp), 1 / channels), xp)
    projection = xp.multiply(row_dots(d_normal, normal, xp), 1 / channels)
    d_centred = xp.subtract(xp.subtract(d_normal, mean), uncontracted(xp.multiply(normal, projection), xp))
    d_scale = _sum_over_positions(uncontracted(xp.multiply(d_output, normal), xp), xp)
    return divide_rows(d_centred, deviation, xp), d_scale, _sum_over_positions(d_output, xp)


NORMALIZE = rounded_once("reproducible.layer_norm", _normalize, _normalize_backward, num_rows=1)


def normalize_rms(x: Array, /, scale: Array, epsilon: float, *, xp: Namespace) -> Array:
    """Divide the channels by the root of their mean square, then scale them."""
    return _of_rows(NORMALIZE_RMS, epsilon, x, scale, xp=xp)


def _divide_by_rms(x: Array, epsilon: float, xp: Namespace) -> tuple[Array, Array]:
    r"""Channels over the root of their mean square, and that root.

    .. math:: y_i = \frac{x_i \sqrt C}{\sqrt{\sum_j x_j^2 + \epsilon\, C}}

    The square of a float32 has at most 48 bits, so float64 holds it exactly.
    """
    channels = float(shape(x, xp=xp)[-1])
    noise = channels * max(epsilon, TINY)
    root = uncontracted(xp.sqrt(xp.add(exact_sum(xp.multiply(x, x), -1, xp=xp), noise)), xp)
    normal = divide_rows(uncontracted(xp.multiply(x, math.sqrt(channels)), xp), root, xp)
    return normal, uncontracted(xp.multiply(root, 1 / math.sqrt(channels)), xp)


def _normalize_rms(xp: Namespace, plan: Constants, x: Array, scale: Array) -> Array:
    return xp.multiply(_divide_by_rms(x, plan.number, xp)[0], scale)


def _normalize_rms_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array, scale: Array) -> Arrays:
    normal, root = _divide_by_rms(x, plan.number, xp)
    d_normal = uncontracted(xp.multiply(d_output, scale), xp)
    projection = exact_sum(uncontracted(xp.multiply(d_normal, normal), xp), -1, xp=xp)
    projection = xp.multiply(projection, 1 / shape(x, xp=xp)[-1])
    d_x = divide_rows(xp.subtract(d_normal, uncontracted(xp.multiply(normal, projection), xp)), root, xp)
    return d_x, _sum_over_positions(uncontracted(xp.multiply(d_output, normal), xp), xp)


NORMALIZE_RMS = rounded_once("reproducible.rms_norm", _normalize_rms, _normalize_rms_backward, num_rows=1)


def rotation(plan: Rotation, positions: Array, like: Array, /, *, xp: Namespace) -> Callable[[Array], Array]:
    """A function that rotates pairs of channels, (..., H, L, D), by the angles of positions, (..., 1, L, 1).

    Their cosines and sines are computed once for all that it rotates.
    """
    tables = run(TABLES, plan, positions, xp=xp)
    return lambda x: run(TURN, plan, x, *tables, xp=xp)[0]


def _tables(plan: Rotation, arrays: Arrays, backend: Backend) -> Arrays:
    xp = backend.namespace
    return exact_tables(plan, xp.astype(arrays[0], xp.float64), xp=xp)


TABLES = register("reproducible.rotary_tables", Operation(_tables, lambda *_: (None,), _tables, needs_float64=True))


def _turn(xp: Namespace, plan: Rotation, x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs and round them to float32; channels after the first ``width`` stay as they are.

    Both channels of a pair become nan where one of them is not finite: compilers differ in how sums with infinities end
    once `uncontracted` bounds the products.
    """
    first, second = split_pairs(to_float64(x, xp), width=plan.width, interleaved=plan.interleaved, xp=xp)
    bounded = xp.logical_and(*(xp.less(xp.abs(channel), math.inf) for channel in (first, second)))
    first, second = (xp.where(bounded, channel, 0.0) for channel in (first, second))
    rotated = (
        xp.subtract(uncontracted(xp.multiply(first, cos), xp), uncontracted(xp.multiply(second, sin), xp)),
        xp.add(uncontracted(xp.multiply(second, cos), xp), uncontracted(xp.multiply(first, sin), xp)),
    )
    rounded = tuple(round_to_float32(xp.where(bounded, channel, math.nan), xp) for channel in rotated)
    return join_pairs(rounded, xp.astype(x, xp.float32), width=plan.width, interleaved=plan.interleaved, xp=xp)


def _turn_forward(plan: Rotation, arrays: Arrays, backend: Backend) -> Arrays:
    return (_turn(backend.namespace, plan, *arrays),)


def _turn_backward(plan: Rotation, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Arrays:
    xp, (_, cos, sin) = backend.namespace, arrays
    return _turn(xp, plan, cotangents[0], cos, xp.negative(sin)), xp.zeros_like(cos), xp.zeros_like(sin)


def _turn_abstract(plan: Rotation, arrays: Arrays, backend: Backend) -> Arrays:
    return (backend.namespace.zeros_like(arrays[0]),)


TURN = register("reproducible.turn", Operation(_turn_forward, _turn_backward, _turn_abstract, needs_float64=True))


def _normal_distribution(x: Array, xp: Namespace) -> tuple[Array, Array]:
    r"""The normal distribution, :math:`\Phi(x) = \operatorname{erfc}(-x / \sqrt 2) / 2`, and :math:`e^{-x^2 / 2}`."""
    size = xp.minimum(xp.abs(x), scalar_like(40.0, x, xp))
    bell = exp2(xp.multiply(xp.multiply(size, size), -0.5 / LN_2), xp)
    t = xp.divide(4.0, xp.add(uncontracted(xp.multiply(size, math.sqrt(0.5)), xp), 4.0))
    y = xp.subtract(uncontracted(xp.multiply(t, 16 / 7), xp), 9 / 7)
    tail = uncontracted(xp.multiply(xp.multiply(xp.multiply(t, horner(y, SERIES["float64"], xp)), bell), 0.5), xp)
    return xp.where(xp.less(x, 0.0), tail, xp.subtract(1.0, tail)), bell


def _gelu(xp: Namespace, plan: Constants, x: Array) -> Array:
    probability, _ = _normal_distribution(x, xp)
    return xp.multiply(x, probability)


def _gelu_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array) -> Arrays:
    probability, bell = _normal_distribution(x, xp)
    density = uncontracted(xp.multiply(xp.multiply(x, bell), 1 / math.sqrt(2 * math.pi)), xp)  # times x
    return (xp.multiply(d_output, xp.add(probability, density)),)


gelu = applied("reproducible.gelu", _gelu, _gelu_backward, num_rows=1)


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


def _times_sigmoid_backward(d_output: Array, x: Array, t: Array, change: Array, xp: Namespace) -> Arrays:
    r"""The gradient of x, :math:`\sigma(t) (1 + s\, \sigma(-t))` times that of the output; s is x dt/dx."""
    share, rest = _sigmoids(t, xp)
    relative = xp.add(uncontracted(xp.multiply(change, rest), xp), 1.0)  # the derivative over the logistic function
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
    growth = xp.add(uncontracted(xp.multiply(square, fast.TANH_CUBE), xp), 1.0)
    return x, square, uncontracted(xp.multiply(uncontracted(xp.multiply(x, growth), xp), fast.TANH_FACTOR), xp)


def _gelu_tanh(xp: Namespace, plan: Constants, x: Array) -> Array:
    return _times_sigmoid(x, _tanh_argument(x, xp)[2], xp)


def _gelu_tanh_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array) -> Arrays:
    bounded, square, argument = _tanh_argument(x, xp)
    growth = xp.add(uncontracted(xp.multiply(square, 3 * fast.TANH_CUBE), xp), 1.0)
    change = uncontracted(xp.multiply(uncontracted(xp.multiply(growth, fast.TANH_FACTOR), xp), bounded), xp)
    return _times_sigmoid_backward(d_output, x, argument, change, xp)


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


relu = fast.relu  # which rounds nothing


scale_by = applied(
    "reproducible.scale",
    lambda xp, plan, x: xp.multiply(x, plan.number),
    lambda xp, plan, d_output, x: (xp.multiply(d_output, plan.number),),
    has_number=True,
    num_rows=1,
)
multiply = applied(
    "reproducible.multiply",
    lambda xp, plan, x, y: xp.multiply(x, y),
    lambda xp, plan, d_output, x, y: (xp.multiply(d_output, y), xp.multiply(d_output, x)),
    num_rows=2,
)
add = applied(
    "reproducible.add",
    lambda xp, plan, x, y: xp.add(x, y),
    lambda xp, plan, d_output, x, y: (d_output, d_output),
    num_rows=2,
)


def _blend(xp: Namespace, plan: Constants, x: Array, y: Array, factor: Array) -> Array:
    return xp.add(x, uncontracted(xp.multiply(y, factor), xp))


def _blend_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array, y: Array, factor: Array) -> Arrays:
    d_factor = exact_sum(xp.reshape(uncontracted(xp.multiply(d_output, y), xp), (-1,)), 0, xp=xp)
    return d_output, xp.multiply(d_output, factor), xp.reshape(d_factor, tuple(factor.shape))


blend = applied("reproducible.blend", _blend, _blend_backward, num_rows=2)


def copies(x: Array, count: int, /, *, xp: Namespace) -> Arrays:
    """The same array for each of its uses, whose gradients are added in the order of these."""
    return (x,) if count == 1 else run(COPIES, Constants(count), x, xp=xp)


def _copies_forward(plan: Constants, arrays: Arrays, backend: Backend) -> Arrays:
    xp = backend.namespace
    return tuple(xp.astype(arrays[0], arrays[0].dtype, copy=True) for _ in range(plan.number))


def _copies_backward(plan: Constants, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Arrays:
    xp = backend.namespace
    d_x = round_to_float32(add_in_order(tuple(to_float64(d_copy, xp) for d_copy in cotangents), xp), xp)
    return (xp.astype(d_x, arrays[0].dtype, copy=False),)


COPIES = register(
    "reproducible.fan_out", Operation(_copies_forward, _copies_backward, _copies_forward, needs_float64=True)
)


def drop(x: Array, dropout: Dropout | None, /, *, xp: Namespace) -> Array:
    """The array with some elements 0, and the others divided by the share of those that are kept."""
    if dropout is None or dropout.rate == 0:
        return x
    rows = x if len(x.shape) > 1 else xp.expand_dims(x, axis=0)
    kept = xp.astype(dropout_mask(dropout, rows, xp=xp), xp.int32)
    (output,) = run(DROPOUT, Constants(1 / (1 - dropout.rate)), rows, kept, xp=xp)
    return output if len(x.shape) > 1 else xp.squeeze(output, axis=0)


def _drop(xp: Namespace, plan: Constants, x: Array, kept: Array) -> Array:
    return xp.where(xp.equal(kept, 1), xp.multiply(x, plan.number), 0.0)


DROPOUT = rounded_once(
    "reproducible.dropout",
    _drop,
    lambda xp, plan, d_output, x, kept: (_drop(xp, plan, d_output, kept), None),
    num_rows=2,
)


def lookup(table: Array, ids: Array, dims: tuple[Any, ...], /, *, xp: Namespace) -> Array:
    """Rows of a table, (rows, C), for ids of these dimensions; the gradient of a row is an exact sum."""
    (output,) = run(LOOKUP, Constants(), table, xp.reshape(xp.broadcast_to(ids, dims), (-1,)), xp=xp)
    return xp.reshape(output, (*dims, shape(table, xp=xp)[1]))


def _lookup_forward(plan: Constants, arrays: Arrays, backend: Backend) -> Arrays:
    return (take_rows(arrays[0], arrays[1], axis=0, xp=backend.namespace),)


def _lookup_backward(
    plan: Constants, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend
) -> Gradients:
    """Add up the gradients of each row by the library's own scatter: sums of integers, which no order changes."""
    xp, (table, ids) = backend.namespace, arrays
    d_output = to_float64(cotangents[0], xp)
    power = power_above_max(d_output, -2, xp)
    parts = xp.concat(slices(d_output, power, bits=SUM_BITS, count=2, xp=xp), axis=-1)
    zeros = xp.concat([xp.zeros_like(to_float64(table, xp))] * 2, axis=-1)
    _, scatter = backend.vjp(lambda table: take_rows(table, ids, axis=0, xp=xp), zeros)
    (sums,) = scatter(parts)
    width = shape(table, xp=xp)[-1]
    d_table = xp.add(sums[..., :width], xp.multiply(sums[..., width:], 2.0**-SUM_BITS))
    return round_to_float32(xp.multiply(d_table, xp.multiply(power, 2.0**-SUM_BITS)), xp), None


LOOKUP = register(
    "reproducible.lookup", Operation(_lookup_forward, _lookup_backward, _lookup_forward, needs_float64=True)
)


def _window_max(x: Array, xp: Namespace) -> Array:
    """The maximum of each window, (..., 1, C): nan where one element is, which not every library's maximum keeps."""
    nan = xp.any(xp.isnan(x), axis=-2, keepdims=True)
    return xp.where(nan, math.nan, xp.max(x, axis=-2, keepdims=True))


def _max_pool(xp: Namespace, plan: Constants, x: Array) -> Array:
    return xp.squeeze(_window_max(x, xp), axis=-2)


def _max_pool_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array) -> Arrays:
    """Equal maxima share the gradient equally."""
    is_max = xp.astype(xp.equal(x, _window_max(x, xp)), xp.float64)
    count = xp.maximum(xp.sum(is_max, axis=-2, keepdims=True), scalar_like(1.0, x, xp))
    return (xp.multiply(divide_rows(xp.expand_dims(d_output, axis=-2), count, xp), is_max),)


max_pool = applied("reproducible.max_pool", _max_pool, _max_pool_backward, abstract=_max_pool, raw_forward=True)


def _norm(x: Array, epsilon: float, xp: Namespace) -> tuple[Array, Array]:
    """The norm of each row, and the divisor: norm plus epsilon."""
    norm = uncontracted(xp.sqrt(row_dots(x, x, xp)), xp)
    return norm, xp.add(norm, epsilon)


def _unit_vector(xp: Namespace, plan: Constants, x: Array) -> Array:
    return divide_rows(x, _norm(x, plan.number, xp)[1], xp)


def _unit_vector_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array) -> Arrays:
    norm, divisor = _norm(x, plan.number, xp)
    nonzero = xp.where(xp.equal(norm, 0.0), 1.0, norm)
    square = uncontracted(xp.multiply(nonzero, divisor), xp)
    projection = uncontracted(xp.divide(row_dots(x, d_output, xp), square), xp)
    return (divide_rows(xp.subtract(d_output, uncontracted(xp.multiply(x, projection), xp)), divisor, xp),)


unit_vector = applied("reproducible.unit", _unit_vector, _unit_vector_backward, has_number=True)


def _divide_backward(xp: Namespace, plan: Constants, d_output: Array, x: Array, divisor: Array) -> Arrays:
    product = exact_sum(xp.reshape(uncontracted(xp.multiply(d_output, x), xp), (-1,)), 0, xp=xp)
    square = uncontracted(xp.multiply(divisor, divisor), xp)
    d_divisor = xp.negative(xp.divide(xp.reshape(product, tuple(divisor.shape)), square))
    return divide_rows(d_output, divisor, xp), d_divisor


divide = applied("reproducible.divide", lambda xp, plan, x, divisor: divide_rows(x, divisor, xp), _divide_backward)
