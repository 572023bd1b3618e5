"""NumPy as a backend: the arrays are NumPy's own already, so that next to nothing is to be done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import array_api_compat.numpy
import numpy as np

from attention_core.backend import Array, Backend, Loops, Tuning
from attention_numpy.adapter import Adapter
from attention_numpy.threads import NumpyThreads
from attention_numpy.trees import NumpyArray, known_mode

__all__ = ["NumpyBackend", "backend"]


class NumpyLoops(Loops):
    """Loops that write over arrays."""

    takes_out = True
    threads = NumpyThreads()

    def exp_difference(self, x: Array, y: Array) -> Array:
        """The exponential of a difference, in the memory of the first array."""
        np.subtract(x, y, out=x)
        return np.exp(x, out=x)

    def norm(self, x: Array) -> Array:
        return np.sqrt(np.vecdot(x, x))


class NumpyBackend(Adapter):
    """The backend of NumPy, and of libraries that compute with it."""

    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")  # of which ml_dtypes has bfloat16
    packages: tuple[str, ...] = ("numpy", "ml_dtypes")
    holds_values = True
    tuning = Tuning(
        queries=2048,
        keys=512,
        min_queries=64,
        dense_below=144 * 144,
        structured_below=127 * 127,
        exact_scores=2**17,
    )

    def owns(self, array: Array, /) -> bool:
        """Whether this is a NumPy array or scalar.

        Raises
        ------
        TypeError
            When it is a masked array or a matrix, which compute something else than plain arrays do.
        """
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("expected a plain array; got a masked array: pass array.data, and ~array.mask as the mask")
        if isinstance(array, np.matrix):
            raise TypeError("expected a plain array; got a matrix: pass numpy.asarray(matrix)")
        return isinstance(array, np.ndarray | np.generic)

    def devices(self) -> list[str]:
        return ["cpu"]

    def placed(self, array: NumpyArray, device: str | None, /) -> Array:
        return np.array(array, order="C", copy=True)

    def compile(self, function: Callable[..., Any], /, *, mode: str | None = None) -> Callable[..., Any]:
        """Return the function as it is, in the only mode."""
        known_mode(mode, self.modes)
        return function

    def without_warnings(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which NumPy warns of no number, and raises for none."""
        return np.errstate(all="ignore")

    def draw_seed(self, source: Any, /) -> Any:
        """Draw two words from a generator of NumPy."""
        if isinstance(source, np.random.Generator):
            return source.integers(-(2**31), 2**31, 2, np.int32)
        return source

    def update_rows(self, array: Array, rows: Array, start: Array, /, *, donate: bool) -> Array:
        """Write rows into the array, or into a copy.

        Raises
        ------
        ValueError
            When an array that is donated is read-only.
        """
        if donate and isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError("expected arrays that can be written with donate=True; got a read-only one")
        written = array if donate else self.namespace.asarray(array, copy=True)
        for sequence in np.ndindex(start.shape):
            first = int(start[sequence])
            written[(*sequence, ..., slice(first, first + rows.shape[-2]), slice(None))] = rows[(*sequence, ...)]
        return written


backend: Backend = NumpyBackend(array_api_compat.numpy, NumpyLoops(array_api_compat.numpy))
