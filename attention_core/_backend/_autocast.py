"""Functions under what a library does by itself: autocast, which casts arguments once, and errors of floating point."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from .._arrays import FLOATING, HALF, Array, DType, cast_to, dtype_name
from .._keywords import in_place_of, names_keywords, with_options
from .._trees import container_of
from ._base import Autocast
from ._find import array_namespace, backend_of, is_compiling, is_of_numpy

Function = TypeVar("Function", bound=Callable[..., Any])
_CAST_OPTIONS = ("key", "value", "bias", "sinks", "memory")
STANDARD = "2024.12"  # from which on functions take Python numbers
_known: dict[type, Any] = {}  # a table of its own: a compiler must not look into that of backends before it is filled


def without_warnings(array: Array) -> contextlib.AbstractContextManager[Any]:
    """A context in which the library of an array warns of no number, and raises for none."""
    quiet = getattr(_known.get(type(array)) or _find(array), "without_warnings", None)
    return contextlib.nullcontext() if quiet is None else quiet()


def with_autocast(
    *, position: int = 0, lowers: bool = True, options: Sequence[inspect.Parameter] = ()
) -> Callable[[Function], Function]:
    """Let a public function cast its floating-point arguments, float64 excepted, and compute without autocast.

    It also computes `without_warnings`: a weight that underflows is 0 by definition, and a masked score is -inf. Errors
    of wrong keywords, and of arrays of an older standard, get their words here.

    Parameters
    ----------
    position : int
        Of the positional argument whose library, device and, perhaps, dtype decide.
    lowers : bool
        Whether arguments are cast to the dtype of autocast, as those of products. Otherwise they are cast to that of
        the argument which decides, as those of a normalization.
    options : sequence of inspect.Parameter
        Those that the function takes as ``**options``.
    """
    taken = options

    def decorate(function: Function) -> Function:
        function = with_options(taken)(function) if taken else function
        backends, find, cast_call, check = _known, _find, _cast_call, check_standard

        def called(*arguments: Any, **options: Any) -> Any:
            try:
                if len(arguments) > position:
                    array = arguments[position]
                    backend = backends.get(type(array)) or find(array)
                    autocast = getattr(backend, "autocast", None)
                    if autocast is not None:
                        if autocast.is_on():
                            return cast_call(autocast, function, array, lowers, arguments, options)
                    elif (quiet := getattr(backend, "without_warnings", None)) is not None:
                        with quiet():
                            return function(*arguments, **options)
                return function(*arguments, **options)
            except AttributeError:
                check(arguments)
                raise

        return names_keywords(in_place_of(function, called), function.__name__)

    return decorate


def check_standard(arguments: Iterable[Any]) -> None:
    """Raise if arrays are of an older version of the standard than the one that is needed."""
    for array in arguments:
        xp = array_namespace(array) if hasattr(array, "dtype") else None
        version = getattr(xp, "__array_api_version__", STANDARD)
        if version < STANDARD:
            raise TypeError(f"expected arrays of version {STANDARD} of the array API standard; got {version}") from None


def _find(array: Array) -> Any:
    backend = backend_of(array)
    if not is_compiling(array) and backend is not None:
        _known[type(array)] = backend
    return backend


def _cast_call(autocast: Autocast, function: Callable[..., Any], array: Array, lowers: bool, *call: Any) -> Any:
    arguments, options = call
    dtype = autocast.dtype(array)
    if dtype is None:
        return function(*arguments, **options)
    with autocast.off(array):
        target = dtype if lowers else array.dtype
        if dtype_name(array.dtype) in FLOATING and dtype_name(target) != "float64":
            xp = array_namespace(array)
            arguments = _cast(arguments, target, xp)
            options = {
                name: _cast(each, target, xp) if name in _CAST_OPTIONS else each for name, each in options.items()
            }
        return function(*arguments, **options)


def _cast(tree: Any, dtype: DType, xp: Any) -> Any:
    if isinstance(tree, tuple):
        return container_of(tree, [_cast(branch, dtype, xp) for branch in tree])
    if not hasattr(tree, "dtype") or is_of_numpy(tree) or dtype_name(tree.dtype) not in (*HALF, "float32"):
        return tree
    return cast_to(tree, dtype, xp=xp)
