"""The array API standard over bare `tf.Tensor`: as much of it as attention needs.

array-api-compat is to get a TensorFlow namespace itself (its pull request 441). Nothing but `backend` imports this module,
so that it can be dropped once that namespace passes the tests of this one, unknown dimensions included.

Tensors stay tensors: nothing is wrapped, patched or switched on. A function adds to TensorFlow's own only what the standard
asks for: dtypes promote by its table or raise `TypeError`, a Python number takes the dtype of the array beside it, and a
`tf.Variable` may stand for its value. Two extensions serve attention: `erfc`, and `shape`, whose entries are 0-d tensors
where a dimension is unknown; whatever takes a shape here takes these too.

The default dtypes are float32 and int32. XLA loses NaN in `max`, `min`, `maximum` and `minimum` on a CPU, and float32 products
run as TensorFloat-32 on a GPU unless `tf.config.experimental.enable_tensor_float_32_execution` forbids it: both are settings
of the whole process, which a library leaves to its user.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import tensorflow as tf

from attention_core._typing import Array, DType

__array_api_version__ = "2024.12"

Operation: TypeAlias = Callable[..., Array]
Shape: TypeAlias = int | Array | Sequence[int | Array]
Axis: TypeAlias = int | Sequence[int] | None

inf, nan, pi, newaxis = math.inf, math.nan, math.pi, None

bool = tf.bool
int8, int16, int32, int64 = tf.int8, tf.int16, tf.int32, tf.int64
uint8, uint16, uint32, uint64 = tf.uint8, tf.uint16, tf.uint32, tf.uint64
float16, bfloat16, float32, float64 = tf.float16, tf.bfloat16, tf.float32, tf.float64

_SIGNED = frozenset({int8, int16, int32, int64})
_UNSIGNED = frozenset({uint8, uint16, uint32, uint64})
_INTEGRAL = _SIGNED | _UNSIGNED
_FLOATING = frozenset({float16, bfloat16, float32, float64})
_KINDS: Mapping[str, frozenset[DType]] = {
    "bool": frozenset({bool}),
    "signed integer": _SIGNED,
    "unsigned integer": _UNSIGNED,
    "integral": _INTEGRAL,
    "real floating": _FLOATING,
    "complex floating": frozenset({tf.complex64, tf.complex128}),
    "numeric": _INTEGRAL | _FLOATING | {tf.complex64, tf.complex128},
}


# Promotion


@functools.cache
def _common(first: DType, second: DType) -> DType:
    """The narrowest dtype that holds the values of both."""

    def holds(wide: DType, narrow: DType) -> builtins.bool:
        ladders = (_SIGNED, _UNSIGNED, _FLOATING)
        climbs = builtins.any(narrow in ladder and wide in ladder for ladder in ladders)
        return wide is narrow or (wide.size > narrow.size and (climbs or (narrow in _UNSIGNED and wide in _SIGNED)))

    by_width = sorted(_INTEGRAL | _FLOATING | {first}, key=lambda dtype: (dtype.size, dtype in _SIGNED))
    for dtype in by_width:
        if holds(dtype, first) and holds(dtype, second):
            return dtype
    raise TypeError(f"expected dtypes that promote; got {first.name} and {second.name}")


def _takes(dtype: DType, number: float) -> builtins.bool:
    if isinstance(number, builtins.bool):
        return dtype is bool
    return dtype in _FLOATING or (isinstance(number, int) and dtype in _INTEGRAL)


def _dtype_of(x: Any) -> DType:
    if isinstance(x, tf.DType):
        return x
    if isinstance(x, (tf.Tensor, tf.Variable)):
        return x.dtype
    raise TypeError(f"expected a tf.Tensor, a tf.Variable or a Python number; got {type(x).__name__}")


def result_type(*arrays_and_dtypes: Any) -> DType:
    """Dtype of a result, from arrays, dtypes and Python numbers."""
    numbers = [x for x in arrays_and_dtypes if isinstance(x, int | float)]
    dtypes = [_dtype_of(x) for x in arrays_and_dtypes if not isinstance(x, int | float)]
    if not dtypes:
        raise ValueError("expected at least one array or dtype; got none")
    dtype = functools.reduce(_common, dtypes)
    for number in numbers:
        if not _takes(dtype, number):
            raise TypeError(f"expected a number for an array of {dtype.name}; got {number!r}")
    return dtype


def _promote(*arrays: Array | float) -> list[Array]:
    dtype = result_type(*arrays)
    return [tf.constant(x, dtype) if isinstance(x, int | float) else tf.cast(x, dtype) for x in arrays]


def _binary(operation: Operation) -> Operation:
    def function(x1: Array | float, x2: Array | float, /) -> Array:
        if isinstance(x1, tf.Tensor) and isinstance(x2, tf.Tensor) and x1.dtype is x2.dtype:
            return operation(x1, x2)
        return operation(*_promote(x1, x2))

    return function


# Where TensorFlow has no kernel for a dtype, or another function for it


def _unless(operation: Operation, exceptions: Mapping[DType, Operation]) -> Operation:
    def function(x: Array, /, *others: Array) -> Array:
        return exceptions.get(x.dtype, operation)(x, *others)

    return function


def _by_way_of(operation: Operation, wider: DType) -> Operation:
    """Compute in a wider integer type; coming back wraps around, as the narrow type would have."""

    def function(x1: Array, x2: Array, /) -> Array:
        return tf.cast(operation(tf.cast(x1, wider), tf.cast(x2, wider)), x1.dtype)

    return function


def _for(dtypes: Iterable[DType], operation: Operation) -> dict[DType, Operation]:
    return dict.fromkeys(dtypes, operation)


def _everywhere(value: builtins.bool) -> Operation:
    return lambda x: tf.fill(tf.shape(x), value)


def _matmul(x1: Array, x2: Array, /) -> Array:
    row, column = x1.shape.rank == 1, x2.shape.rank == 1
    product = tf.matmul(x1[tf.newaxis, :] if row else x1, x2[:, tf.newaxis] if column else x2)
    dropped = [axis for axis, vector in ((-2, row), (-1, column)) if vector]
    return tf.squeeze(product, dropped) if dropped else product


# Elementwise functions and the matrix product

exp, log, tanh, sqrt, square, erfc = tf.exp, tf.math.log, tf.tanh, tf.sqrt, tf.square, tf.math.erfc
logical_not, round = tf.logical_not, tf.round
abs = _unless(tf.abs, _for(_UNSIGNED, tf.identity))
negative = _unless(tf.negative, _for(_UNSIGNED, lambda x: tf.zeros_like(x) - x))
sign = _unless(tf.sign, _for(_UNSIGNED, lambda x: tf.minimum(x, tf.ones_like(x))))
floor = _unless(tf.floor, _for(_INTEGRAL, tf.identity))
isfinite = _unless(tf.math.is_finite, _for(_INTEGRAL, _everywhere(True)))
isinf = _unless(tf.math.is_inf, _for(_INTEGRAL, _everywhere(False)))
isnan = _unless(tf.math.is_nan, _for(_INTEGRAL, _everywhere(False)))
bitwise_invert = _unless(tf.bitwise.invert, {bool: tf.logical_not})

add, subtract, multiply, divide = _binary(tf.add), _binary(tf.subtract), _binary(tf.multiply), _binary(tf.realdiv)
floor_divide, remainder = _binary(tf.math.floordiv), _binary(tf.math.floormod)
pow = _binary(_unless(tf.pow, _for(_UNSIGNED, _by_way_of(tf.pow, int64))))
maximum, minimum = _binary(tf.maximum), _binary(tf.minimum)
equal, not_equal, less, less_equal = _binary(tf.equal), _binary(tf.not_equal), _binary(tf.less), _binary(tf.less_equal)
greater, greater_equal = _binary(tf.greater), _binary(tf.greater_equal)
logical_and, logical_or = _binary(tf.logical_and), _binary(tf.logical_or)
bitwise_and = _binary(_unless(tf.bitwise.bitwise_and, {bool: tf.logical_and}))
bitwise_or = _binary(_unless(tf.bitwise.bitwise_or, {bool: tf.logical_or}))
bitwise_xor = _binary(_unless(tf.bitwise.bitwise_xor, {bool: tf.math.logical_xor}))
bitwise_left_shift, bitwise_right_shift = _binary(tf.bitwise.left_shift), _binary(tf.bitwise.right_shift)
matmul = _binary(_unless(_matmul, _for(_INTEGRAL - {int32, int64}, _by_way_of(_matmul, int64))))


def where(condition: Array, x1: Array | float, x2: Array | float, /) -> Array:
    """Elements of the first where the condition holds, elsewhere those of the second."""
    return _binary(functools.partial(tf.where, condition))(x1, x2)


def clip(x: Array, /, min: Array | float | None = None, max: Array | float | None = None) -> Array:
    """Bring elements between two bounds; NaN stays NaN."""
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def astype(x: Array, dtype: DType, /, *, copy: builtins.bool = True, device: str | None = None) -> Array:
    """Convert to another dtype. Tensors cannot be written to, so that a copy could not be told from the original."""
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
    """Repeat along axes of size 1 and new leading axes."""
    return tf.broadcast_to(x, _sizes(shape))


matrix_transpose, expand_dims = tf.linalg.matrix_transpose, tf.expand_dims


def permute_dims(x: Array, /, axes: Sequence[int]) -> Array:
    """Put the axes in another order."""
    return tf.transpose(x, axes)


def squeeze(x: Array, /, axis: int | Sequence[int]) -> Array:
    """Remove axes of size 1."""
    axes = [axis] if isinstance(axis, int) else list(axis)
    if builtins.any(x.shape[axis] not in (1, None) for axis in axes):
        raise ValueError(f"expected size 1 along axes {axes}; got shape {x.shape}")
    return tf.squeeze(x, axes) if axes else x


def concat(arrays: Sequence[Array], /, *, axis: int | None = 0) -> Array:
    """Join along an axis."""
    arrays = _promote(*arrays)
    return tf.concat([reshape(x, -1) for x in arrays], 0) if axis is None else tf.concat(arrays, axis)


def stack(arrays: Sequence[Array], /, *, axis: int = 0) -> Array:
    """Join along a new axis."""
    return tf.stack(_promote(*arrays), axis)


def repeat(x: Array, repeats: int | Array, /, *, axis: int | None = None) -> Array:
    """Repeat each element, one after the other."""
    return tf.repeat(x, repeats, axis=axis)


def take(x: Array, indices: Array, /, *, axis: int | None = None) -> Array:
    """Pick elements along an axis by a 1-D array of indices, each at least 0."""
    return tf.gather(x, indices, axis=0 if axis is None else axis)


# Reductions


def _reduction(operation: Operation) -> Operation:
    def function(x: Array, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Array:
        return operation(x, None if axis is None else tf.constant(axis, int32), keepdims)

    return function


max, min, mean = _reduction(tf.reduce_max), _reduction(tf.reduce_min), _reduction(tf.reduce_mean)
any = _reduction(lambda x, axis, keepdims: tf.reduce_any(tf.cast(x, bool), axis, keepdims))
all = _reduction(lambda x, axis, keepdims: tf.reduce_all(tf.cast(x, bool), axis, keepdims))
_sum = _reduction(tf.reduce_sum)


def sum(x: Array, /, *, axis: Axis = None, dtype: DType | None = None, keepdims: builtins.bool = False) -> Array:
    """Sum; integers are added up in 32 bits at least."""
    if dtype is None:
        dtype = _common(x.dtype, int32 if x.dtype in _SIGNED else uint32) if x.dtype in _INTEGRAL else x.dtype
    return _sum(tf.cast(x, dtype), axis=axis, keepdims=keepdims)


# Creation


def _on(device: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else tf.device(device)


def _default_dtype(*numbers: float | Array) -> DType:
    if builtins.all(isinstance(number, builtins.bool) for number in numbers):
        return bool
    return float32 if builtins.any(isinstance(number, float) for number in numbers) else int32


def asarray(
    obj: Any, /, *, dtype: DType | None = None, device: str | None = None, copy: builtins.bool | None = None
) -> Array:
    """Make a tensor of a tensor, a variable, a number, nested sequences of numbers or a NumPy array."""
    with _on(device):
        if isinstance(obj, tf.Tensor | tf.Variable):
            return tf.identity(obj if dtype is None else tf.cast(obj, dtype))
        if copy is False:
            raise ValueError(f"expected a tensor where nothing may be copied; got {type(obj).__name__}")
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
    first, last = (0, start) if stop is None else (start, stop)
    dtype = _default_dtype(first, last, step) if dtype is None else dtype
    with _on(device):
        if not isinstance(first, tf.Tensor) and not isinstance(last, tf.Tensor):
            return tf.constant(np.arange(first, last, step).astype(dtype.as_numpy_dtype))
        reachable = (maximum if step > 0 else minimum)(first, last)  # TensorFlow refuses to count to none
        return tf.cast(tf.range(first, reachable, step), dtype)


def full(shape: Shape, fill_value: float, *, dtype: DType | None = None, device: str | None = None) -> Array:
    """Make a tensor that holds one value everywhere."""
    with _on(device):
        return tf.fill(_sizes(shape), tf.constant(fill_value, _default_dtype(fill_value) if dtype is None else dtype))


def zeros(shape: Shape, *, dtype: DType | None = None, device: str | None = None) -> Array:
    """Make a tensor of zeros."""
    with _on(device):
        return tf.zeros(_sizes(shape), float32 if dtype is None else dtype)


def ones(shape: Shape, *, dtype: DType | None = None, device: str | None = None) -> Array:
    """Make a tensor of ones."""
    with _on(device):
        return tf.ones(_sizes(shape), float32 if dtype is None else dtype)


def full_like(x: Array, /, fill_value: float, *, dtype: DType | None = None, device: str | None = None) -> Array:
    """Make a tensor of the same shape that holds one value everywhere."""
    return full(shape(x), fill_value, dtype=x.dtype if dtype is None else dtype, device=device)


def zeros_like(x: Array, /, *, dtype: DType | None = None, device: str | None = None) -> Array:
    """Make a tensor of zeros of the same shape."""
    with _on(device):
        return tf.zeros_like(x, dtype)


def ones_like(x: Array, /, *, dtype: DType | None = None, device: str | None = None) -> Array:
    """Make a tensor of ones of the same shape."""
    with _on(device):
        return tf.ones_like(x, dtype)


# Inspection


def finfo(type: Array | DType, /) -> SimpleNamespace:
    """Limits of a floating-point dtype."""
    dtype = _dtype_of(type)
    limits = ml_dtypes.finfo(dtype.as_numpy_dtype)
    values = {name: float(getattr(limits, name)) for name in ("eps", "max", "min", "smallest_normal")}
    return SimpleNamespace(bits=8 * dtype.size, dtype=dtype, **values)


def iinfo(type: Array | DType, /) -> SimpleNamespace:
    """Limits of an integer dtype."""
    dtype = _dtype_of(type)
    return SimpleNamespace(bits=8 * dtype.size, dtype=dtype, max=int(dtype.max), min=int(dtype.min))


def isdtype(dtype: DType, kind: str | DType | tuple[str | DType, ...]) -> builtins.bool:
    """Whether a dtype is of a kind: a name of the standard, a dtype, or several of these."""
    if isinstance(kind, tuple):
        return builtins.any(isdtype(dtype, one) for one in kind)
    if isinstance(kind, str) and kind not in _KINDS:
        raise ValueError(f"expected a kind out of {', '.join(_KINDS)}; got {kind!r}")
    return dtype in _KINDS[kind] if isinstance(kind, str) else dtype is kind


class NamespaceInfo:
    """What the namespace offers, in the terms of the standard."""

    def capabilities(self) -> dict[str, Any]:
        """Say that shapes need not depend on data, and how many axes there may be."""
        return {"boolean indexing": False, "data-dependent shapes": False, "max dimensions": 8}

    def default_device(self) -> str:
        """Name of the device on which tensors are made unless another is asked for."""
        return self.devices()[0]

    def devices(self) -> list[str]:
        """Short names of TensorFlow's devices, the default one first."""
        names = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()]
        return sorted(names, key=lambda name: not name.startswith("GPU"))  # stable: all else keeps its order

    def default_dtypes(self, *, device: str | None = None) -> dict[str, DType]:
        """Dtypes of what is made of Python numbers, and of positions."""
        return {"real floating": float32, "complex floating": tf.complex64, "integral": int32, "indexing": int32}

    def dtypes(self, *, device: str | None = None, kind: str | tuple[str, ...] | None = None) -> dict[str, DType]:
        """Dtypes of the standard by name, those of a kind where one is given."""
        known = _INTEGRAL | {bool, float32, float64}
        return {dtype.name: dtype for dtype in known if kind is None or isdtype(dtype, kind)}


def __array_namespace_info__() -> NamespaceInfo:  # noqa: N807
    """Where the standard wants the namespace to be inspected."""
    return NamespaceInfo()
