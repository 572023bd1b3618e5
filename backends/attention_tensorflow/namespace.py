"""The array API standard over bare `tf.Tensor`: as much of it as attention needs.

A TensorFlow namespace of array-api-compat is proposed. Nothing but `backend` imports this module, so that namespace can
replace it once it passes the tests of this one, unknown dimensions included.

Tensors stay tensors: nothing is wrapped, patched or switched on. A function adds to TensorFlow's own only what the
standard asks for:

* dtypes promote by its table or raise `TypeError`;
* a Python number takes the dtype of the other argument;
* a `tf.Variable` may stand for its value;
* the default dtypes are float32 and int32.

Two extensions serve attention: `erfc`, and `shape`, whose sizes are 0-d tensors where a dimension is unknown. Every
function that takes a shape takes these too.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from attention_core.backend import Array, DType, unconverted
from attention_tensorflow.inspection import (
    INTEGRAL,
    SIGNED,
    UNSIGNED,
    NamespaceInfo,
    bfloat16,
    bool,
    default_dtype,
    finfo,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    promoted_dtype,
    result_type,
    uint8,
    uint16,
    uint32,
    uint64,
)
from attention_tensorflow.programs import is_for_xla

# fmt: off
__all__ = [
    "__array_api_version__", "__array_namespace_info__", "abs", "add", "all", "any", "arange", "argsort", "asarray",
    "astype", "bfloat16", "bitwise_and", "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "bool", "broadcast_to", "clip", "concat", "cos", "divide", "equal", "erfc", "exp", "expand_dims",
    "finfo", "flip", "float16", "float32", "float64", "floor", "floor_divide", "full", "full_like", "greater",
    "greater_equal", "inf", "int8", "int16", "int32", "int64", "isfinite", "isinf", "isnan", "less",
    "less_equal", "log", "logical_and", "logical_not", "logical_or", "matmul", "matrix_transpose", "max", "maximum",
    "mean", "min", "minimum", "multiply", "nan", "negative", "newaxis", "not_equal", "ones", "ones_like",
    "permute_dims", "pi", "pow", "remainder", "repeat", "reshape", "result_type", "round", "shape", "sign", "sin",
    "sort", "sqrt", "square", "squeeze", "stack", "subtract", "sum", "take", "tanh", "uint8", "uint16", "uint32",
    "uint64", "vecdot", "where", "zeros", "zeros_like",
]
# fmt: on

__array_api_version__ = "2024.12"
__array_namespace_info__ = NamespaceInfo
inf, nan, pi, newaxis = math.inf, math.nan, math.pi, None

Operation: TypeAlias = Callable[..., Array]
Shape: TypeAlias = int | Array | Sequence[int | Array]
Axis: TypeAlias = int | Sequence[int] | None


# How operations are made fit for the standard


def _converted(x: Array | float, dtype: DType) -> Array:
    if isinstance(x, int | float):
        return tf.constant(x, dtype)
    return x if x.dtype is dtype else tf.cast(x, dtype)  # a cast to the same dtype takes its time, too


def _promote(*arrays: Array | float) -> list[Array]:
    dtype = result_type(*arrays)
    return [_converted(x, dtype) for x in arrays]


def _binary(operation: Operation) -> Operation:
    """Let two arrays promote first, or an array and a Python number."""

    def function(x1: Array | float, x2: Array | float, /) -> Array:
        if isinstance(x1, tf.Tensor) and isinstance(x2, tf.Tensor) and x1.dtype is x2.dtype:
            return operation(x1, x2)
        return operation(*_promote(x1, x2))

    return function


def _unless(operation: Operation, dtypes: Iterable[DType], other: Operation) -> Operation:
    """Do something else for dtypes that TensorFlow has no kernel for."""
    others = dict.fromkeys(dtypes, other)
    return lambda *arrays: others.get(arrays[0].dtype, operation)(*arrays)


def _in_int64(operation: Operation) -> Operation:
    """Compute in int64; the way back wraps around, as the narrower type would have."""

    def function(x1: Array, x2: Array, /) -> Array:
        return tf.cast(operation(tf.cast(x1, int64), tf.cast(x2, int64)), x1.dtype)

    return function


def _everywhere(value: builtins.bool) -> Operation:
    return lambda x: full_like(x, value, dtype=bool)


# Elementwise functions

exp, log, tanh, sqrt, square, erfc = tf.exp, tf.math.log, tf.tanh, tf.sqrt, tf.square, tf.math.erfc
cos, sin = tf.cos, tf.sin
logical_not, round = tf.logical_not, tf.round
bitwise_invert = _unless(tf.bitwise.invert, {bool}, tf.logical_not)
abs = _unless(tf.abs, UNSIGNED, tf.identity)
negative = _unless(tf.negative, UNSIGNED, lambda x: tf.zeros_like(x) - x)
sign = _unless(tf.sign, UNSIGNED, lambda x: tf.minimum(x, tf.ones_like(x)))
floor = _unless(tf.floor, INTEGRAL, tf.identity)
isfinite = _unless(tf.math.is_finite, INTEGRAL, _everywhere(True))
isinf = _unless(tf.math.is_inf, INTEGRAL, _everywhere(False))
isnan = _unless(tf.math.is_nan, INTEGRAL, _everywhere(False))


def _multiply(x1: Array, x2: Array, /) -> Array:
    """A product. In the gradient of one that repeats no elements, TensorFlow's optimizer of graphs divides by 0."""
    if not tf.executing_eagerly() and 0 in (x1.shape.num_elements(), x2.shape.num_elements()):
        dims = tf.broadcast_static_shape(x1.shape, x2.shape)
        if dims.is_fully_defined():
            return tf.multiply(tf.broadcast_to(x1, dims), tf.broadcast_to(x2, dims))
    return tf.multiply(x1, x2)


add, subtract, multiply, divide = _binary(tf.add), _binary(tf.subtract), _binary(_multiply), _binary(tf.realdiv)
floor_divide, remainder = _binary(tf.math.floordiv), _binary(tf.math.floormod)
pow = _binary(_unless(tf.pow, UNSIGNED, _in_int64(tf.pow)))
# XLA on a CPU keeps the NaN of the first operand only here, and none in `max` and `min`, unless the XLA_FLAGS of the
# process say --xla_cpu_enable_fast_min_max=false.
maximum, minimum = _binary(tf.maximum), _binary(tf.minimum)
equal, not_equal = _binary(tf.equal), _binary(tf.not_equal)
less, less_equal = _binary(tf.less), _binary(tf.less_equal)
greater, greater_equal = _binary(tf.greater), _binary(tf.greater_equal)
logical_and, logical_or = _binary(tf.logical_and), _binary(tf.logical_or)
bitwise_and = _binary(_unless(tf.bitwise.bitwise_and, {bool}, tf.logical_and))
bitwise_or = _binary(_unless(tf.bitwise.bitwise_or, {bool}, tf.logical_or))
bitwise_xor = _binary(_unless(tf.bitwise.bitwise_xor, {bool}, tf.math.logical_xor))
bitwise_left_shift, bitwise_right_shift = _binary(tf.bitwise.left_shift), _binary(tf.bitwise.right_shift)


def where(condition: Array, x1: Array | float, x2: Array | float, /) -> Array:
    """Elements of the first array where the condition holds, elsewhere those of the second."""
    return _binary(functools.partial(tf.where, condition))(x1, x2)


def clip(x: Array, /, min: Array | float | None = None, max: Array | float | None = None) -> Array:
    """Bring elements between two bounds; NaN stays NaN."""
    x = tf.convert_to_tensor(x) if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def astype(x: Array, dtype: DType, /, *, copy: builtins.bool = True, device: str | None = None) -> Array:
    """Convert to another dtype. Nobody can write to a tensor, so that none is ever copied."""
    with _on(device):
        return tf.cast(tf.convert_to_tensor(x), dtype)


# Shapes


def shape(x: Array, /) -> tuple[int | Array, ...]:
    """Sizes of all axes: integers, and 0-d int32 tensors for those unknown while a graph is traced."""
    static = x.shape.as_list()
    if None not in static:
        return tuple(static)
    dynamic = tf.shape(x)
    return tuple(dynamic[axis] if size is None else size for axis, size in enumerate(static))


def _sizes(shape: Shape) -> Array:
    sizes = (shape,) if isinstance(shape, (int, tf.Tensor)) else tuple(shape)
    if builtins.any(isinstance(size, tf.Tensor) for size in sizes):
        return tf.stack([tf.cast(size, int32) for size in sizes])
    return tf.constant(sizes, int32)


def reshape(x: Array, /, shape: Shape, *, copy: builtins.bool | None = None) -> Array:
    """Give another shape; one size may be -1."""
    return tf.reshape(x, _sizes(shape))


def broadcast_to(x: Array, /, shape: Shape) -> Array:
    """Repeat along axes of size 1 and along new leading axes."""
    return tf.broadcast_to(x, _sizes(shape))


def matrix_transpose(x: Array, /) -> Array:
    """Exchange the last two axes."""
    return tf.linalg.matrix_transpose(x)


def permute_dims(x: Array, /, axes: Sequence[int]) -> Array:
    """Put the axes in another order."""
    return tf.transpose(x, axes)


def expand_dims(x: Array, /, *, axis: int = 0) -> Array:
    """Insert an axis of size 1."""
    if not -x.shape.rank <= axis + 1 <= x.shape.rank + 1:
        raise IndexError(f"expected an axis of {x.shape.rank + 1}; got {axis}")
    return tf.expand_dims(x, axis)


def squeeze(x: Array, /, axis: int | Sequence[int]) -> Array:
    """Remove axes of size 1."""
    axes = [axis] if isinstance(axis, int) else list(axis)
    if builtins.any(x.shape[axis] not in (1, None) for axis in axes):
        raise ValueError(f"expected size 1 along axes {axes}; got shape {x.shape}")
    return tf.squeeze(x, axes) if axes else tf.convert_to_tensor(x)  # to TensorFlow, no axes would mean all


def concat(arrays: Sequence[Array], /, *, axis: int | None = 0) -> Array:
    """Join along an axis; ``None`` joins the elements of all."""
    arrays = _promote(*arrays)
    return tf.concat([reshape(x, -1) for x in arrays], 0) if axis is None else tf.concat(arrays, axis)


def stack(arrays: Sequence[Array], /, *, axis: int = 0) -> Array:
    """Join along a new axis."""
    return tf.stack(_promote(*arrays), axis)


def flip(x: Array, /, *, axis: int) -> Array:
    """Turn the order of an axis round."""
    return tf.reverse(x, [axis])


def repeat(x: Array, repeats: int | Array, /, *, axis: int | None = None) -> Array:
    """Repeat each element, one after the other."""
    return tf.repeat(x, repeats, axis=axis)


def take(x: Array, indices: Array, /, *, axis: int | None = None) -> Array:
    """Pick elements along an axis by a 1-D array of indices; negative ones count from the end."""
    axis = 0 if axis is None else axis
    indices = where(less(indices, 0), add(indices, shape(x)[axis]), indices)
    if x.shape[axis] is None and is_for_xla():  # of nothing, its result would have no axis of indices
        x = tf.pad(x, [[0, int(dim == axis % x.shape.rank)] for dim in range(x.shape.rank)])
    return tf.gather(x, indices, axis=axis)


def argsort(x: Array, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True) -> Array:
    """Indices that put the elements along an axis in order; those of equal ones stay in order."""
    direction = "DESCENDING" if descending else "ASCENDING"
    return tf.cast(tf.argsort(x, axis=axis, direction=direction, stable=True), int64)


def sort(x: Array, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True) -> Array:
    """The elements in order along an axis."""
    return tf.sort(x, axis=axis, direction="DESCENDING" if descending else "ASCENDING")


# Reductions, and the matrix product


def _reduction(operation: Operation) -> Operation:
    def function(x: Array, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Array:
        return operation(x, None if axis is None else tf.constant(axis, int32), keepdims)

    return function


max, min, mean = _reduction(tf.reduce_max), _reduction(tf.reduce_min), _reduction(tf.reduce_mean)
any = _reduction(lambda x, axis, keepdims: tf.reduce_any(tf.cast(x, bool), axis, keepdims))
all = _reduction(lambda x, axis, keepdims: tf.reduce_all(tf.cast(x, bool), axis, keepdims))


def sum(x: Array, /, *, axis: Axis = None, dtype: DType | None = None, keepdims: builtins.bool = False) -> Array:
    """Sum; integers are added up in 32 bits at least."""
    if dtype is None:
        dtype = promoted_dtype(x.dtype, int32 if x.dtype in SIGNED else uint32) if x.dtype in INTEGRAL else x.dtype
    return _reduction(tf.reduce_sum)(_converted(x, dtype), axis=axis, keepdims=keepdims)


def _product(x1: Array, x2: Array, /) -> Array:
    row, column = x1.shape.rank == 1, x2.shape.rank == 1
    if x1.shape.rank > 2 and x1.shape.rank >= x2.shape.rank >= 2 and x2.shape[:-2].num_elements() == 1:
        # As one matrix: of (2, 1, 3, 5) and (5, 7), TensorFlow 2.21 with oneDNN gives wrong numbers, or crashes.
        *leading, width = shape(x1)
        rows = math.prod(leading[1:], start=leading[0])
        product = tf.matmul(reshape(x1, (rows, width)), reshape(x2, shape(x2)[-2:]))
        return reshape(product, (*leading, shape(x2)[-1]))
    if not row and not column:
        return tf.matmul(x1, x2)
    product = tf.matmul(x1[tf.newaxis, :] if row else x1, x2[:, tf.newaxis] if column else x2)
    return squeeze(product, [axis for axis, vector in ((-2, row), (-1, column)) if vector])


# Whether a GPU may round float32 to TensorFloat-32 here is a setting of TensorFlow's, which is left to the user.
matmul = _binary(_unless(_product, INTEGRAL - {int32, int64}, _in_int64(_product)))


def vecdot(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """Product of vectors along an axis."""
    products = multiply(x1, x2)
    return sum(products, axis=axis, dtype=products.dtype)


# Creation


def _on(device: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else tf.device(device)


def asarray(
    obj: Any, /, *, dtype: DType | None = None, device: str | None = None, copy: builtins.bool | None = None
) -> Array:
    """Make a tensor of a tensor, a variable, a number, nested sequences of numbers or a NumPy array."""
    with _on(device):
        if isinstance(obj, (tf.Tensor, tf.Variable)):
            return tf.identity(obj if dtype is None else tf.cast(obj, dtype))
        if copy is False:
            raise ValueError(f"expected a tensor, as nothing may be copied; got {type(obj).__name__}")
        if dtype is None and not isinstance(obj, np.ndarray | np.generic):
            dtype = default_dtype(obj)
        return tf.constant(obj if dtype is None else np.asarray(obj, dtype.as_numpy_dtype))


def arange(
    start: float | Array,
    /,
    stop: float | Array | None = None,
    step: float = 1,
    *,
    dtype: DType | None = None,
    device: str | None = None,
) -> Array:
    """Count from start, which is included, to stop, which is not."""
    start, stop = (0, start) if stop is None else (start, stop)
    known = [number for number in (start, stop, step) if not isinstance(number, tf.Tensor)]
    dtype = default_dtype(known) if dtype is None else dtype
    with _on(device):
        if len(known) == 3:
            return tf.constant(np.arange(start, stop, step).astype(dtype.as_numpy_dtype))
        stop = maximum(start, stop) if step > 0 else minimum(start, stop)  # TensorFlow refuses to count the other way
        return tf.cast(tf.range(start, stop, step), dtype)


def full(shape: Shape, fill_value: float, *, dtype: DType | None = None, device: str | None = None) -> Array:
    """Make a tensor that holds one value everywhere."""
    dtype = default_dtype(fill_value) if dtype is None else dtype
    with _on(device):
        value = tf.constant(builtins.bool(fill_value) if dtype is bool else fill_value, dtype)
        return value if shape == () else tf.fill(_sizes(shape), value)


def zeros(shape: Shape, *, dtype: DType | None = None, device: str | None = None) -> Array:
    """Make a tensor of zeros."""
    return full(shape, 0, dtype=float32 if dtype is None else dtype, device=device)


def ones(shape: Shape, *, dtype: DType | None = None, device: str | None = None) -> Array:
    """Make a tensor of ones."""
    return full(shape, 1, dtype=float32 if dtype is None else dtype, device=device)


def _like(make: Operation) -> Operation:
    def function(x: Array, /, *value: float, dtype: DType | None = None, device: str | None = None) -> Array:
        return make(shape(x), *value, dtype=x.dtype if dtype is None else dtype, device=device)

    return function


full_like, zeros_like, ones_like = _like(full), _like(zeros), _like(ones)

for _name in __all__:
    if getattr(vars()[_name], "__module__", "").startswith("attention_"):  # others are TensorFlow's own
        unconverted(vars()[_name])
