"""Checks of arrays, numbers, options and functions of users, from static facts alone."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterable
from fractions import Fraction
from numbers import Integral, Rational, Real
from types import FunctionType
from typing import Any

from .._arrays import (
    FLOATING,
    Array,
    Namespace,
    compute_dtype_name,
    dtype_name,
    dtypes_differ,
    has_sharding,
    index_dtype,
    one_program,
    shape_text,
    shapes_differ,
    sizes,
    sizes_differ,
    type_text,
)
from .._backend import (
    array_namespace,
    can_be_read,
    common_namespace,
    is_concrete,
    is_dense,
    library_name,
)
from .._keywords import choice_hint
from ..parameters import BRANCHES, PreparedWeight

FLOAT64_MAX = sys.float_info.max
MAX_SIZE = 2**31 - 1  # counters are int32
OPEN_AXES = (None,) * 8  # axes before the heads, of which nothing is known
MAX_POSITIONS = 2**29 - 1  # three times as much still fits int32
_CONVERTERS = "mask_from_integers converts 1/0, mask_from_additive 0/-10000 or 0/-inf, mask_from_ignore True = ignore"
_FROM_NUMBERS = "mask_from_additive converts 0/-10000 or 0/-inf, and `mask != 0` 1.0/0.0"

ORDER = ": the order is query, key, value"
HEADS_FIRST = ": heads come before positions; if they are after them, swap axes -3 and -2 of {}"


def check_rank(name: str, array: Array, least: int, layout: str) -> None:
    """Raise unless the array has at least the axes that its layout names."""
    _check_dense(name, array)
    if not hasattr(array, "shape"):
        wanted = "as an array" if layout == "(...)" else layout  # of any shape
        raise TypeError(f"expected {name} {wanted}; got {type(array).__name__}")
    try:
        rank = len(array.shape)
    except ValueError as error:  # TensorFlow's
        raise ValueError(f"expected {name} {layout}; got an array of an unknown number of axes") from error
    if rank < least:
        raise ValueError(f"expected {name} {layout}; got {shape_text(array)}")


def _check_dense(name: str, array: Array) -> None:
    if not is_dense(array):
        common_namespace(None, {name: array})  # which says so


def check_positive(name: str, value: Any, *, most: int = MAX_SIZE) -> int:
    """Return a positive integer as one of Python, once no array and no loop is known to be too short for it."""
    value = plain_integer(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} as a positive integer; got {type_text(value)}")
    if value < 1:
        raise ValueError(f"expected {name} as a positive integer; got {number_text(value)}")
    if value > most:
        raise ValueError(f"expected {name} of at most {most}; got {number_text(value)}")
    return value


def check_sizes(name: str, dims: Any) -> tuple[int, ...]:
    """Return the sizes of an array as a tuple of Python's integers, once they are known not to be negative."""
    dims = tuple(map(plain_integer, dims)) if isinstance(dims, tuple) else dims
    if not isinstance(dims, tuple) or not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims):
        got = f"({', '.join(map(type_text, dims))})" if isinstance(dims, tuple) else type_text(dims)
        raise TypeError(f"expected {name} as a tuple of sizes; got {got}")
    for dim in dims:
        if not 0 <= dim <= MAX_SIZE:
            raise ValueError(f"expected {name} as a tuple of sizes in 0..{MAX_SIZE}; got {number_text(dim)}")
    return dims


def number_text(value: Any) -> str:
    """A number, or its magnitude where it has more digits than one reads, or than Python prints."""
    if not isinstance(value, int | Fraction):
        return str(value)
    above, below = value.numerator.bit_length(), value.denominator.bit_length()
    return f"about {'-' if value < 0 else ''}2**{above - below}" if max(above, below) > 256 else str(value)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise unless the value is one of these words."""
    if not isinstance(value, str) or value not in choices:
        got = f"{value!r}{choice_hint(value, choices)}" if isinstance(value, str) else type_text(value)
        raise ValueError(f"expected {name} out of {', '.join(choices)}; got {got}")


def is_flag(value: Any) -> bool:
    """Whether this is True or False, of Python or of NumPy, which is known by its class alone."""
    return isinstance(value, bool) or (type(value).__module__, type(value).__name__) in _FLAGS_OF_NUMPY


_FLAGS_OF_NUMPY = (("numpy", "bool"), ("numpy", "bool_"))


def check_flags(**flags: Any) -> None:
    """Raise unless these options are True or False: no number, text or array."""
    for name, value in flags.items():
        if not is_flag(value):
            is_boolean = getattr(value, "shape", None) == () and dtype_name(value.dtype) == "bool"
            hint = f": bool({name}) is one" if is_boolean else ""
            raise TypeError(f"expected {name} as True or False; got {type_text(value)}{hint}")


def _no_array_text(value: Any) -> str:
    """The type of what is no array, and what to write instead."""
    if isinstance(value, str):
        return "str: is_causal=True or Causal() is a mask" if "causal" in value else "str"
    if isinstance(value, type):
        return f"the class {value.__name__}: {value.__name__}(...) is a mask"
    if callable(value):
        return f"{type_text(value)}: MaskFunction(function) is a mask"
    text = type_text(value)
    return text if value is None or ":" in text else f"{text}: make it an array of the library"


def check_parameters(name: str, value: Any, *kinds: type[Any]) -> None:
    """Raise unless parameters are of one of these kinds, and their branches of those that they are written with."""
    kind: Any = type(value) if type(value) in kinds else next((each for each in kinds if isinstance(value, each)), None)
    if kind is None:
        raise TypeError(
            f"expected {name} as {kinds[0].__name__}({', '.join(kinds[0]._fields)}); got {type(value).__name__}"
        )
    for field, of_branch, words in BRANCHES.get(kind, ()):
        branch = getattr(value, field)
        if isinstance(branch, tuple) or ("None" if branch is None else "Array") not in words:
            check_parameters(f"{name}.{field}", branch, *of_branch)


def check_floating(name: str, array: Array) -> None:
    """Raise unless this is an array of a floating-point type that is computed with."""
    _check_kind(name, array, FLOATING, f"dtype {', '.join(FLOATING)}")


def check_integer(name: str, array: Array) -> None:
    """Raise unless this is an array of integers."""
    _check_kind(name, array, ("int", "uint"), "an integer dtype")


def _check_kind(name: str, array: Array, kinds: tuple[str, ...], words: str) -> None:
    """Raise unless this is a dense array whose dtype begins with one of these words."""
    if not hasattr(array, "dtype"):
        raise TypeError(f"expected {name} as an array; got {type_text(array)}")
    _check_dense(name, array)
    if not dtype_name(array.dtype).startswith(kinds):
        raise TypeError(f"expected {name} of {words}; got {dtype_name(array.dtype)}")


def value_range(integers: Array) -> tuple[int, int]:
    """The least and the greatest of some integers; 0 if they cannot be read without waiting, or there are none."""
    if 0 in sizes(integers) or not can_be_read(integers):
        return 0, 0
    if not len(integers.shape):
        return int(integers), int(integers)
    xp = array_namespace(integers)
    least, greatest = one_program(_ends, xp)(integers, xp=xp)
    return int(least), int(greatest)


def check_within(name: str, integers: Array, most: int | None) -> None:
    """Raise if integers that can be read are not in 0..most."""
    least, greatest = value_range(integers)
    if least < 0 or (most is not None and greatest > most):
        raise ValueError(f"expected {name} in 0..{most}; got {least if least < 0 else greatest}")


def _ends(integers: Array, *, xp: Namespace) -> tuple[Array, Array]:
    integers = xp.astype(integers, index_dtype(integers, xp=xp), copy=False)
    return xp.min(integers), xp.max(integers)


def check_boolean(name: str, array: Array, kinds: str = "a boolean array or a Mask") -> None:
    """Raise unless the array is boolean; the message names the converters."""
    if not hasattr(array, "dtype"):
        raise TypeError(f"expected {name} as {kinds}; got {_no_array_text(array)}")
    kind = dtype_name(array.dtype)
    if kind != "bool":
        common_namespace(None, {name: array})  # which says what a class of arrays that is refused stands for
        hint = _FROM_NUMBERS if kind in FLOATING else _CONVERTERS
        raise TypeError(f"expected {name} of dtype bool, True = may attend; got {kind}: {hint}")


def check_like(name: str, array: Array, model_name: str, model: Array) -> None:
    """Raise unless two arrays have one dtype and lie on one device."""
    if dtypes_differ(array, model):
        expected, got = dtype_name(model.dtype), dtype_name(array.dtype)
        raise TypeError(f"expected {name} of dtype {expected} to match {model_name}; got {got}")
    check_device(name, array, model_name, model)


def check_device(name: str, array: Array, model_name: str, model: Array) -> None:
    """Raise unless two arrays lie on one device."""
    expected, got = device_of(model), device_of(array)
    if expected is not None and got is not None and expected != got:
        raise ValueError(f"expected {name} on the device of {model_name}, {expected}; got {got}")


def device_of(array: Array) -> Any:
    """The one device of an array that its user has placed; ``None`` where the library still may move it."""
    if isinstance(array, PreparedWeight):
        array = array.like
    if has_sharding(array):
        if not is_concrete(array):
            return None
        spread = len(array.sharding.device_set) > 1
        return None if spread or not getattr(array, "committed", False) else array.device
    return getattr(array, "device", None) or None


def check_broadcastable(name: str, array: Array, target: tuple[int | None, ...], hint: str = "") -> None:
    """Raise unless the array broadcasts to the target without growing it."""
    dims = sizes(array)
    fits = len(dims) <= len(target)
    if fits:
        aligned = target[len(target) - len(dims) :]
        fits = not any(dim != 1 and sizes_differ(dim, goal) for dim, goal in zip(dims, aligned, strict=True))
    if not fits:
        leading, known = (["..."], target[len(OPEN_AXES) :]) if target[: len(OPEN_AXES)] == OPEN_AXES else ([], target)
        wanted = ", ".join([*leading, *("?" if goal is None else str(goal) for goal in known)])
        raise ValueError(f"expected {name} to broadcast to ({wanted}); got {shape_text(array)}{hint}")


def check_number(name: str, value: Any, *, positive: bool = False, may_be_integer: bool = False) -> None:
    """Raise unless the value is a finite Python number, or a 0-d floating-point array, whose value is not read.

    It may be an array of integers where ``jax.jit`` makes one of a Python integer, and the caller converts it.
    """
    if not isinstance(value, Real) and hasattr(value, "dtype"):
        if not (may_be_integer and dtype_name(value.dtype).startswith(("int", "uint"))):
            check_floating(name, value)
        if is_dense(value) and len(value.shape):  # a nested one has no shape
            raise ValueError(f"expected {name} as a number; got an array of shape {shape_text(value)}")
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"expected {name} as a number; got {type(value).__name__}")
    limit = FLOAT64_MAX if isinstance(value, Rational) else math.inf  # integers and fractions may be beyond all floats
    if not -limit < value < limit or (positive and value <= 0):  # type: ignore[operator]
        raise ValueError(
            f"expected {name} as a {'positive ' if positive else ''}finite number; got {number_text(value)}"
        )


def only_array(value: Any) -> Array | None:
    """The value if it is an array; ``None`` for numbers, those of NumPy included."""
    return None if isinstance(value, Real) or not hasattr(value, "dtype") else value


def check_scaling(scale: Any, softcap: Any) -> None:
    """Raise unless scale and softcap are numbers, or absent."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None:
            check_number(name, value, positive=name == "softcap", may_be_integer=True)


def check_added_dtype(name: str, array: Any, query: Array) -> None:
    """Raise unless what is added to scores is of the query's type or that of the computation."""
    if not hasattr(array, "dtype"):
        raise TypeError(f"expected {name} as a floating-point array; got {type(array).__name__}")
    allowed, got = dict.fromkeys((dtype_name(query.dtype), compute_dtype_name(query.dtype))), dtype_name(array.dtype)
    if got not in allowed:
        hint = ": a boolean array is a mask" if got == "bool" else ""
        raise TypeError(f"expected {name} of dtype {' or '.join(allowed)} to match query; got {got}{hint}")


def plain_integer(value: Any) -> Any:
    """An integer of any library as one of Python, so that it is the same on all; anything else as it is."""
    return value if isinstance(value, int) or not isinstance(value, Integral) else int(value)


def check_offset(name: str, offset: Any) -> Any:
    """Return what is added to positions, once it is known to be an integer below 2**29, or an integer array."""
    offset = plain_integer(offset)
    if only_array(offset) is not None:
        common_namespace(None, {name: offset})  # which says what is wrong with a library
        check_integer(name, offset)
    elif isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"expected {name} as an integer or an integer array; got {type_text(offset)}")
    return offset


def check_start(name: str, start: Any) -> Any:
    """Return a position, once it is known to be an integer that is not negative, or a 0-d integer array."""
    start = check_offset(name, start)
    if isinstance(start, int):
        if not 0 <= start <= MAX_POSITIONS:
            raise ValueError(f"expected {name} in [0, 2**29); got {number_text(start)}")
    elif len(start.shape):
        raise ValueError(f"expected {name} as an integer; got an array of shape {shape_text(start)}")
    return start


def check_dtype(dtype: Any, xp: Namespace) -> Any:
    """Return a dtype of a library, which may be asked for by its name, as initializers ask for it."""
    if isinstance(dtype, str):
        check_choice("dtype", dtype, FLOATING)
    return getattr(xp, dtype, dtype) if isinstance(dtype, str) else dtype


def check_placement(dtype: Any, device: Any, xp: Namespace) -> dict[str, Any]:
    """Return the keyword of a device for new arrays, once the library has made one of a floating-point dtype there."""
    placed = {} if device is None else {"device": device}
    if placed:
        try:
            xp.zeros((), dtype=xp.float32, **placed)
        except Exception as error:
            raise ValueError(f"expected device as one of {library_name(xp)}; got {device!r}") from error
    try:
        made = xp.zeros((), dtype=dtype, **placed)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # others are not about the dtype
        raise TypeError(f"expected dtype as one of {library_name(xp)}; got {dtype!r}") from error
    if isinstance(dtype, str) or dtype_name(made.dtype) not in FLOATING:
        raise TypeError(f"expected dtype as one of {library_name(xp)}, of floating point; got {dtype!r}")
    return placed


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
