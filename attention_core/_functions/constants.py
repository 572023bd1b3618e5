"""NumPy arrays next to arrays of another library: constants, which masks, lengths and offsets mostly are."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from attention_core._arrays import Array, dtype_name, on_device_of
from attention_core._backend import array_namespace, is_compiling, is_of_numpy
from attention_core._checks import check_added_dtype
from attention_core._functions.options import ARRAYS


def with_constants(like: Array, options: dict[str, Any], /) -> dict[str, Any]:
    """Turn NumPy arrays among options into constants of another array's library, on its device.

    Masks, score modifications and tuples may hold some. Where nothing is turned, the options are returned themselves.
    """
    if is_of_numpy(like) or not hasattr(like, "dtype") or not any(_holds_numpy(options.get(name)) for name in ARRAYS):
        return options
    for name in () if is_compiling(like) else ("bias", "sinks"):  # before the library narrows their dtype
        if is_of_numpy(options.get(name)):
            check_added_dtype(name, options[name], like)
    return options | {name: _constant(options[name], like) for name in ARRAYS if name in options}


def as_constant(value: Any, like: Array, /) -> Any:
    """One NumPy array as a constant of another array's library; anything else as it is."""
    return _constant(value, like) if hasattr(like, "dtype") and not is_of_numpy(like) else value


def _holds_numpy(value: Any) -> bool:
    return is_of_numpy(value) or any(map(_holds_numpy, _branches(value)))


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


def _constant(value: Any, like: Array) -> Any:
    if is_of_numpy(value):
        if not is_compiling(like):
            is_bfloat16 = dtype_name(value.dtype) == "bfloat16"  # which libraries do not take from NumPy
            native = "float32" if is_bfloat16 else value.dtype.newbyteorder("=")
            value = value.astype(native, order="C", copy=False)  # PyTorch takes no negative strides
        return array_namespace(like).asarray(value, **on_device_of(like))
    if not _holds_numpy(value):
        return value
    parts = [_constant(each, like) for each in _branches(value)]
    if not isinstance(value, tuple):
        return replace(value, **{field.name: part for field, part in zip(fields(value), parts, strict=True)})
    return tuple(parts) if type(value) is tuple else type(value)(*parts)
