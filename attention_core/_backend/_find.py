"""From an array to its namespace and its backend, and from arrays of NumPy next to it to constants."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import array_api_compat

from .._arrays import (
    OURS,
    Array,
    Namespace,
    dtype_name,
    flatten,
    named_arrays,
    on_device_of,
    refusal,
    type_text,
    unflatten,
)
from .._keywords import unconverted, untraced
from ._base import Backend, library_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PADDED = ": make it dense, with padding that mask=KeyLengths(...) hides"
ACCELERATORS = ("cuda", "gpu", "tpu", "mps", "xpu", "hpu", "npu", "metal")  # words in the names of their devices
STANDARD = "2024.12"  # from which on functions take Python numbers
_namespaces: dict[type, Namespace] = {}
_backends: dict[type, Backend] = {}
_eager_types: set[type] = set()


@unconverted
def array_namespace(array: Array, /) -> Namespace:
    """The array namespace of an array.

    Libraries that array-api-compat wraps are taken from there. Any other is first looked up among the backends, which
    may supply what a library lacks, or correct what it has.

    Raises
    ------
    TypeError
        When this is no array.

    Examples
    --------
    >>> import array_api_strict as library
    >>> array_namespace(library.ones(3)) is library
    True
    """
    return _namespaces.get(type(array)) or _namespace_of(array)


def common_namespace(xp: Namespace | None, arrays: Mapping[str, Any], /) -> Namespace:
    """`array_namespace` of arguments, which errors name: arrays, named tuples of arrays, numbers and ``None``.

    An ``xp`` has to be the namespace of their library.
    """
    found, library, kind = None, None, None
    leaves: dict[str, Any] = {}
    for name, value in arrays.items():
        is_tree = isinstance(value, tuple) and hasattr(value, "_fields")
        leaves |= named_arrays(value, name) if is_tree else {name: value}
    for name, array in leaves.items():
        if array is None or isinstance(array, int | float):
            continue
        if type(array) is not kind:  # those of one class have one namespace
            kind, library = type(array), _namespaces.get(type(array)) or _namespace_of(array, name)
        if not is_dense(array):
            raise TypeError(f"expected {name} as a dense array; got a sparse or nested one{PADDED}")
        if found is None:
            found = library
        elif library is not found:
            first, other = library_name(found), library_name(library)
            other = type_text(array) if other == first else other
            raise TypeError(f"expected arrays of one library; got {first} and {other} ({name})")
    if found is None:
        name, value = next(iter(arrays.items()))
        raise TypeError(f"expected {name} as an array; got {type_text(value)}")
    _check_standard(found)
    return found if xp is None or xp is found else _agreeing(xp, found)


def _agreeing(xp: Any, found: Namespace) -> Namespace:
    """The namespace to compute with: the library's own, or one of another making for the same library."""
    check_namespace(xp)
    if library_name(xp) != library_name(found):
        raise TypeError(f"expected xp as the namespace of the arrays, that of {library_name(found)}; got {xp.__name__}")
    return found if isinstance(xp, ModuleType) else xp


def own_namespace(xp: Any, /) -> Namespace:
    """The namespace of a library to make arrays with, by the library's own module as well."""
    check_namespace(xp)
    name: str = xp.__name__
    if "." not in name and name in entries():  # the module that users import; compilers trace no further
        xp = get_backend(name).namespace
    _check_standard(xp)
    return xp


def check_namespace(xp: Any, /) -> None:
    """Raise unless this can be a namespace of functions: a module, or an object with the name of one."""
    if not isinstance(getattr(xp, "__name__", None), str) or isinstance(xp, type) or callable(xp):
        raise TypeError(f"expected xp as an array namespace; got {type_text(xp)}")


def _check_standard(xp: Any) -> None:
    """Raise if a namespace is of an older version of the standard than the one that is needed."""
    version = getattr(xp, "__array_api_version__", STANDARD)
    if version < STANDARD:
        raise TypeError(f"expected arrays of version {STANDARD} of the array API standard; got {version}")


def is_dense(array: Array, /) -> bool:
    """Whether an array is neither sparse nor nested; such tensors of PyTorch have the class of the others."""
    layout = str(getattr(array, "layout", ""))  # other libraries call other things so
    return not (getattr(array, "is_nested", False) or "sparse" in layout or "jagged" in layout or "mkldnn" in layout)


def _namespace_of(array: Array, name: str = "") -> Namespace:
    if hasattr(array, "mask") and not callable(array.mask):
        expected = f"{name} as a plain array" if name else "a plain array"
        raise TypeError(f"expected {expected}; got {type(array).__name__}, whose own mask would be lost")
    refused = _learn_refusal(type(array))
    if refused is not None:
        expected = f"{name or 'an argument'} as a plain array"
        raise TypeError(f"expected {expected}; got {type(array).__name__}{refused}")
    traced = is_compiling(array)
    try:  # a compiler complains about the caches of array-api-compat
        xp = None if traced else array_api_compat.array_namespace(array)
    except TypeError:
        xp = None
    if xp is None or not xp.__name__.startswith("array_api_compat."):
        backend = backend_of(array)
        xp = backend.namespace if backend else xp
    if xp is None:
        raise TypeError(f"expected {f'{name} as an array' if name else 'an array'}; got {type_text(array)}")
    if not traced:  # torch.compile lets nothing be written from inside of a checkpoint
        _namespaces[type(array)] = xp
    return xp


@untraced
def _learn_refusal(kind: type) -> str | None:
    """What to write instead of arrays of a class, which the adapter of its library may say once it is loaded."""
    library = _library_of(kind)
    for each in [library] if library in entries() else entries():  # Keras, which has no backend, is on one that has
        if each in sys.modules:
            get_backend(each)
    return refusal(kind)


def backend_of(array: Array) -> Backend | None:
    """The backend that owns this array, out of those whose library is in use."""
    kind = type(array)
    if is_compiling(array):
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


def backend_for(array: Array, xp: Namespace) -> Backend:
    """The backend of the library of an array; one that knows next to nothing where the library announces none."""
    return backend_of(array) or Backend(xp)


@untraced
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


def is_compiling(array: Array, /) -> bool:
    """Whether the library of an array records what is called, so that hardly anything else can be looked up."""
    compiler: Any = sys.modules.get(f"{_library_of(type(array))}.compiler")
    return hasattr(compiler, "is_compiling") and bool(compiler.is_compiling())


def is_exporting(array: Array, /) -> bool:
    """Whether the library of an array records a program for other machines, and perhaps for other lengths."""
    compiler: Any = sys.modules.get(f"{_library_of(type(array))}.compiler")
    # its function is_exporting itself says so of every program that PyTorch 2.11 compiles
    return bool(getattr(compiler, "_is_exporting_flag", False))


@untraced  # which could not ask a class of parameters
def _library_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def is_on_host(array: Array, /) -> bool:
    """Whether reading values waits for no accelerator, as far as the array tells where it is."""
    if hasattr(array, "at") and not is_of_eager_type(array):
        return True  # a traced array of JAX, which would tell at length, through all of its program, why it has none
    device = str(getattr(array, "device", "cpu")).lower()
    return "cpu" in device or not any(word in device for word in ACCELERATORS)


def is_of_numpy(array: Any, /) -> bool:
    """Whether this is an array of NumPy, by its class alone, of which compilers know; a masked array is another."""
    return _is_of_numpy(type(array))


@untraced
def _is_of_numpy(kind: type) -> bool:
    return kind.__module__ == "numpy" and kind.__name__ in ("ndarray", "memmap")


def is_of_eager_type(array: Array, /) -> bool:
    """Whether arrays of this class were seen with values: their dimensions are integers, and tracers are others."""
    kind = type(array)
    if kind not in _eager_types and hasattr(array, "dtype") and is_concrete(array):
        _eager_types.add(kind)
    return kind in _eager_types


def is_concrete(array: Array, /) -> bool:
    """Whether the values of an array can be read now, without tracing, computing or waiting for a graph."""
    if is_compiling(array):
        return False
    backend = _backends.get(type(array)) or backend_of(array)
    return backend is not None and (backend.holds_values or backend.is_concrete(array))


def can_be_read(*arrays: Array) -> bool:
    """Whether values can be read now, and no accelerator is waited for."""
    return all(map(is_on_host, arrays)) and all(map(is_concrete, arrays))


def runs_at_once(array: Array, /) -> bool:
    """Whether a library computes on the host at once, so that a glance at values, or a small block, costs little."""
    return _is_of_numpy(type(array)) or (can_be_read(array) and not _backends[type(array)].loops.traced)


def numbers_of(array: Array, /) -> list[Any]:
    """The numbers of an array that can be read, as lists of its axes."""
    found = array if hasattr(array, "tolist") else cast(Backend, backend_of(array)).to_numpy(array)
    return cast(list[Any], found.tolist())


def array_of(numbers: Sequence[float], dtype: Any, like: Array, xp: Namespace) -> Array:
    """Numbers that are known before a call as an array (N,), on the device of another one."""
    if is_compiling(like):
        return xp.asarray(numbers, dtype=dtype, **on_device_of(like))
    return backend_for(like, xp).array_of(numbers, dtype, like)


GROUP = f"{OURS}backends"


@functools.cache
def entries() -> dict[str, EntryPoint]:
    """The announced backends by name, in the order of their names."""
    from importlib.metadata import entry_points  # noqa: PLC0415 (half of the time that importing the core would take)

    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


@functools.cache
def announced(group: str, name: str, /) -> Any:
    """What another package announces under a group of entry points and a name; ``None`` if none does.

    A group has the name of the module that does not hold it: ``attention_core.layers``, or ``attention_torch.layers``.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 (as above)

    return next((entry.load() for entry in entry_points(group=group, name=name)), None)


@unconverted
def available_backends() -> list[str]:
    """Names of the backends whose library is installed. Nothing is imported.

    Examples
    --------
    >>> "numpy" in available_backends()
    True
    """
    return [name for name in entries() if importlib.util.find_spec(name) is not None]


@unconverted
def get_backend(name: str, /) -> Backend:
    """Load the backend of a library by name.

    Raises
    ------
    ValueError
        When no backend of that name is announced.
    ImportError
        When its library is not installed, or no backend is announced at all; the message says what to install.

    Examples
    --------
    >>> get_backend("numpy").modes
    ('eager',)
    """
    if not entries():
        raise ImportError(
            f"expected an installed distribution that announces backends, by entry points of the group {GROUP}; got"
            " none: if attention_core is found by a path alone, its metadata is not, which pip install writes"
        )
    if not isinstance(name, str) or name not in entries():
        got = repr(name) if isinstance(name, str) else type_text(name)
        raise ValueError(f"expected a backend out of {', '.join(entries())}; got {got}")
    return _load(name)


@functools.cache
def _load(name: str) -> Backend:
    if importlib.util.find_spec(name) is None:
        raise ImportError(
            f"backend {name!r} needs its library: install attention-core[{name.replace('_', '-')}]", name=name
        )
    return cast(Backend, entries()[name].load())


def as_constant(value: Any, like: Array, /, *, wraps: bool = False) -> Any:
    """One NumPy array as a constant of another array's library; anything else as it is."""
    return constant(value, like, wraps=wraps) if hasattr(like, "dtype") and not is_of_numpy(like) else value


def holds_numpy(value: Any) -> bool:
    """Whether this is an array of NumPy, or a tuple, mask or dataclass that holds one."""
    return any(map(is_of_numpy, flatten(value)[1]))


def constant(value: Any, like: Array, /, *, wraps: bool = False) -> Any:
    """Turn the NumPy arrays of a tree into constants of another array's library, on its device.

    Integers that a library cannot hold raise, unless only their last 32 bits count.
    """
    treedef, arrays = flatten(value)
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
