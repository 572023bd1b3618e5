"""A number that tells arguments apart: by structure, types, numbers, and the code of functions."""

from __future__ import annotations

import contextlib
import functools
import types
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

from attention_core._arrays import Array, dtype_name, shape_text
from attention_core._backend import Backend, backend_of
from attention_core.masks import Mask

PLAIN = (int, float, complex, str, bytes, type(None), type(...), slice, range)


def digest(value: Any, backend: Backend, *, with_numbers: bool) -> int:
    """An int32 of a value: of arrays shapes and types, and perhaps all numbers."""
    arrays: list[Array] = []
    parts = [repr(_plain(value, arrays, {})).encode()]
    for x in arrays:
        parts.append(f"{shape_text(x)} {dtype_name(x.dtype)}".encode())
        lender = backend_of(x)
        with contextlib.suppress(TypeError):  # a typed key of JAX is no array of NumPy
            parts.append(lender.to_numpy(x).tobytes() if with_numbers and lender is not None else b"")
    return zlib.crc32(b";".join(parts)) >> 1


def _plain(value: Any, arrays: list[Array], seen: dict[int, tuple[int, Any]]) -> Any:
    """A value without addresses, whose arrays are appended to a list; what was seen before is there by its number."""
    inner = functools.partial(_plain, arrays=arrays, seen=seen)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple):
        return tuple(map(inner, value))
    if isinstance(value, frozenset):  # whose order is one of hashes
        return tuple(sorted(map(repr, map(inner, value))))
    if isinstance(value, types.CodeType):
        return value.co_code, inner(value.co_consts), value.co_names
    if isinstance(value, types.ModuleType):
        return value.__name__
    is_class = isinstance(value, type)
    if hasattr(value, "dtype") and hasattr(value, "shape") and not is_class:
        arrays.append(value)
        return len(arrays)
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value
    if is_dataclass(value) and not is_class:
        return inner((type(value), *(getattr(value, field.name) for field in fields(value))))
    if isinstance(value, list | dict):
        return inner(tuple(value.items() if isinstance(value, dict) else value))
    if isinstance(value, types.FunctionType):
        cells = tuple(map(_held, value.__closure__ or ()))
        return value.__qualname__, inner((value.__code__, value.__defaults__, value.__kwdefaults__, cells))
    if isinstance(value, types.MethodType):  # whose object may hold what ranks do not share, such as weights
        return inner(value.__func__)
    if isinstance(value, functools.partial):
        return inner((value.func, value.args, value.keywords))
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if is_class:
        return name, inner(tuple(filter(_is_function, vars(value).values() if issubclass(value, Mask) else ())))
    if not callable(value):
        return name
    call = getattr(type(value), "__call__", None)  # noqa: B004
    return name, inner((call if _is_function(call) else None, getattr(value, "__dict__", None)))


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType)


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None
