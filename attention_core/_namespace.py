"""From arrays to the functions of their library, and the facts that the standard leaves open.

Those are: shapes with unknown dimensions, the device of a new array, floating-point types beyond the standard's two,
and whether values can be read yet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import array_api_compat

from attention_core._typing import Array, DType, Namespace
from attention_core.backend import Backend, entries, get_backend

__all__ = [
    "array_namespace",
    "backend_of",
    "beside",
    "dtype_name",
    "index_dtype",
    "is_concrete",
    "is_exporting",
    "narrow",
    "positions",
    "rows_at",
    "shape",
    "wide_name",
    "widen",
]

FLOATING = ("float16", "bfloat16", "float32", "float64")

_namespaces: dict[type, Namespace] = {}
_backends: dict[type, Backend] = {}
_names: dict[type, dict[DType, str]] = {}  # plain dictionaries: compilers do not trace functools.cache


def array_namespace(*arrays: Array) -> Namespace:
    """The array namespace that all given arrays share; ``None`` and Python numbers are passed over.

    Libraries that array-api-compat wraps are taken from there. Any other is first looked up among the backends, which
    may supply what a library lacks, or correct what it has.

    Raises
    ------
    TypeError
        When something is not an array, when arrays of two libraries are mixed, or when there is no array at all.

    Examples
    --------
    >>> import array_api_strict as library
    >>> array_namespace(library.ones(3), None, 0.5) is library
    True
    """
    found: Namespace = None
    for array in arrays:
        if array is None or isinstance(array, int | float):
            continue
        xp = _namespaces.get(type(array)) or _namespace_of(array)
        if found is None:
            found = xp
        elif xp is not found:
            raise TypeError(f"expected arrays of one library; got {_library(found)} and {_library(xp)}")
    if found is None:
        raise TypeError("expected at least one array; got none")
    return found


def _namespace_of(array: Array) -> Namespace:
    if hasattr(array, "mask"):
        raise TypeError(f"expected a plain array; got {type(array).__name__}, whose own mask would be lost")
    try:
        xp = array_api_compat.array_namespace(array)
    except TypeError:
        xp = None
    # What array-api-compat wraps itself needs no backend, and looking for one would not trace under torch.compile.
    if xp is None or not xp.__name__.startswith("array_api_compat."):
        backend = backend_of(array)
        xp = backend.namespace if backend else xp
    if xp is None:
        raise TypeError(f"expected an array; got {type(array).__name__}")
    _namespaces[type(array)] = xp
    return xp


def backend_of(array: Array) -> Backend | None:
    """The backend that owns this array, out of those whose library is in use."""
    kind = type(array)
    if _is_compiling(array):
        _learn(kind)
    backend = _backends.get(kind)
    if backend is None:
        library = _library_of(kind)
        in_use = sorted((name for name in entries() if name in sys.modules), key=lambda name: name != library)
        backend = next((backend for backend in map(get_backend, in_use) if backend.owns(array)), None)
        if backend is not None:
            _backends[kind] = backend
            _learn_kin(kind)
    return backend


def _learn(kind: type) -> None:
    """Find the backend for a class of arrays, without an array to ask it about.

    A compiler sees what was learned before it first looked: all kin is learned at once, so that no other class is new.
    """
    if kind not in _backends:
        _backends[kind] = get_backend(_home_of(kind))
        _learn_kin(kind)


def _learn_kin(kind: type) -> None:
    """Remember the backend of a class for all classes that share a root with it, and belong to no other library."""
    home = _home_of(kind)
    roots = [base for base in kind.__mro__ if _library_of(base) == home] or [kind]
    for each in _kin(roots[-1]):
        if _home_of(each) == home:
            _backends.setdefault(each, _backends[kind])


def _home_of(kind: type) -> str:
    """The library with a backend that a class belongs to, itself or by a base; an empty name for none."""
    return next((library for library in map(_library_of, kind.__mro__) if library in entries()), "")


def _kin(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = type.__subclasses__(kind)
    for each in subclasses:
        yield from _kin(each)


_learn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile runs this, and does not trace it


def _is_compiling(array: Array) -> bool:
    """Whether the library of an array records what is called, so that hardly anything else can be looked up."""
    compiler = _compiler(array)
    return hasattr(compiler, "is_compiling") and bool(compiler.is_compiling())


def is_exporting(array: Array, /) -> bool:
    """Whether the library of an array records a program for other machines, and perhaps for other lengths."""
    compiler = _compiler(array)
    return hasattr(compiler, "is_exporting") and bool(compiler.is_exporting())


def _compiler(array: Array) -> Any:
    return getattr(sys.modules.get(_library_of(type(array))), "compiler", None)


def _library_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


_library_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it cannot be asked of a class of parameters


def _library(xp: Namespace) -> str:
    """The name a user knows a namespace by: ``torch`` for ``array_api_compat.torch``."""
    name: str = xp.__name__.removeprefix("array_api_compat.").removeprefix("attention_")
    return name.partition(".")[0]


def is_concrete(array: Array, /) -> bool:
    """Whether the values of an array can be read now, without tracing, computing or waiting for a graph."""
    if _is_compiling(array):
        return False
    backend = backend_of(array)
    return backend.is_concrete(array) if backend else False


def dtype_name(dtype: DType, /) -> str:
    """The name of a dtype, the same for every library: ``float32``, ``bfloat16``, ``bool``."""
    if not hasattr(dtype, "name"):
        return str(dtype).rpartition(".")[2].lower()
    names = _names.setdefault(type(dtype), {})  # dtypes of two libraries are never compared: some warn
    if dtype not in names:
        names[dtype] = str(dtype.name).lower()
    return names[dtype]


def wide_name(dtype: DType, /) -> str:
    """The name of the type in which one computes: float32 for the types of 16 bits, else the type itself."""
    name = dtype_name(dtype)
    return "float32" if name in ("float16", "bfloat16") else name


def widen(tree: Any, /, *, xp: Namespace) -> Any:
    """Turn the 16-bit floating-point arrays of a tree into float32, which is exact; leave the rest."""
    if tree is None or isinstance(tree, int | float):
        return tree
    if isinstance(tree, tuple):
        branches = [widen(branch, xp=xp) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)
    return xp.astype(tree, xp.float32) if dtype_name(tree.dtype) in ("float16", "bfloat16") else tree


def narrow(array: Array, dtype: DType, /, *, xp: Namespace) -> Array:
    """Round an array once to a dtype; a no-op where it has that already."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def shape(array: Array, /, *, xp: Namespace) -> tuple[Any, ...]:
    """The shape: integers, and 0-d integer arrays for dimensions that are unknown while a function is traced.

    Raises
    ------
    ValueError
        When a dimension is not even to be computed, as in dask arrays after a selection.
    """
    dims = tuple(array.shape)
    if None in dims:  # a graph with open dimensions: the library computes them
        return tuple(xp.shape(array)) if hasattr(xp, "shape") else _dynamic_shape(array)
    if any(dim != dim for dim in dims):
        raise ValueError(f"expected known dimensions; got {dims}: call compute_chunk_sizes() first")
    return dims


def _dynamic_shape(array: Array) -> tuple[Any, ...]:
    computed = array.dynamic_shape
    return tuple(computed[axis] if dim is None else dim for axis, dim in enumerate(array.shape))


def beside(array: Array, /) -> dict[str, Any]:
    """The keyword arguments that make a new array on the device of this one.

    None are given where the library places arrays by itself: while tracing, and where arrays carry a sharding.
    """
    device = None if has_sharding(array) else getattr(array, "device", None)
    return {"device": device} if device else {}


def has_sharding(array: Array, /) -> bool:
    """Whether the array is one of JAX, which places arrays by their sharding, and can be updated ``at`` an index.

    A traced one, asked for its sharding itself, would tell at length, through all of its program, why it has none.
    """
    return hasattr(array, "at")


def rows_at(table: Array, index: Array, /, *, axis: int, xp: Namespace) -> Array:
    """Take along an axis by a 1-D array of positions, in the integer type that the library indexes with."""
    return xp.take(table, xp.astype(index, index_dtype(index, xp=xp), copy=False), axis=axis)


def index_dtype(like: Array, /, *, xp: Namespace) -> DType:
    """The integer type with which a library indexes on a device: int64, or int32 where that is the widest in use."""
    return xp.__array_namespace_info__().default_dtypes(**beside(like))["indexing"]


def positions(length: Any, like: Array, /, *, xp: Namespace) -> Array:
    """The positions 0, 1, …, length - 1 as int32, on the device of ``like``."""
    return xp.arange(length, dtype=xp.int32, **beside(like))
