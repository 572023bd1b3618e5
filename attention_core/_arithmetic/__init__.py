"""The two arithmetics: the library's own, and one with the same bits everywhere."""

from __future__ import annotations

from typing import Any

from .._arrays import Array, Arrays, Namespace, dtype_name, shape_text, sizes
from .._checks import check_choice
from . import fast, reproducible

# By name, the modules with the functions of an arithmetic: affine, normalize, gelu and the others.
ARITHMETICS: dict[str, Any] = {"fast": fast, "reproducible": reproducible}
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # functions of both
WITHOUT_FLOAT64 = ("mps", "metal", "tpu")  # kinds of devices, by the names their libraries use


def check_arithmetic(arithmetic: Any, name: str, array: Array) -> None:
    """Raise unless this names an arithmetic that supports the dtype and the device of an array."""
    check_choice("an arithmetic", arithmetic, ARITHMETICS)
    if arithmetic == "fast" or not hasattr(array, "dtype"):
        return
    if dtype_name(array.dtype) == "float64":
        raise ValueError(
            f"expected {name} of float16, bfloat16 or float32 with arithmetic='reproducible', whose sums are exact in"
            " float64; got float64"
        )
    device = str(getattr(array, "device", "")).lower()
    if any(kind in device for kind in WITHOUT_FLOAT64):
        raise ValueError(
            f"expected {name} on a device that has float64, with arithmetic='reproducible'; got {array.device}"
        )


def check_width(arithmetic: str, name: str, array: Array) -> None:
    """Raise unless the channels that reproducible arithmetic adds up are known in number before running."""
    if arithmetic == "reproducible" and sizes(array)[-1] is None:
        raise ValueError(f"expected {name} of a known width with arithmetic='reproducible'; got {shape_text(array)}")


def fan_out(arrays: Arrays, arithmetic: Any, xp: Namespace) -> list[Array]:
    """The arrays, with one of the arithmetic's `copies` for each use of an array that occurs more than once."""
    if arithmetic is fast:  # whose copies are the array
        return list(arrays)
    firsts = [[other is array for other in arrays].index(True) for array in arrays]
    copies = {i: iter(arithmetic.copies(arrays[i], firsts.count(i), xp=xp)) for i in dict.fromkeys(firsts)}
    return [next(copies[i]) for i in firsts]
