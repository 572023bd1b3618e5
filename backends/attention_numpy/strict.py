"""The array API standard as a backend: array-api-strict computes with NumPy, and refuses what the standard leaves open.

Its devices are make-believe, and so tell whether a computation stays on the device of its arrays, on any machine.
"""

from __future__ import annotations

from typing import Any

import array_api_strict

from attention_core.backend import Array, Backend
from attention_numpy.backend import NumpyBackend
from attention_numpy.trees import as_floating, known_device, map_arrays, to_copies, versions_of


class StrictBackend(NumpyBackend):
    """The backend of array-api-strict."""

    dtypes: tuple[str, ...] = ("float32", "float64")  # of the standard

    def versions(self) -> dict[str, str]:
        """Versions of array-api-strict and of the NumPy it computes with."""
        return versions_of("array-api-strict", "numpy", "ml_dtypes")

    def owns(self, array: Array, /) -> bool:
        """Whether this is an array of array-api-strict."""
        return isinstance(array, type(array_api_strict.empty(0)))  # the class itself has no public name

    def devices(self) -> list[str]:
        """Names of the devices, all of them in the memory of this machine."""
        return list(_devices())

    def from_numpy(self, tree: Any, /, *, device: str | None = None, dtype: str | None = None) -> Any:
        """Turn the NumPy arrays of a tree into arrays of array-api-strict."""
        placed = None if device is None else _devices()[known_device(device, self.devices())]
        copies = to_copies(map_arrays(lambda array: as_floating(array, dtype, self.dtypes), tree))
        return map_arrays(lambda array: array_api_strict.asarray(array, device=placed), copies)

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
