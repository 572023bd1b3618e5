"""Whether all ranks of a group make the same call of attention: structure, types, numbers, and code of functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from attention_core import Mask, Shards, scaled_dot_product_attention
from attention_core.backend import (
    Array,
    Backend,
    available_backends,
    dtype_name,
    get_backend,
    is_concrete,
    on_device_of,
    shape_text,
)

PLAIN = (int, float, complex, str, bytes, type(None), type(...), slice, range)


def check_same_call(shards: Shards, query: Array, key: Array, value: Array, /, **options: Any) -> None:
    """Raise, on all ranks of a group, unless they are about to make the same call of attention.

    It is a collective, which all ranks call. Of shards, it compares shapes and types, and of all other arguments
    the numbers, too.

    Parameters
    ----------
    shards : Shards
    query, key, value : Array
        The shards of this rank.
    **options
        Those of `attention_core.scaled_dot_product_attention`.

    Raises
    ------
    TypeError, ValueError
        When an argument differs, which is named with the rank; when a compiler traces the call, or the library has no
        collectives.
    """
    backend = _owner_of(query)
    if backend is None or backend.collectives is None:
        raise TypeError(f"expected arrays of a library with collectives; got {type(query).__name__}")
    if not is_concrete(query):
        raise ValueError("expected a call that no compiler traces; got one that is traced")
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    arrays = {"query": query, "key": key, "value": value}
    values = arrays | defaults | options | {"shards": tuple(shards[1:])}
    words = [_digest(each, with_numbers=name not in (*arrays, "bias")) for name, each in values.items() if name != "xp"]
    lent: Any = backend.collectives
    mine = backend.namespace.asarray(np.asarray(words, np.int32), **on_device_of(query))
    columns = backend.to_numpy(lent.all_gather(mine, lent.name_of(shards.group))).T.tolist()
    for name, column in zip((name for name in values if name != "xp"), columns, strict=True):
        usual = max(column, key=column.count)
        rank = next((rank for rank, word in enumerate(column) if word != usual), None)
        if rank is not None:
            raise ValueError(f"expected the same {name} on all ranks of shards; got another on rank {rank}")


def _owner_of(array: Any) -> Backend | None:
    backends = (get_backend(name) for name in available_backends() if name in sys.modules)
    return next((backend for backend in backends if backend.owns(array)), None)


def _digest(value: Any, *, with_numbers: bool) -> int:
    """An int32 of a value: of arrays shapes and types, and perhaps all numbers."""
    arrays: list[Array] = []
    parts = [repr(_plain(value, arrays, {})).encode()]
    for x in arrays:
        parts.append(f"{shape_text(x)} {dtype_name(x.dtype)}".encode())
        owner = _owner_of(x)
        with contextlib.suppress(TypeError):  # a typed key of JAX is no array of NumPy
            parts.append(owner.to_numpy(x).tobytes() if with_numbers and owner is not None else b"")
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
