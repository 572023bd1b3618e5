"""Public functions as they are called: as one step of a compiled program, under autocast, and without warnings."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .._arrays import FLOATING, HALF, Array, DType, cast_to, container_of, dtype_name
from .._keywords import in_place_of, names_keywords, untraced, with_options
from ._base import Autocast
from ._find import array_namespace, backend_of, get_backend, is_compiling, is_of_numpy

Function = TypeVar("Function", bound=Callable[..., Any])
_CAST_OPTIONS = ("key", "value", "bias", "sinks", "memory")
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
    of wrong keywords get their words here.

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
        backends, find, cast_call = _known, _find, _cast_call

        def called(*arguments: Any, **options: Any) -> Any:
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

        return names_keywords(in_place_of(function, called), function.__name__)

    return decorate


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


STEPS: dict[str, Any] = {}
"""The functions by name, as they are called, and read where one is no step."""

_read: dict[str, Callable[..., Any]] = {}
_compilers: dict[str, Any] = {}


def may_be_step(function: Function) -> Function:
    """Let Dynamo read, in the place of a function, what the backend of PyTorch makes of it (`as_step`).

    A first call under `torch.compile` loads that backend, as to read all of one attention takes a third of a second.
    No mark of Dynamo says so, which `functools.wraps` would hand on to the functions of users.
    """
    called: Any = function
    name, has_compiler, compilers, load, read = called.__name__, _has_compiler, _compilers, _load, _read

    def chosen(*arguments: Any, **options: Any) -> Any:
        if has_compiler() and compilers["torch"].is_dynamo_compiling():  # Dynamo reads this, and does not call it
            load()
            return read.get(name, called)(*arguments, **options)
        return called(*arguments, **options)

    STEPS[name] = called
    return in_place_of(function, chosen)


@untraced
def _has_compiler() -> bool:
    """Whether PyTorch's is loaded. Dynamo would take longer to read `sys.modules` than a call of attention."""
    if not _compilers and (compiler := sys.modules.get("torch.compiler")) is not None:
        _compilers["torch"] = compiler
    return bool(_compilers)


@untraced
def _load() -> None:
    with contextlib.suppress(ImportError, ValueError):  # then the function itself is read
        as_step: Any = get_backend("torch").as_step
        _read.update({name: as_step(name, STEPS[name]) for name in STEPS.keys() - _read.keys()})
