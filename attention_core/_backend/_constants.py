"""NumPy arrays next to arrays of another library: constants, which masks, lengths and offsets mostly are."""

from __future__ import annotations

from typing import Any

from .._arrays import Array, dtype_name, on_device_of
from .._trees import flatten, unflatten
from ._find import array_namespace, is_compiling, is_of_numpy

__all__ = ["as_constant", "constant", "holds_numpy"]


def as_constant(value: Any, like: Array, /, *, wraps: bool = False) -> Any:
    """One NumPy array as a constant of another array's library; anything else as it is."""
    return constant(value, like, wraps=wraps) if hasattr(like, "dtype") and not is_of_numpy(like) else value


def holds_numpy(value: Any) -> bool:
    """Whether this is an array of NumPy, or a tuple, mask or dataclass that holds one."""
    arrays: list[Array] = []
    flatten(value, arrays)
    return any(map(is_of_numpy, arrays))


def constant(value: Any, like: Array, /, *, wraps: bool = False) -> Any:
    """Turn the NumPy arrays of a tree into constants of another array's library, on its device.

    Integers that a library cannot hold raise, unless only their last 32 bits count.
    """
    arrays: list[Array] = []
    treedef = flatten(value, arrays)
    if not any(map(is_of_numpy, arrays)):
        return value
    return unflatten(treedef, [_made(array, like, wraps) if is_of_numpy(array) else array for array in arrays])


def _made(array: Any, like: Array, wraps: bool) -> Array:
    traced = is_compiling(like)
    if not traced:
        is_bfloat16 = dtype_name(array.dtype) == "bfloat16"  # which libraries do not take from NumPy
        native = "float32" if is_bfloat16 else array.dtype.newbyteorder("=")
        array = array.astype(native, order="C", copy=False)  # PyTorch takes no negative strides
    made = array_namespace(like).asarray(array, **on_device_of(like))
    if not (wraps or traced):
        _check_fits(array, made)
    return made


def _check_fits(value: Any, made: Array) -> None:
    """Raise if integers of NumPy are beyond those of an array that was made of them: JAX has none of 64 bits."""
    kind = dtype_name(made.dtype)
    if value.dtype.kind in "iu" and kind != dtype_name(value.dtype):
        beyond = value[value != value.astype(kind)]
        if beyond.size:
            raise ValueError(f"expected integers within {kind}, the widest of the library; got {beyond[0]}")
