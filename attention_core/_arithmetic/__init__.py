"""The two arithmetics in which the one definition is computed, and what each can be asked for."""

from __future__ import annotations

from typing import Any

from attention_core._arithmetic import fast, reproducible
from attention_core._arrays import Array, Namespace, dtype_name

ARITHMETICS = {"fast": fast, "reproducible": reproducible}
WITHOUT_FLOAT64 = ("mps", "metal", "tpu")  # kinds of devices, in the words of their libraries


def arithmetic_of(name: str) -> Any:
    """The maps between attentions, as functions of arrays, in one of the arithmetics."""
    return ARITHMETICS[name]


def check_arithmetic(arithmetic: Any, name: str, array: Array) -> None:
    """Raise unless this names an arithmetic that can be had for the dtype and the device of an array."""
    check_arithmetic_name(arithmetic)
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


def check_arithmetic_name(arithmetic: Any) -> None:
    """Raise unless this names an arithmetic."""
    if not isinstance(arithmetic, str) or arithmetic not in ARITHMETICS:
        raise ValueError(f"expected an arithmetic out of {', '.join(ARITHMETICS)}; got {arithmetic!r}")


def fan_out(arrays: tuple[Array, ...], maps: Any, xp: Namespace) -> list[Array]:
    """The arrays, each place that uses one with a copy of its own where the arithmetic has such."""
    places = [[id(each) for each in arrays].index(id(array)) for array in arrays]
    held = {place: iter(maps.copies(arrays[place], places.count(place), xp=xp)) for place in set(places)}
    return [next(held[place]) for place in places]
