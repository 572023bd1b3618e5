"""NumPy arrays among the options of a call."""

from __future__ import annotations

from typing import Any

from .._arrays import Array
from .._backend import constant, holds_numpy, is_compiling, is_of_numpy
from .._checks import check_added_dtype
from .options import ARRAYS


def with_constants(like: Array, options: dict[str, Any], /) -> dict[str, Any]:
    """Turn NumPy arrays among options into constants of another array's library, on its device.

    Masks, score modifications and tuples may hold some. Where nothing is turned, the options are returned themselves.
    """
    if is_of_numpy(like) or not hasattr(like, "dtype") or not any(holds_numpy(options.get(name)) for name in ARRAYS):
        return options
    for name in () if is_compiling(like) else ("bias", "sinks"):  # before the library narrows their dtype
        if is_of_numpy(options.get(name)):
            check_added_dtype(name, options[name], like)
    return options | {
        name: constant(options[name], like, wraps=name == "dropout") for name in ARRAYS if name in options
    }
