"""Problems: shapes, a mask and a direction, with arrays drawn from a seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

import attention_core

__all__ = ["DIRECTIONS", "MASKS", "OPERATIONS", "MaskKind", "Problem", "default_problems", "drawn_arrays", "laid_out"]

NumpyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

WINDOW = 256  # keys that a query attends to, including its own
DOCUMENT = 512  # length of the documents packed into one sequence
SHAPES = ((1, 1, 8, 16), (32, 12, 128, 64), (4, 12, 512, 64), (1, 8, 2048, 64), (1, 4, 8192, 64))
PADDED = (4, 8, 2048, 64)
LAYERS = SHAPES[1:3]
DIRECTIONS = ("forward", "both")
OPERATIONS = ("attention", "multi_head", "linear")


class MaskKind(NamedTuple):
    """A mask: its arrays, the core's mask of these, a rule of NumPy, and the number of keys of each query.

    The rule does not use the core, so that it can check the core and its peers alike.
    """

    arrays: Callable[[int, int], tuple[NumpyArray, ...]]
    mask: Callable[..., attention_core.Mask | None]
    rule: Callable[..., NumpyArray] | None
    keys: Callable[[NumpyArray, int], Any]


def _no_arrays(batch: int, length: int) -> tuple[NumpyArray, ...]:
    return ()


def _documents(batch: int, length: int) -> tuple[NumpyArray, ...]:
    return (np.arange(length, dtype=np.int32) // DOCUMENT,)


def _lengths(batch: int, length: int) -> tuple[NumpyArray, ...]:
    """Lengths spread evenly, so that half of all keys are padding."""
    return (np.ceil((np.arange(batch) + 0.5) / batch * length).astype(np.int32),)


MASKS = {
    "full": MaskKind(_no_arrays, lambda: None, None, lambda i, n: n),
    "causal": MaskKind(_no_arrays, attention_core.Causal, lambda i, j: j <= i, lambda i, n: i + 1),
    "window": MaskKind(
        _no_arrays,
        lambda: attention_core.SlidingWindow(left=WINDOW - 1, right=0),
        lambda i, j: (j <= i) & (j > i - WINDOW),
        lambda i, n: np.minimum(i + 1, WINDOW),
    ),
    "packed": MaskKind(
        _documents,
        lambda ids: attention_core.Segments(ids, ids),
        lambda i, j, ids: ids[i] == ids[j],
        lambda i, n: np.minimum(n - i // DOCUMENT * DOCUMENT, DOCUMENT),
    ),
    "padded": MaskKind(
        _lengths,
        attention_core.KeyLengths,
        lambda i, j, lengths: j < lengths[:, None, None, None],
        lambda i, n: n / 2,
    ),
}


@dataclass(frozen=True)
class Problem:
    """A computation to time.

    Attributes
    ----------
    shape : tuple of int
        Batch, heads, length, head dimension.
    mask : str
        A name in `MASKS`.
    direction : str
        ``"forward"``, or ``"both"``: the output, and the gradients of ``sum(output * cotangent)``.
    dtype, device : str
        ``"cpu"``, or what the name of a framework's device starts with, such as ``"cuda"``.
    operation : str
        ``"attention"`` of queries, keys and values, ``"multi_head"``: self-attention with its four projections, or
        ``"linear"``: one of these projections, without its bias.
    """

    shape: tuple[int, int, int, int]
    mask: str = "full"
    direction: str = "forward"
    dtype: str = "float32"
    device: str = "cpu"
    operation: str = "attention"

    @property
    def is_causal(self) -> bool:
        """Whether the mask is causal, for which all frameworks have a flag."""
        return self.mask == "causal"

    @property
    def share(self) -> float:
        """The fraction of pairs that the mask allows."""
        length = self.shape[2]
        return float(np.mean(MASKS[self.mask].keys(np.arange(length), length)) / length)

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products, over the pairs that the mask allows, and of projections."""
        batch, heads, length, width = self.shape
        projection = (6.0 if self.direction == "both" else 2.0) * batch * length * (heads * width) ** 2
        if self.operation == "linear":
            return projection
        count = 4.0 * batch * heads * length**2 * width * self.share
        factor = 3.5 if self.direction == "both" else 1.0  # five more products of that size, one of them recomputed
        return factor * count + (4 * projection if self.operation == "multi_head" else 0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in float64, in which they are drawn."""
        batch, heads, length, width = self.shape
        inputs, square = batch * heads * length * width, (heads * width) ** 2
        return 8 * {"attention": 4 * inputs, "linear": 2 * inputs + square}.get(self.operation, 2 * inputs + 4 * square)

    @property
    def mask_arrays(self) -> tuple[NumpyArray, ...]:
        """The arrays of the mask of the core."""
        batch, _, length, _ = self.shape
        return MASKS[self.mask].arrays(batch, length)

    def allowed(self, rows: NumpyArray | None = None) -> NumpyArray | None:
        """Which query may attend to which key, with four axes; ``None`` without a mask."""
        rule, keys = MASKS[self.mask].rule, np.arange(self.shape[2])
        if rule is None:
            return None
        allowed = rule((keys if rows is None else rows)[:, None], keys, *self.mask_arrays)
        return allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)

    @property
    def arrays(self) -> tuple[NumpyArray, ...]:
        """The arrays to differentiate by: query, key and value, or the input and the parameters of projections."""
        return drawn_arrays(self.shape, self.dtype, self.operation)[:-1]

    @property
    def cotangent(self) -> NumpyArray:
        """The cotangent of the output."""
        return drawn_arrays(self.shape, self.dtype, self.operation)[-1]


@functools.lru_cache(maxsize=2)
def drawn_arrays(shape: tuple[int, int, int, int], dtype: str, operation: str) -> tuple[NumpyArray, ...]:
    """Draw the arrays of a problem, and its cotangent, from the seed of all problems."""
    rng = np.random.default_rng(20240229)
    batch, heads, length, width = shape
    if operation == "attention":
        return tuple(_rounded(rng.standard_normal(shape), dtype) for _ in range(4))
    channels = heads * width
    if operation == "linear":
        drawn = [rng.standard_normal(dims) for dims in ((batch, length, channels), (channels, channels))]
        return tuple(_rounded(each, dtype) for each in [*drawn, rng.standard_normal((batch, length, channels))])
    weights = [
        draw for _ in range(4) for draw in (rng.standard_normal((channels, channels)), rng.standard_normal(channels))
    ]
    drawn = [rng.standard_normal((batch, length, channels)), *(each * channels**-0.5 for each in weights)]
    return tuple(_rounded(each, dtype) for each in [*drawn, rng.standard_normal((batch, length, channels))])


def _rounded(array: NumpyArray, dtype: str) -> NumpyArray:
    """Round to the dtype, and return the values in float32 or wider."""
    rounded = array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return rounded if dtype == "float64" else rounded.astype(np.float32)


def laid_out(array: NumpyArray, layout: str) -> NumpyArray:
    """Swap heads and length, (batch, heads, length, head dimension), for the layout ``"BLHD"``."""
    return np.ascontiguousarray(np.swapaxes(array, 1, 2)) if layout == "BLHD" else array


def default_problems(dtype: str = "float32", device: str = "cpu") -> list[Problem]:
    """The default problems."""
    masked = [(shape, mask) for shape in SHAPES for mask in ("full", "causal")]
    masked += [(SHAPES[-1], "window"), (SHAPES[-1], "packed"), (PADDED, "padded")]
    chosen = [(shape, mask, "attention") for shape, mask in masked] + [
        (shape, mask, "multi_head") for shape in LAYERS for mask in ("full", "causal")
    ]
    return [
        Problem(shape, mask, direction, dtype=dtype, device=device, operation=operation)
        for shape, mask, operation in chosen
        for direction in DIRECTIONS
    ]
