"""NumPy arrays next to arrays of another library: constants, which masks, lengths and offsets mostly are."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from attention_core._arrays import Array, dtype_name, on_device_of
from attention_core._backend._find import array_namespace, is_compiling, is_of_numpy

__all__ = ["as_constant", "constant", "holds_numpy"]


def as_constant(value: Any, like: Array, /, *, wraps: bool = False) -> Any:
    """One NumPy array as a constant of another array's library; anything else as it is."""
    return constant(value, like, wraps=wraps) if hasattr(like, "dtype") and not is_of_numpy(like) else value


def holds_numpy(value: Any) -> bool:
    """Whether this is an array of NumPy, or a tuple, mask or dataclass that holds one."""
    return is_of_numpy(value) or any(map(holds_numpy, _branches(value)))


def _branches(value: Any) -> list[Any]:
    """The parts of a tuple, or of a mask or another dataclass."""
    if isinstance(value, tuple):
        return list(value)
    # Dynamo answers no question about classes of numbers.
    if value is None or isinstance(value, int | str) or type(value) is float:
        return []
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def constant(value: Any, like: Array, /, *, wraps: bool = False) -> Any:
    """Turn the NumPy arrays of a tree into constants of another array's library, on its device.

    Integers that a library cannot hold raise, unless only their last 32 bits count.
    """
    if is_of_numpy(value):
        if not is_compiling(like):
            is_bfloat16 = dtype_name(value.dtype) == "bfloat16"  # which libraries do not take from NumPy
            native = "float32" if is_bfloat16 else value.dtype.newbyteorder("=")
            value = value.astype(native, order="C", copy=False)  # PyTorch takes no negative strides
        made = array_namespace(like).asarray(value, **on_device_of(like))
        if not wraps and not is_compiling(like):
            _check_fits(value, made)
        return made
    if not holds_numpy(value):
        return value
    parts = [constant(each, like, wraps=wraps) for each in _branches(value)]
    if not isinstance(value, tuple):
        return replace(value, **{field.name: part for field, part in zip(fields(value), parts, strict=True)})
    return tuple(parts) if type(value) is tuple else type(value)(*parts)


def _check_fits(value: Any, made: Array) -> None:
    """Raise if integers of NumPy are beyond those of an array that was made of them: JAX has none of 64 bits."""
    kind = dtype_name(made.dtype)
    if value.dtype.kind in "iu" and kind != dtype_name(value.dtype):
        beyond = value[value != value.astype(kind)]
        if beyond.size:
            raise ValueError(f"expected integers within {kind}, the widest of the library; got {beyond[0]}")
