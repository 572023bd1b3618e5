"""What attention asks of a library by the array API standard: its dtypes, their limits and promotion, its devices."""

from __future__ import annotations

import builtins
import functools
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from attention_core.backend import Array, DType

bool = tf.bool
int8, int16, int32, int64 = tf.int8, tf.int16, tf.int32, tf.int64
uint8, uint16, uint32, uint64 = tf.uint8, tf.uint16, tf.uint32, tf.uint64
float16, bfloat16, float32, float64 = tf.float16, tf.bfloat16, tf.float32, tf.float64

SIGNED = frozenset({int8, int16, int32, int64})
UNSIGNED = frozenset({uint8, uint16, uint32, uint64})
INTEGRAL = SIGNED | UNSIGNED
FLOATING = frozenset({float16, bfloat16, float32, float64})


def _holds(wide: DType, narrow: DType) -> builtins.bool:
    if wide is narrow or wide.size <= narrow.size:
        return wide is narrow
    one_kind = any({wide, narrow} <= kind for kind in (SIGNED, UNSIGNED, FLOATING))
    return one_kind or (narrow in UNSIGNED and wide in SIGNED)


@functools.cache
def promoted_dtype(first: DType, second: DType) -> DType:
    """Find the narrowest dtype that holds the values of both; where there is none, raise `TypeError`."""
    for dtype in (first, second, int16, int32, int64, float32):  # what two dtypes promote to if not to one of them
        if _holds(dtype, first) and _holds(dtype, second):
            return dtype
    raise TypeError(f"expected dtypes that promote; got {first.name} and {second.name}")


def _dtype_of(x: Any) -> DType:
    if isinstance(x, tf.DType):
        return x
    if isinstance(x, (tf.Tensor, tf.Variable)):
        return x.dtype
    raise TypeError(f"expected a tf.Tensor, a tf.Variable or a Python number; got {type(x).__name__}")


def _takes(dtype: DType, number: float) -> builtins.bool:
    if isinstance(number, builtins.bool):
        return dtype is bool
    return dtype in FLOATING or (isinstance(number, int) and dtype in INTEGRAL)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """Dtype of what is computed from arrays, dtypes and Python numbers."""
    dtypes = [_dtype_of(x) for x in arrays_and_dtypes if not isinstance(x, int | float)]
    if not dtypes:
        raise ValueError("expected at least one array or dtype; got none")
    dtype = functools.reduce(promoted_dtype, dtypes)
    for number in arrays_and_dtypes:
        if isinstance(number, int | float) and not _takes(dtype, number):
            raise TypeError(f"expected a Python number that fits {dtype.name}; got {number!r}")
    return dtype


def default_dtype(numbers: Any) -> DType:
    """Dtype of what is made of one Python number, or of nested sequences of them."""
    kind = np.asarray(numbers).dtype.kind
    return bool if kind == "b" else float32 if kind == "f" else int32


def finfo(type: Array | DType, /) -> SimpleNamespace:
    """Limits of a floating-point dtype."""
    dtype = _dtype_of(type)
    limits = ml_dtypes.finfo(dtype.as_numpy_dtype)
    values = {name: float(getattr(limits, name)) for name in ("eps", "max", "min", "smallest_normal")}
    return SimpleNamespace(bits=8 * dtype.size, dtype=dtype, **values)


class NamespaceInfo:
    """What the namespace offers, in the terms of the standard."""

    def devices(self) -> list[str]:
        """List the short names of TensorFlow's devices, the default one first."""
        names = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()]
        return sorted(names, key=lambda name: not name.startswith("GPU"))  # stable: all else keeps its order

    def default_dtypes(self, *, device: str | None = None) -> dict[str, DType]:
        """Name the dtypes of what is made of Python numbers, and of positions."""
        return {"real floating": float32, "integral": int32, "indexing": int64}
