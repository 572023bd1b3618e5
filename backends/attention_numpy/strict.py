"""The array API standard as a backend: array-api-strict computes with NumPy, and refuses what the standard leaves open.

Its devices are make-believe, and so tell whether a computation stays on the device of its arrays, on any machine.
"""

from __future__ import annotations

from typing import Any

import array_api_strict

from attention_core.backend import Array, Backend
from attention_numpy.backend import NumpyBackend
from attention_numpy.trees import NumpyArray, map_arrays, to_copies


class StrictBackend(NumpyBackend):
    """The backend of array-api-strict."""

    dtypes: tuple[str, ...] = ("float32", "float64")  # of the standard
    packages = ("array-api-strict", "numpy", "ml_dtypes")

    def owns(self, array: Array, /) -> bool:
        """Whether this is an array of array-api-strict."""
        return isinstance(array, type(array_api_strict.empty(0)))  # the class itself has no public name

    def devices(self) -> list[str]:
        """Names of the devices, all of them in the memory of this machine."""
        return list(_devices())

    def placed(self, array: NumpyArray, device: str | None, /) -> Array:
        target = None if device is None else _devices()[device]
        return array_api_strict.asarray(to_copies(array), device=target)

    def to_numpy(self, tree: Any, /) -> Any:
        """Turn the arrays of a tree into NumPy arrays."""
        # NumPy may read an array of the first device only, as it would an array in the memory of this machine.
        first = next(iter(_devices().values()))
        return to_copies(map_arrays(lambda array: array.to_device(first), tree))


def _devices() -> dict[str, Any]:
    devices = array_api_strict.__array_namespace_info__().devices()
    # A device prints as array_api_strict.Device('device1'), and tells its name in no other way.
    return {str(device).split("'")[1]: device for device in devices}


backend: Backend = StrictBackend(array_api_strict)
