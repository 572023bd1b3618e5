"""Arrays, and trees of them: facts that the standard leaves open, and one way to walk containers.

Facts are unknown dimensions, devices, and dtypes beyond the two of the standard. A tree is an array, or a container of
trees: a (named) tuple, a list, a dictionary or a dataclass. Its other leaves are left alone: ``None``, numbers, text.
"""

from __future__ import annotations

import builtins
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias, TypeVar

Array: TypeAlias = Any
Arrays: TypeAlias = tuple[Array, ...]
Gradients: TypeAlias = tuple[Array | None, ...]  # for each array, none for integers
ArrayT = TypeVar("ArrayT")  # the type of the arrays of a user, which the result has
Namespace: TypeAlias = Any
DType: TypeAlias = Any
FLOATING = ("float16", "bfloat16", "float32", "float64")
HALF = ("float16", "bfloat16")
OURS = f"{__package__}."  # how names of our modules begin, of a copy under another name too
_names: dict[type, dict[DType, str]] = {}  # plain dictionaries: compilers do not trace functools.cache


class Facts(NamedTuple):
    """What checks look at, of an array that is not made yet."""

    shape: tuple[int | None, ...]
    dtype: Any
    device: Any


def dtype_name(dtype: DType, /) -> str:
    """The name of a dtype, the same for every library: ``float32``, ``bfloat16``, ``bool``."""
    names = _names.get(type(dtype))  # dtypes of two libraries are never compared: some warn
    if names is None:
        if not hasattr(dtype, "name"):  # NumPy's takes long to make
            return str(dtype).rpartition(".")[2].lower()
        names = _names.setdefault(type(dtype), {})
    if dtype not in names:
        names[dtype] = str(dtype.name).lower()
    return names[dtype]


def dtypes_differ(first: Array, second: Array) -> bool:
    """Whether two arrays are of two types; two orders of bytes are none."""
    return bool(first.dtype != second.dtype) and dtype_name(first.dtype) != dtype_name(second.dtype)


def compute_dtype_name(dtype: DType, /) -> str:
    """The name of the type in which one computes: float32 for the types of 16 bits, else the type itself."""
    name = dtype_name(dtype)
    return "float32" if name in HALF else name


def upcast(tree: Any, /, *, xp: Namespace) -> Any:
    """Turn the 16-bit floating-point arrays of a tree into float32, which is exact; leave the rest."""
    if isinstance(tree, tuple):
        return container_of(tree, [upcast(branch, xp=xp) for branch in tree])
    is_half = tree is not None and not isinstance(tree, int | float) and dtype_name(tree.dtype) in HALF
    return xp.astype(tree, xp.float32) if is_half else tree


def cast_to(array: Array, dtype: DType, /, *, xp: Namespace) -> Array:
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
    if not all(map(operator.eq, dims, dims)):  # NaN
        raise ValueError(f"expected known dimensions; got {dims}: call compute_chunk_sizes() first")
    return dims


def length(array: Array, axis: int, /, *, xp: Namespace) -> Any:
    """One dimension of `shape`, which takes less time than all of them where it is known."""
    dim = array.shape[axis]
    return dim if isinstance(dim, int) else shape(array, xp=xp)[axis]


def is_counted(size: Any, /) -> bool:
    """Whether a program counts a size when it runs: an array. A symbol of a compiler cannot be asked for its dtype."""
    return not isinstance(size, int) and hasattr(size, "dtype")


def at_least_one(count: Any, xp: Namespace) -> Any:
    """A count, or 1 for none; a symbol of a compiler as it is."""
    if isinstance(count, int):
        return max(count, 1)
    return xp.maximum(count, 1) if is_counted(count) else count


def _dynamic_shape(array: Array) -> tuple[Any, ...]:
    computed = array.dynamic_shape
    return tuple(computed[axis] if dim is None else dim for axis, dim in enumerate(array.shape))


def on_device_of(array: Array, /) -> dict[str, Any]:
    """The keyword arguments that make a new array on the device of this one.

    None are given where the library places arrays by itself: while tracing, and where arrays carry a sharding.
    """
    device = None if hasattr(array, "at") else getattr(array, "device", None)  # as in `has_sharding`
    return {"device": device} if device else {}


def has_sharding(array: Array, /) -> bool:
    """Whether the array is one of JAX, which places arrays by their sharding, and can be updated ``at`` an index.

    A traced one, asked for its sharding itself, would tell at length, through all of its program, why it has none.
    """
    return hasattr(array, "at")


def move_axis(x: Array, source: int, destination: int, xp: Namespace) -> Array:
    """The same array with one axis elsewhere; both are counted from the end."""
    axes = list(range(len(x.shape)))
    axes.insert(len(axes) + destination, axes.pop(source))
    return xp.permute_dims(x, tuple(axes))


def take_rows(table: Array, index: Array, /, *, axis: int, xp: Namespace) -> Array:
    """Take along an axis by a 1-D array of positions, in the integer type that the library indexes with."""
    return xp.take(table, xp.astype(index, index_dtype(index, xp=xp), copy=False), axis=axis)


def index_dtype(like: Array, /, *, xp: Namespace) -> DType:
    """The integer type with which a library indexes on a device: int64, or int32 where that is the widest in use."""
    return xp.__array_namespace_info__().default_dtypes(**on_device_of(like))["indexing"]


def one_program(function: Callable[..., Any], xp: Namespace) -> Callable[..., Any]:
    """A function whose bits no compiler changes, as one program where the library compiles it for its keywords."""
    lent = getattr(xp, "one_program", None)
    return function if lent is None else lent(function)


def positions(length: Any, like: Array, /, *, xp: Namespace) -> Array:
    """The positions 0, 1, …, length - 1 as int32, on the device of ``like``."""
    return xp.arange(length, dtype=xp.int32, **on_device_of(like))


def clipped(positions: Array, count: Any, /, *, xp: Namespace) -> Array:
    """The nearest of 0..count - 1; array-api-compat's ``clip`` refuses a symbol of PyTorch's compiler."""
    positions = xp.where(xp.less(positions, 0), 0, positions)
    last = xp.subtract(count, 1) if is_counted(count) else count - 1
    return xp.where(xp.less(positions, count), positions, last)


def sizes(array: Array, /) -> tuple[int | None, ...]:
    """The dimensions that are known before running; ``None`` stands for the others."""
    return tuple([dim if isinstance(dim, int) else None for dim in array.shape])


def shape_text(array: Array, /) -> str:
    """A shape as in ``(2, ?, 5)``."""
    dims = ["?" if dim is None else str(dim) for dim in sizes(array)]
    return f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(dims)})"


def shapes_differ(first: tuple[int | None, ...], second: tuple[int | None, ...]) -> bool:
    """Whether two shapes are known not to be the same."""
    return len(first) != len(second) or any(map(sizes_differ, first, second))


def sizes_differ(first: int | None, second: int | None) -> bool:
    """Whether two dimensions are known not to be the same."""
    return first is not None and second is not None and first != second


def is_floating(array: Array) -> bool:
    """Whether an array has one of the floating-point types that are computed with."""
    return dtype_name(array.dtype) in FLOATING


def zeros_with(like: Array, *dims: Any, xp: Namespace) -> Array:
    """Zeros of some shape, with the dtype and the device of another array."""
    return xp.zeros(dims, dtype=like.dtype, **on_device_of(like))


def scalar_like(number: float, like: Array, xp: Namespace) -> Array:
    """A 0-d array of a number, with the dtype and the device of another array."""
    return xp.full((), number, dtype=like.dtype, **on_device_of(like))


def number_like(number: float | Array, like: Array, xp: Namespace) -> float | Array:
    """A number in the type of an array."""
    return float(number) if isinstance(number, Real) else xp.astype(number, like.dtype)


def one_line(text: str) -> str:
    """A text with its line breaks written as escapes: names in files may hold any."""
    return re.sub(r"[\n-\r\x1c-\x1e\x85\u2028\u2029]", lambda found: repr(found[0])[1:-1], text)


def explain_class(library: str, name: str, text: str, /, *, is_array: bool) -> None:
    """Let messages say of a class of a library, by its name, what to write; adapters call it when they are imported.

    ``is_array`` says whether the class passes for arrays of the library, and so is to be refused where it is met.
    """
    (_refused if is_array else _explained)[name] = library, text


_explained: dict[str, tuple[str, str]] = {}  # by class; compilers trace the look-up, and no cut of a text
_refused: dict[str, tuple[str, str]] = {}


def explained(text: str) -> str | None:
    """The first class that a text names of those that messages explain, and what to write."""
    return next((f"{name}{words}" for name, (_, words) in _explained.items() if name in text), None)


def refusal(kind: type) -> str | None:
    """What to write instead of arrays of a class, if adapters refuse it."""
    library, text = _refused.get(kind.__name__, ("", ""))
    return text if text and kind.__module__.startswith(library) else None


def type_text(value: Any) -> str:
    """The name of the type of a value; with its library if it would be mistaken for one of Python's."""
    kind = type(value)
    library, text = _explained.get(kind.__name__, ("", ""))
    if text and kind.__module__.startswith(library):
        return f"{kind.__name__}{text}"
    taken = hasattr(builtins, kind.__name__) and kind.__module__ != "builtins"
    return f"{kind.__module__}.{kind.__name__}" if taken else kind.__name__


def map_leaves(function: Callable[[Any], Any], tree: Any, /) -> Any:
    """Apply a function to every leaf, whatever it is, and keep the structure."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, branch) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return container_of(tree, [map_leaves(function, branch) for branch in tree])
    return function(tree)


def container_of(tree: Any, branches: list[Any], /) -> Any:
    """A list or a (named) tuple of other branches."""
    if isinstance(tree, list):
        return branches
    return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)


def named_branches(tree: Any, prefix: str = "", /) -> list[tuple[str, Any]]:
    """The branches of a (named) tuple, each with its name behind those of the containers around it."""
    names = getattr(tree, "_fields", range(len(tree)))
    return [(f"{prefix}.{name}" if prefix else str(name), branch) for name, branch in zip(names, tree, strict=True)]


def named_arrays(tree: Any, prefix: str = "", /) -> dict[str, Any]:
    """Map the leaves of a tree of named tuples by name, in order, without ``None``.

    Examples
    --------
    >>> from attention_core.layers import FeedForward
    >>> list(named_arrays(FeedForward(4, 16).parameters))
    ['expand.weight', 'expand.bias', 'contract.weight', 'contract.bias']
    """
    if not isinstance(tree, tuple):
        return {} if tree is None else {prefix: tree}
    found: dict[str, Any] = {}
    for name, branch in named_branches(tree, prefix):
        found |= named_arrays(branch, name)
    return found


def arrays_within(tree: Any, name: str, /) -> dict[str, Any]:
    """Map the arrays in (named) tuples and dataclasses by name; numbers of NumPy are none."""
    if tree is None or isinstance(tree, int) or type(tree) is float:  # nothing is asked of a symbol, as in `flatten`
        return {}
    if hasattr(tree, "dtype"):
        return {} if isinstance(tree, Real) else {name: tree}
    branches = named_branches(tree, name) if isinstance(tree, tuple) else []
    if is_dataclass(tree) and not isinstance(tree, type):
        branches = [(f"{name}.{field}", getattr(tree, field)) for field in _field_names(type(tree))]
    return {path: array for each, branch in branches for path, array in arrays_within(branch, each).items()}


def tree_from_names(like: Any, arrays: Mapping[str, Any], prefix: str = "", /) -> Any:
    """Build a tree of the structure of another from named arrays: the inverse of `named_arrays`.

    Raises
    ------
    KeyError
        When an array is missing.
    """
    if not isinstance(like, tuple):
        return None if like is None else arrays[prefix]
    return container_of(like, [tree_from_names(branch, arrays, name) for name, branch in named_branches(like, prefix)])


class Leaf(NamedTuple):
    """An array of a tree: its index among the arrays, and how many axes it has after the leading ones.

    An array within a tuple is passed on whole: its ``axes`` are -1.
    """

    place: int
    axes: int


_PLAIN = (type(None), int, float, bool, str)


def flatten(rule: Any, axes: int = 0, /) -> tuple[Any, list[Any]]:
    """Take a rule apart, or another dataclass or tuple, into the tree definition and the arrays.

    The definition is nested tuples ``(class, *fields)`` with a `Leaf` for each array. It compares by value.
    """
    arrays: list[Any] = []
    return _treedef(rule, arrays, axes), arrays


def _treedef(rule: Any, arrays: list[Any], axes: int) -> Any:
    if rule is None or isinstance(rule, int) or type(rule) is float:  # of a symbol of torch.compile nothing is asked
        return rule
    if hasattr(rule, "dtype"):
        arrays.append(rule)
        return Leaf(len(arrays) - 1, axes)
    if isinstance(rule, tuple):
        kind = type(rule) if hasattr(rule, "_fields") else tuple
        return kind, *[item if type(item) in _PLAIN else _treedef(item, arrays, -1) for item in rule]
    if is_dataclass(rule) and not isinstance(rule, type):
        axes_of: dict[str, int] = getattr(rule, "axes", {})
        names = [field.name for field in fields(rule)]
        return type(rule), *[_treedef(getattr(rule, name), arrays, axes_of.get(name, 0)) for name in names]
    return rule


def unflatten(treedef: Any, arrays: Any, /) -> Any:
    """Build the rule of a tree definition, with these arrays as its leaves."""
    if isinstance(treedef, Leaf):
        return arrays[treedef.place]
    if not isinstance(treedef, tuple):
        return treedef
    kind, *branches = treedef
    values = [unflatten(branch, arrays) if isinstance(branch, tuple) else branch for branch in branches]
    if issubclass(kind, tuple | list):
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    rule = object.__new__(kind)  # without ``__post_init__``: traced arrays cannot be checked again
    for name, value in zip(_field_names(kind), values, strict=True):
        object.__setattr__(rule, name, value)
    return rule


def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple([field.name for field in fields(kind)])


_field_names._dynamo_marked_constant = True  # type: ignore[attr-defined] # as `_keywords.untraced` marks functions


def leaves(treedef: Any, /) -> list[Leaf]:
    """The leaves of a tree definition, in order."""
    if isinstance(treedef, Leaf):
        return [treedef]
    return [leaf for branch in treedef[1:] for leaf in leaves(branch)] if isinstance(treedef, tuple) else []


def classes(treedef: Any, /) -> Iterator[type]:
    """The classes of a tree definition, in order."""
    if isinstance(treedef, type) and treedef is not tuple:
        yield treedef
    elif isinstance(treedef, tuple):
        for branch in treedef:
            yield from classes(branch)
