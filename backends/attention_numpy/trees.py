"""Helpers of all adapters: map over trees of arrays, name dtypes, word errors.

A tree is an array, or a (named) tuple, list or dict of trees. Its other leaves are left alone: ``None``, Python numbers
and strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attention_core.backend import Array, Backend, dtype_name, explain_class, map_leaves
from attention_files.optional import Missing, optional

if TYPE_CHECKING:
    import numpy as np
else:
    np = optional("numpy", "NumPy arrays")

NumpyArray: TypeAlias = "np.ndarray[Any, Any]"
ARRAYS, SCALARS = ((), ()) if isinstance(np, Missing) else ((np.ndarray,), (np.generic,))


# A symbol, which whoever calls the core meets before anything of attention_keras is imported.
explain_class("keras", "KerasTensor", ": functions take it inside of a layer of Keras", is_array=False)
for _name in ("Variable", "JaxVariable", "NnxVariable"):
    explain_class("keras", _name, ": its value is one", is_array=True)


def is_array(leaf: Any, /) -> bool:
    """Whether a leaf is to be treated as an array: it is not ``None``, a Python number or a string."""
    # A NumPy scalar is an array of no axes to NumPy's own functions, although float64 derives from Python's float.
    return isinstance(leaf, SCALARS) or not isinstance(leaf, bool | int | float | complex | str | None)


def map_arrays(function: Callable[[Any], Any], tree: Any, /) -> Any:
    """Apply a function to every array of a tree, and keep the structure and all other leaves.

    Examples
    --------
    >>> map_arrays(np.negative, {"a": [np.asarray(1), None], "b": 2})
    {'a': [np.int64(-1), None], 'b': 2}
    """
    return map_leaves(lambda leaf: function(leaf) if is_array(leaf) else leaf, tree)


def to_copies(tree: Any, /) -> Any:
    """Copy the NumPy arrays of a tree: contiguous, writable, and sharing memory with nothing."""
    return map_arrays(lambda array: np.array(array, order="C", copy=True), tree)


def is_floating(dtype: np.dtype[Any], /) -> bool:
    """Whether a NumPy dtype is one of floating point, bfloat16 included (which NumPy itself does not count)."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def bfloat16() -> np.dtype[Any]:
    """The dtype of ml_dtypes, which NumPy needs for bfloat16. Raise ImportError when it is not installed."""
    dtype: np.dtype[Any] = np.dtype(optional("ml_dtypes", "bfloat16 in NumPy").bfloat16)
    return dtype


def check_numpy() -> None:
    """Raise where NumPy is not installed.

    Raises
    ------
    ImportError
        With the command that installs it.
    """
    np.ndarray  # noqa: B018 (what stands in for it raises)


def as_floating(array: Any, dtype: str | None, dtypes: Sequence[str], /, *, hint: str = "") -> NumpyArray:
    """Give an array of floating point the type asked for; any other array is returned as it is.

    Parameters
    ----------
    array : numpy.ndarray
    dtype : str or None
        The type asked for; ``None`` keeps that of the array.
    dtypes : sequence of str
        The types that the library computes with.
    hint : str
        What to do about a type that is not among them.

    Raises
    ------
    TypeError
        When this is no NumPy array.
    ValueError
        When the type is not one that the library computes with.
    """
    if not isinstance(array, np.ndarray | np.generic):
        raise TypeError(f"expected a tree of NumPy arrays; got {type(array).__name__}")
    plain: NumpyArray = np.asarray(array)
    if not is_floating(plain.dtype):
        return plain
    name = plain.dtype.name if dtype is None else dtype
    if name not in dtypes:
        raise ValueError(f"expected a floating-point type out of {', '.join(dtypes)}; got {name}{hint}")
    with np.errstate(all="ignore"):  # a value beyond the range becomes infinite, as in every other conversion
        return plain.astype(bfloat16() if name == "bfloat16" else name, copy=False)


def known_mode(mode: str | None, modes: Sequence[str], /) -> str:
    """Return the mode asked for, the last one where none is. Raise ValueError when there is no such mode."""
    mode = modes[-1] if mode is None else mode
    if mode not in modes:
        raise ValueError(f"expected a mode out of {', '.join(modes)}; got {mode!r}")
    return mode


def devices_of_kind(kind: str, devices: Iterable[str], /) -> list[str]:
    """Those of some devices whose names begin with a kind; TensorFlow's name for the kind ``"cuda"`` is ``"GPU"``."""
    beginnings = (kind.lower(), "gpu") if kind.lower() == "cuda" else (kind.lower(),)
    return [name for name in devices if name.lower().startswith(beginnings)]


def known_device(device: str, devices: Sequence[str], /) -> str:
    """Return the device asked for. Raise ValueError when there is no such device."""
    if device not in devices:
        raise ValueError(f"expected a device out of {', '.join(devices)}; got {device!r}")
    return device


def value_and_grad(backend: Backend, function: Callable[..., Array], /) -> Callable[..., tuple[Array, tuple[Any, ...]]]:
    """Turn a function of trees to a 0-d array into one that also returns the gradient for each positional argument.

    Leaves that are no arrays of floating point have the gradient ``None``. A backend has this as its method.
    """

    def is_variable(leaf: Any) -> bool:
        return backend.owns(leaf) and dtype_name(leaf.dtype) in backend.dtypes

    def differentiated(*arguments: Any) -> tuple[Array, tuple[Any, ...]]:
        variables: list[Array] = []
        map_leaves(lambda leaf: variables.append(leaf) if is_variable(leaf) else None, arguments)

        def fill(replacements: Iterable[Array], other: Callable[[Any], Any]) -> Any:
            remaining = iter(replacements)
            return map_leaves(lambda leaf: next(remaining) if is_variable(leaf) else other(leaf), arguments)

        def scalar(*replacements: Array) -> Array:
            value = function(*fill(replacements, lambda leaf: leaf))
            if len(value.shape) != 0:
                raise ValueError(f"expected a function to a 0-d array; got shape {tuple(value.shape)}")
            return value

        if not variables:
            return scalar(), fill((), lambda leaf: None)
        value, gradients_of = backend.vjp(scalar, *variables)
        return value, fill(gradients_of(backend.namespace.ones_like(value)), lambda leaf: None)

    return differentiated
