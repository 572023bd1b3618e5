"""Checks of functions of users: what they take, and what they return."""

from __future__ import annotations

import inspect
import re
from types import FunctionType
from typing import Any

from .._arrays import Array, dtype_name, dtypes_differ, shape_text, shapes_differ, sizes, type_text
from .._backend import common_namespace
from .arguments import check_boolean, check_broadcastable

_TRUTH = (
    "truth value|boolean value|bool is only allowed|as a python .?bool|tracerbool"  # what libraries say of `if array`
)


def check_function(name: str, function: Any, arrays: Any = ()) -> None:
    """Raise unless this can be called, and the arrays that it is to be called with are a tuple of arrays."""
    if not callable(function):
        raise TypeError(f"expected {name} as a function; got {type(function).__name__}")
    if not isinstance(arrays, tuple) or not all(hasattr(array, "dtype") for array in arrays):
        got = type(arrays).__name__ if not isinstance(arrays, tuple) else [type(array).__name__ for array in arrays]
        raise TypeError(f"expected the arrays of {name} as a tuple of arrays; got {got}")


def check_arity(name: str, function: Any, arguments: str, count: int) -> None:
    """Raise if a function in Python is known not to take so many positional arguments."""
    code = getattr(function, "__code__", None)
    if not isinstance(function, FunctionType) or code is None or code.co_flags & inspect.CO_VARARGS:
        return
    least = code.co_argcount - len(function.__defaults__ or ())
    if not least <= count <= code.co_argcount:
        raise TypeError(f"expected {name} as a function of {arguments}; got one of {code.co_argcount} arguments")


def result_of(name: str, function: Any, *arguments: Any) -> Any:
    """Call a function of users; one that asks whether an array is true is told so, in the same words everywhere."""
    try:
        return function(*arguments)
    except Exception as error:
        if not re.search(_TRUTH, f"{type(error).__name__} {error}", re.IGNORECASE):
            raise
        raise TypeError(
            f"expected {name} of arrays, with &, | and where; got one with `if`, `and`, `or` or `not` of an array"
        ) from error


def check_allowed(name: str, allowed: Any, positions: tuple[Array, ...]) -> None:
    """Raise unless a rule of a mask returned a boolean array of the library that broadcasts to the positions."""
    check_boolean(name, allowed, "a boolean array")
    common_namespace(None, {"positions": positions[-1], name: allowed})
    check_broadcastable(name, allowed, _broadcast_sizes(positions))


def check_like_array(name: str, new: Any, model_name: str, model: Array) -> None:
    """Raise unless a function of users returned an array of the library, shape and dtype of another."""
    if not hasattr(new, "dtype"):
        raise TypeError(f"expected {name} as an array; got {type_text(new)}")
    common_namespace(None, {model_name.removeprefix("its "): model, name: new})
    if dtypes_differ(new, model):
        raise TypeError(
            f"expected {name} of dtype {dtype_name(model.dtype)}, that of {model_name}; got {dtype_name(new.dtype)}"
        )
    if shapes_differ(sizes(new), sizes(model)):
        raise ValueError(f"expected {name} {shape_text(model)}, as {model_name}; got {shape_text(new)}")


def check_prepared(prepared: Any) -> None:
    """Raise unless what `prepare` returned are three; attention checks its arrays."""
    if not isinstance(prepared, tuple | list) or len(prepared) != 3:
        got = f"{len(prepared)} of them" if isinstance(prepared, tuple | list) else type_text(prepared)
        raise TypeError(f"expected the result of prepare as a tuple (query, key, value); got {got}")


def _broadcast_sizes(arrays: tuple[Array, ...]) -> tuple[int | None, ...]:
    """The shape that arrays broadcast to; ``None`` for an axis that is not known before running."""
    dims = [sizes(array) for array in arrays]
    rank = max(map(len, dims))
    columns = zip(*((1,) * (rank - len(each)) + each for each in dims), strict=True)
    return tuple([next((size for size in column if size != 1), 1) for column in columns])
