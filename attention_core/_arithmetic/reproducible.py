r"""The maps between attentions in reproducible arithmetic: each an operation with its own gradient, rounded once.

Arrays come and go as float32. What is used in several places is handed out by `copies`, whose gradient adds up in a
fixed order, as float32 additions in the order of a library would not. Every sum over positions is one of integers, in
which the order of positions, their number and their distribution over a batch do not show.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arithmetic.angles import exact_tables, join_pairs, split_pairs
from attention_core._arithmetic.elementary import exp2, horner
from attention_core._arithmetic.erfc import SERIES
from attention_core._arithmetic.exact import (
    LN_2,
    ceil_log2,
    divide_rows,
    power_above_max,
    round_to_float32,
    scalar64,
    slices,
    to_float64,
    uncontracted,
)
from attention_core._arithmetic.products import (
    SUM_BITS,
    add_in_order,
    exact_sum,
    matmul,
    matmul_over_positions,
    row_dots,
)
from attention_core._arrays import Array, Namespace, on_device_of, shape, take_rows
from attention_core._backend import Backend, Operation, backend_for, register
from attention_core.random import Dropout, dropout_mask

TINY = 2.0**-600  # beside the square of any normal float32, and no subnormal number even so


class Constants(NamedTuple):
    """The plan of an operation: one number, or none."""

    number: Any = None


register("Constants", Constants)


def run(operation: Operation, plan: tuple[Any, ...], *arrays: Array, xp: Namespace) -> tuple[Array, ...]:
    """The results of an operation, by the backend of its arrays."""
    return tuple(backend_for(arrays[0], xp).custom_gradient(operation, plan, arrays))


# Affine maps


def affine(x: Array, weight: Array, bias: Array | None, /, *, xp: Namespace) -> Array:
    r"""Affine map of the channels, :math:`x W + b`, rounded once: (..., in) -> (..., out)."""
    *leading, channels = shape(x, xp=xp)
    if isinstance(channels, int) and channels == 0:
        return _bias_only(x, weight, bias, xp)
    arrays = (xp.reshape(x, (-1, channels)), weight, *(() if bias is None else (bias,)))
    (found,) = run(AFFINE, Constants(), *arrays, xp=xp)
    return xp.reshape(found, (*leading, shape(weight, xp=xp)[-1]))


def _bias_only(x: Array, weight: Array, bias: Array | None, xp: Namespace) -> Array:
    found = xp.matmul(x, weight)
    return found if bias is None else xp.add(found, bias)


def _affine_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, (x, weight, *bias) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    found = matmul(x, weight, xp=xp)
    return (round_to_float32(xp.add(found, bias[0]) if bias else found, xp),)


def _affine_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    xp, (x, weight, *bias) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    out = to_float64(cotangents[0], xp)
    of_x = matmul(out, xp.matrix_transpose(weight), xp=xp)
    of_bias = (xp.squeeze(exact_sum(out, -2, xp=xp), axis=-2),) if bias else ()
    return tuple(round_to_float32(each, xp) for each in (of_x, matmul_over_positions(x, out, xp=xp), *of_bias))


def _affine_empty(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    x, weight, *_ = arrays
    return (backend.namespace.matmul(x, weight),)


AFFINE = register(
    "reproducible.affine", Operation(_affine_forward, _affine_backward, _affine_empty, needs_float64=True)
)


# Normalization


def normalize(x: Array, /, scale: Array, offset: Array, epsilon: float, *, xp: Namespace) -> Array:
    """Normalize the channels, rounded once."""
    channels = shape(x, xp=xp)[-1]
    (found,) = run(NORMALIZE, Constants(epsilon), xp.reshape(x, (-1, channels)), scale, offset, xp=xp)
    return xp.reshape(found, shape(x, xp=xp))


def _normal(x: Array, epsilon: float, xp: Namespace) -> tuple[Array, Array]:
    r"""Normalized channels, and by what they were divided.

    With :math:`r_i` the integers :math:`2^g x_i / P`, the differences :math:`c_i = C r_i - \sum_j r_j` are exact, as
    :math:`g + \lceil \log_2 C \rceil \le 51`, and

    .. math:: y_i = \frac{c_i \sqrt C}{\sqrt{\sum_j c_j^2 + \epsilon\, C^3 (2^g / P)^2}}.
    """
    channels = shape(x, xp=xp)[-1]
    grid = min(40, 51 - ceil_log2(channels))
    power = power_above_max(x, -1, xp)
    units = xp.round(xp.multiply(x, xp.divide(2.0**grid, power)))
    centred = xp.subtract(xp.multiply(units, float(channels)), xp.sum(units, axis=-1, keepdims=True))
    step = xp.divide(2.0**grid, power)
    noise = xp.multiply(xp.multiply(step, step), max(epsilon, TINY) * float(channels**3))
    root = uncontracted(xp.sqrt(xp.add(row_dots(centred, centred, xp), uncontracted(noise, xp))), xp)
    normal = divide_rows(uncontracted(xp.multiply(centred, math.sqrt(channels)), xp), root, xp)
    deviation = xp.multiply(xp.divide(root, step), 1 / (channels * math.sqrt(channels)))
    return normal, uncontracted(deviation, xp)


def _normalize_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, (x, scale, offset) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    normal, _ = _normal(x, plan.number, xp)
    return (round_to_float32(xp.add(uncontracted(xp.multiply(normal, scale), xp), offset), xp),)


def _normalize_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    xp, (x, scale, _) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    out = to_float64(cotangents[0], xp)
    normal, deviation = _normal(x, plan.number, xp)
    channels = shape(x, xp=xp)[-1]
    pull = uncontracted(xp.multiply(out, scale), xp)
    mean = uncontracted(xp.multiply(exact_sum(pull, -1, xp=xp), 1 / channels), xp)
    along = xp.multiply(row_dots(pull, normal, xp), 1 / channels)
    of_x = divide_rows(
        xp.subtract(xp.subtract(pull, mean), uncontracted(xp.multiply(normal, along), xp)), deviation, xp
    )
    of_scale = exact_sum(uncontracted(xp.multiply(out, normal), xp), -2, xp=xp)
    of_offset = exact_sum(out, -2, xp=xp)
    return tuple(
        round_to_float32(each, xp) for each in (of_x, xp.squeeze(of_scale, axis=-2), xp.squeeze(of_offset, axis=-2))
    )


def _first_empty(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    return (backend.namespace.zeros_like(arrays[0]),)


NORMALIZE = register(
    "reproducible.layer_norm", Operation(_normalize_forward, _normalize_backward, _first_empty, needs_float64=True)
)


def normalize_rms(x: Array, scale: Array, epsilon: float, /, *, xp: Namespace) -> Array:
    """Divide the channels by the root of their mean square, rounded once."""
    channels = shape(x, xp=xp)[-1]
    (found,) = run(NORMALIZE_RMS, Constants(epsilon), xp.reshape(x, (-1, channels)), scale, xp=xp)
    return xp.reshape(found, shape(x, xp=xp))


def _normal_rms(x: Array, epsilon: float, xp: Namespace) -> tuple[Array, Array]:
    r"""Channels over the root of their mean square, and that root.

    .. math:: y_i = \frac{x_i \sqrt C}{\sqrt{\sum_j x_j^2 + \epsilon\, C}}

    A square of 24 bits is exact in float64.
    """
    channels = float(shape(x, xp=xp)[-1])
    noise = channels * max(epsilon, TINY)
    root = uncontracted(xp.sqrt(xp.add(exact_sum(xp.multiply(x, x), -1, xp=xp), noise)), xp)
    normal = divide_rows(uncontracted(xp.multiply(x, math.sqrt(channels)), xp), root, xp)
    return normal, uncontracted(xp.multiply(root, 1 / math.sqrt(channels)), xp)


def _normalize_rms_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, (x, scale) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    normal, _ = _normal_rms(x, plan.number, xp)
    return (round_to_float32(xp.multiply(normal, scale), xp),)


def _normalize_rms_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    xp, (x, scale) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    out = to_float64(cotangents[0], xp)
    normal, root = _normal_rms(x, plan.number, xp)
    pull = uncontracted(xp.multiply(out, scale), xp)
    along = exact_sum(uncontracted(xp.multiply(pull, normal), xp), -1, xp=xp)
    mean = xp.multiply(along, 1 / shape(x, xp=xp)[-1])
    of_x = divide_rows(xp.subtract(pull, uncontracted(xp.multiply(normal, mean), xp)), root, xp)
    of_scale = exact_sum(uncontracted(xp.multiply(out, normal), xp), -2, xp=xp)
    return round_to_float32(of_x, xp), round_to_float32(xp.squeeze(of_scale, axis=-2), xp)


NORMALIZE_RMS = register(
    "reproducible.rms_norm",
    Operation(_normalize_rms_forward, _normalize_rms_backward, _first_empty, needs_float64=True),
)


# Rotation


class Rotation(NamedTuple):
    """The plan of a rotation."""

    base: float
    width: int
    interleaved: bool


register("Rotation", Rotation)


def rotate(x: Array, places: Array, base: float, width: int, interleaved: bool, /, *, xp: Namespace) -> Array:
    """Rotate pairs of channels, (..., H, L, D), by the angles of positions, (..., 1, L, 1), rounded once."""
    (found,) = run(ROTATE, Rotation(base, width, interleaved), x, places, xp=xp)
    return found


def _rotated(plan: Rotation, x: Array, places: Array, xp: Namespace, *, back: bool = False) -> Array:
    """Where one of a pair is not finite, both are nan: how sums end with infinities depends on `settle`."""
    cos, sin = exact_tables(xp.astype(places, xp.float64), plan.base, plan.width, xp)
    sin = xp.negative(sin) if back else sin
    first, second = split_pairs(to_float64(x, xp), plan.width, plan.interleaved, xp)
    bounded = xp.logical_and(*(xp.less(xp.abs(each), math.inf) for each in (first, second)))
    first, second = (xp.where(bounded, each, 0.0) for each in (first, second))
    turned = (
        xp.subtract(uncontracted(xp.multiply(first, cos), xp), uncontracted(xp.multiply(second, sin), xp)),
        xp.add(uncontracted(xp.multiply(second, cos), xp), uncontracted(xp.multiply(first, sin), xp)),
    )
    found = tuple(round_to_float32(xp.where(bounded, each, math.nan), xp) for each in turned)
    return join_pairs(found, x, plan.width, plan.interleaved, xp)


def _rotate_forward(plan: Rotation, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    x, places = arrays
    return (_rotated(plan, x, places, backend.namespace),)


def _rotate_backward(
    plan: Rotation,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array | None, ...]:
    xp = backend.namespace
    out = round_to_float32(to_float64(cotangents[0], xp), xp)  # of channels that are kept, too
    return _rotated(plan, out, arrays[1], xp, back=True), None


ROTATE = register("reproducible.rotary", Operation(_rotate_forward, _rotate_backward, _first_empty, needs_float64=True))


# The Gaussian error linear unit


def gelu(x: Array, /, *, xp: Namespace) -> Array:
    """Gaussian error linear unit, rounded once."""
    (found,) = run(GELU, Constants(), x, xp=xp)
    return found


def _normal_distribution(x: Array, xp: Namespace) -> tuple[Array, Array]:
    r"""The normal distribution, :math:`\Phi(x) = \operatorname{erfc}(-x / \sqrt 2) / 2`, and :math:`e^{-x^2 / 2}`."""
    size = xp.minimum(xp.abs(x), scalar64(40.0, x, xp))
    bell = exp2(xp.multiply(xp.multiply(size, size), -0.5 / LN_2), xp)
    t = xp.divide(4.0, xp.add(uncontracted(xp.multiply(size, math.sqrt(0.5)), xp), 4.0))
    y = xp.subtract(uncontracted(xp.multiply(t, 16 / 7), xp), 9 / 7)
    tail = uncontracted(xp.multiply(xp.multiply(xp.multiply(t, horner(y, SERIES["float64"], xp)), bell), 0.5), xp)
    return xp.where(xp.less(x, 0.0), tail, xp.subtract(1.0, tail)), bell


def _gelu_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp = backend.namespace
    x = to_float64(arrays[0], xp)
    share, _ = _normal_distribution(x, xp)
    return (round_to_float32(xp.where(xp.equal(x, -math.inf), math.nan, xp.multiply(x, share)), xp),)


def _gelu_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    xp = backend.namespace
    x, out = to_float64(arrays[0], xp), to_float64(cotangents[0], xp)
    share, bell = _normal_distribution(x, xp)
    slope = xp.add(share, uncontracted(xp.multiply(xp.multiply(x, bell), 1 / math.sqrt(2 * math.pi)), xp))
    return (round_to_float32(xp.multiply(out, slope), xp),)


GELU = register("reproducible.gelu", Operation(_gelu_forward, _gelu_backward, _first_empty, needs_float64=True))


# Sums and copies


def add(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    """Add two arrays of one shape."""
    (found,) = run(ADD, Constants(), x, y, xp=xp)
    return found


def _add_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp = backend.namespace
    return (round_to_float32(xp.add(*(to_float64(each, xp) for each in arrays)), xp),)


def _add_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    return tuple(round_to_float32(to_float64(cotangents[0], backend.namespace), backend.namespace) for _ in arrays)


ADD = register("reproducible.add", Operation(_add_forward, _add_backward, _first_empty, needs_float64=True))


def copies(x: Array, count: int, /, *, xp: Namespace) -> tuple[Array, ...]:
    """The same array for each place that uses it: its gradients are added up in the order of these."""
    return (x,) if count == 1 else run(COPIES, Constants(count), x, xp=xp)


def _copies_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp = backend.namespace
    return tuple(xp.astype(arrays[0], arrays[0].dtype, copy=True) for _ in range(plan.number))


def _copies_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    xp = backend.namespace
    return (round_to_float32(add_in_order(tuple(to_float64(each, xp) for each in cotangents), xp), xp),)


def _copies_empty(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    return tuple(backend.namespace.zeros_like(arrays[0]) for _ in range(plan.number))


COPIES = register(
    "reproducible.fan_out", Operation(_copies_forward, _copies_backward, _copies_empty, needs_float64=True)
)


def blend(x: Array, y: Array, factor: Array, /, *, xp: Namespace) -> Array:
    r"""An array and a multiple of another, :math:`x + \sigma y`, rounded once."""
    (found,) = run(BLEND, Constants(), x, y, factor, xp=xp)
    return found


def _blend_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, (x, y, factor) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    return (round_to_float32(xp.add(x, uncontracted(xp.multiply(y, factor), xp)), xp),)


def _blend_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    xp, (_, y, factor) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    out = to_float64(cotangents[0], xp)
    of_factor = exact_sum(xp.reshape(uncontracted(xp.multiply(out, y), xp), (-1,)), 0, xp=xp)
    return tuple(
        round_to_float32(each, xp)
        for each in (out, xp.multiply(out, factor), xp.reshape(of_factor, tuple(factor.shape)))
    )


BLEND = register("reproducible.blend", Operation(_blend_forward, _blend_backward, _first_empty, needs_float64=True))


# Dropout, tables, maxima


def drop(x: Array, dropout: Dropout | None, /, *, xp: Namespace) -> Array:
    """The array with some elements 0, and the others made up for it."""
    if dropout is None or dropout.rate == 0:
        return x
    rows = x if len(x.shape) > 1 else xp.expand_dims(x, axis=0)
    kept = xp.astype(dropout_mask(dropout, rows, xp=xp), xp.int32)
    (found,) = run(SCALED, Constants(1 / (1 - dropout.rate)), rows, kept, xp=xp)
    return found if len(x.shape) > 1 else xp.squeeze(found, axis=0)


def _scaled_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, (x, kept) = backend.namespace, arrays
    return (round_to_float32(xp.where(xp.equal(kept, 1), xp.multiply(to_float64(x, xp), plan.number), 0.0), xp),)


def _scaled_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array | None, ...]:
    return *_scaled_forward(plan, (cotangents[0], arrays[1]), backend), None


SCALED = register(
    "reproducible.dropout", Operation(_scaled_forward, _scaled_backward, _first_empty, needs_float64=True)
)


def lookup(table: Array, ids: Array, dims: tuple[Any, ...], /, *, xp: Namespace) -> Array:
    """Rows of a table, (entries, C), for ids of these dimensions: what a row receives is added up exactly."""
    (found,) = run(LOOKUP, Constants(), table, xp.reshape(xp.broadcast_to(ids, dims), (-1,)), xp=xp)
    return xp.reshape(found, (*dims, shape(table, xp=xp)[1]))


def broadcast_batch(x: Array, dims: tuple[Any, ...], /, *, xp: Namespace) -> Array:
    """The same array, (G, 1, D), for every entry of a batch: the only row of a table."""
    *leading, groups, length, width = dims
    ids = xp.zeros((1,) * len(leading), dtype=xp.int32, **on_device_of(x))
    rows = lookup(xp.reshape(x, (1, -1)), ids, tuple(leading), xp=xp)
    return xp.reshape(rows, (*leading, groups, length, width))


def _lookup_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    return (take_rows(arrays[0], arrays[1], axis=0, xp=backend.namespace),)


def _lookup_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array | None, ...]:
    """The library's own sums over places are of integers here, so that their order does not matter."""
    xp, (table, ids) = backend.namespace, arrays
    out = to_float64(cotangents[0], xp)
    power = power_above_max(out, -2, xp)
    parts = xp.concat(slices(out, power, SUM_BITS, 2, xp), axis=-1)
    blank = xp.concat([xp.zeros_like(to_float64(table, xp))] * 2, axis=-1)
    _, pull = backend.vjp(lambda table: take_rows(table, ids, axis=0, xp=xp), blank)
    (sums,) = pull(parts)
    width = shape(table, xp=xp)[-1]
    found = xp.add(sums[..., :width], xp.multiply(sums[..., width:], 2.0**-SUM_BITS))
    return round_to_float32(xp.multiply(found, xp.multiply(power, 2.0**-SUM_BITS)), xp), None


def _lookup_empty(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    return _lookup_forward(plan, arrays, backend)


LOOKUP = register(
    "reproducible.lookup", Operation(_lookup_forward, _lookup_backward, _lookup_empty, needs_float64=True)
)


def pooled(x: Array, /, *, xp: Namespace) -> Array:
    """The largest of places, (..., places, C) -> (..., C); its gradient is shared equally by those that are largest."""
    (found,) = run(POOLED, Constants(), x, xp=xp)
    return found


def _largest(x: Array, xp: Namespace) -> Array:
    """The largest of places, which stay: nan where one is, which not every maximum keeps."""
    nan = xp.any(xp.isnan(x), axis=-2, keepdims=True)
    return xp.where(nan, math.nan, xp.max(x, axis=-2, keepdims=True))


def _pooled_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    return (backend.namespace.squeeze(_largest(arrays[0], backend.namespace), axis=-2),)


def _pooled_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    xp = backend.namespace
    x = to_float64(arrays[0], xp)
    largest = xp.astype(xp.equal(x, _largest(x, xp)), xp.float64)
    count = xp.sum(largest, axis=-2, keepdims=True)
    out = xp.expand_dims(to_float64(cotangents[0], xp), axis=-2)
    return (round_to_float32(xp.multiply(divide_rows(out, xp.maximum(count, scalar64(1.0, x, xp)), xp), largest), xp),)


def _pooled_empty(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    return _pooled_forward(plan, arrays, backend)


POOLED = register(
    "reproducible.max_pool", Operation(_pooled_forward, _pooled_backward, _pooled_empty, needs_float64=True)
)


# What spectral normalization needs


def unit(x: Array, epsilon: float, /, *, xp: Namespace) -> Array:
    r"""A vector (1, C) over its norm, :math:`x / (\lVert x \rVert + \epsilon)`."""
    (found,) = run(UNIT, Constants(epsilon), x, xp=xp)
    return found


def _norms(x: Array, epsilon: float, xp: Namespace) -> tuple[Array, Array]:
    norm = uncontracted(xp.sqrt(row_dots(x, x, xp)), xp)
    return norm, xp.add(norm, epsilon)


def _unit_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp = backend.namespace
    x = to_float64(arrays[0], xp)
    return (round_to_float32(divide_rows(x, _norms(x, plan.number, xp)[1], xp), xp),)


def _unit_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    xp = backend.namespace
    x, out = to_float64(arrays[0], xp), to_float64(cotangents[0], xp)
    norm, size = _norms(x, plan.number, xp)
    safe = xp.where(xp.equal(norm, 0.0), 1.0, norm)
    along = uncontracted(xp.divide(row_dots(x, out, xp), uncontracted(xp.multiply(safe, size), xp)), xp)
    return (round_to_float32(divide_rows(xp.subtract(out, uncontracted(xp.multiply(x, along), xp)), size, xp), xp),)


UNIT = register("reproducible.unit", Operation(_unit_forward, _unit_backward, _first_empty, needs_float64=True))


def divide(x: Array, divisor: Array, /, *, xp: Namespace) -> Array:
    """An array over a number, of shape ()."""
    (found,) = run(DIVIDE, Constants(), x, divisor, xp=xp)
    return found


def _divide_forward(plan: Constants, arrays: tuple[Array, ...], backend: Backend) -> tuple[Array, ...]:
    xp, (x, divisor) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    return (round_to_float32(divide_rows(x, divisor, xp), xp),)


def _divide_backward(
    plan: Constants,
    arrays: tuple[Array, ...],
    results: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    backend: Backend,
) -> tuple[Array, ...]:
    xp, (x, divisor) = backend.namespace, (to_float64(each, backend.namespace) for each in arrays)
    out = to_float64(cotangents[0], xp)
    along = exact_sum(xp.reshape(uncontracted(xp.multiply(out, x), xp), (-1,)), 0, xp=xp)
    square = uncontracted(xp.multiply(divisor, divisor), xp)
    of_divisor = xp.negative(xp.divide(xp.reshape(along, tuple(divisor.shape)), square))
    return round_to_float32(divide_rows(out, divisor, xp), xp), round_to_float32(of_divisor, xp)


DIVIDE = register("reproducible.divide", Operation(_divide_forward, _divide_backward, _first_empty, needs_float64=True))
