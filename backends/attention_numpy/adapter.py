"""What the backends of libraries have in common: how arrays come from NumPy, and go there."""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attention_core.backend import Array, Backend
from attention_numpy.trees import NumpyArray, as_floating, known_device, map_arrays, to_copies


class Adapter(Backend):
    """The backend of a library whose arrays are made of those of NumPy: a base class.

    Attributes
    ----------
    packages : tuple of str
        The distributions that it computes with.
    hint : str
        What to do about a floating-point type that is not one of its own.
    """

    packages: tuple[str, ...]
    hint = ""

    def versions(self) -> dict[str, str]:
        found = {}
        for package in self.packages:
            with contextlib.suppress(PackageNotFoundError):
                found[package] = version(package)
        return found

    def placed(self, array: NumpyArray, device: str | None, /) -> Array:
        """Copy an array of NumPy, in a type of the library, to one of its devices, by default where it makes arrays."""
        raise NotImplementedError

    def from_numpy(self, tree: Any, /, *, device: str | None = None, dtype: str | None = None) -> Any:
        """Turn the NumPy arrays of a tree into arrays of the library, bit for bit but for ``dtype``."""
        if device is not None:
            known_device(device, self.devices())
        return map_arrays(lambda leaf: self.placed(as_floating(leaf, dtype, self.dtypes, hint=self.hint), device), tree)

    def to_numpy(self, tree: Any, /) -> Any:
        return to_copies(tree)
