r"""Initial parameters from a seed: the same bits on every library, device and mode.

A uniform number is an integer of 24 bits times a power of two, which is exact, times the limit, which is rounded once.
A normal number is looked up: 16 random bits choose one of 65,536 quantiles of the normal distribution. The quantiles
are multiples of 2^-20, which float32 and float64 hold exactly. No logarithm or cosine is computed, in which libraries
differ.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import Any, TypeAlias

from ._arrays import FLOATING, Array, Namespace, one_program, take_rows
from ._backend import own_namespace, without_warnings
from ._checks import check_choice, check_number, check_sizes
from ._keywords import publish
from .random import check_elements, random_bits, uniform_integers

__all__ = ["glorot_uniform", "normal", "truncated_normal", "uniform"]

Dims: TypeAlias = tuple[int, ...]
_TABLE_BITS = 16
_GRID = 2.0**20


def uniform(
    seed: Any, dims: Dims, /, *, limit: float = 1.0, dtype: str = "float32", xp: Namespace, device: Any = None
) -> Array:
    """Draw numbers uniformly from [-limit, limit).

    Parameters
    ----------
    seed : int or Array of int
        As in `attention_core.Dropout`.
    dims : tuple of int
        The shape of the result.
    limit : float
        Positive.
    dtype : {"float16", "bfloat16", "float32", "float64"}
    xp : array namespace
    device : optional
        A device of the library.

    Returns
    -------
    Array, shape dims

    Raises
    ------
    TypeError, ValueError
        When the seed, the shape, the limit or the dtype is not valid.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> bool(xp.all(xp.abs(uniform(3, (5, 7), limit=0.25, xp=xp)) <= 0.25))
    True
    """
    xp = _checked(dims, dtype, xp)
    check_number("limit", limit, positive=True)
    half = 2**23
    integers = xp.subtract(uniform_integers(random_bits(seed, dims, xp=xp, device=device), xp=xp), half)
    return _rounded(integers, float(limit), unit=float(half), dtype=dtype, xp=xp)


def normal(
    seed: Any, dims: Dims, /, *, stddev: float = 1.0, dtype: str = "float32", xp: Namespace, device: Any = None
) -> Array:
    """Draw numbers from a normal distribution with mean 0, by a table of 65,536 quantiles.

    Parameters
    ----------
    seed, dims, dtype, xp, device
        As in `uniform`.
    stddev : float
        Positive.

    Returns
    -------
    Array, shape dims

    Examples
    --------
    >>> import array_api_strict as xp
    >>> x = normal(3, (100, 100), xp=xp)
    >>> round(float(xp.mean(x)), 1) + 0.0, round(float(xp.std(x)), 1)
    (0.0, 1.0)
    """
    return _quantiles(seed, dims, cut=math.inf, stddev=stddev, dtype=dtype, xp=xp, device=device)


def truncated_normal(
    seed: Any, dims: Dims, /, *, stddev: float = 1.0, dtype: str = "float32", xp: Namespace, device: Any = None
) -> Array:
    """Draw numbers from a normal distribution with mean 0, truncated at two standard deviations.

    Parameters
    ----------
    seed, dims, dtype, xp, device
        As in `uniform`.
    stddev : float
        Of the distribution before truncation; BERT uses 0.02.

    Returns
    -------
    Array, shape dims

    Examples
    --------
    >>> import array_api_strict as xp
    >>> bool(xp.all(xp.abs(truncated_normal(3, (100, 100), stddev=0.02, xp=xp)) <= 0.04))
    True
    """
    return _quantiles(seed, dims, cut=2.0, stddev=stddev, dtype=dtype, xp=xp, device=device)


def glorot_uniform(seed: Any, dims: Dims, /, *, dtype: str = "float32", xp: Namespace, device: Any = None) -> Array:
    r"""Draw uniformly, with limit :math:`\sqrt{6 / (in + out)}` for a weight of shape (in, out).

    References
    ----------
    X. Glorot, Y. Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> glorot_uniform(3, (2, 4), xp=xp).shape
    (2, 4)
    """
    _check_matrix(dims)
    return uniform(seed, dims, limit=math.sqrt(6 / sum(dims)), dtype=dtype, xp=xp, device=device)


def _quantiles(seed: Any, dims: Dims, /, *, cut: float, stddev: float, dtype: str, xp: Namespace, device: Any) -> Array:
    xp = _checked(dims, dtype, xp)
    check_number("stddev", stddev, positive=True)
    placement = {} if device is None else {"device": device}
    table = xp.asarray(quantile_table(cut), dtype=xp.int32, **placement)
    integers = one_program(_looked_up, xp)(table, random_bits(seed, dims, xp=xp, device=device), xp=xp)
    return _rounded(integers, float(stddev), unit=_GRID, dtype=dtype, xp=xp)


def _looked_up(table: Array, bits: Array, *, xp: Namespace) -> Array:
    index = xp.reshape(xp.bitwise_right_shift(uniform_integers(bits, xp=xp), 24 - _TABLE_BITS), (-1,))
    return xp.reshape(take_rows(table, index, axis=0, xp=xp), bits.shape)


@functools.cache
def quantile_table(cut: float, /) -> list[int]:
    """Quantiles of the standard normal distribution within ±cut, at the middles of 65,536 parts, in units of 2^-20."""
    gauss, count = NormalDist(), 2**_TABLE_BITS
    low = gauss.cdf(-cut) if math.isfinite(cut) else 0.0
    upper = [gauss.inv_cdf(0.5 + (0.5 - low) * (2 * part + 1) / count) for part in range(count // 2)]
    positive = [round(quantile * _GRID) for quantile in upper]
    return [-quantile for quantile in reversed(positive)] + positive


def _rounded(integers: Array, factor: float, *, unit: float, dtype: str, xp: Namespace) -> Array:
    """Integers in a unit that is a power of two, times a factor: rounded to the type of the product, and once more."""
    with without_warnings(integers):
        return one_program(_scaled, xp)(integers, factor, unit=unit, dtype=dtype, xp=xp)


def _scaled(integers: Array, factor: float, *, unit: float, dtype: str, xp: Namespace) -> Array:
    wide = xp.float64 if dtype == "float64" else xp.float32
    return xp.astype(xp.multiply(xp.divide(xp.astype(integers, wide), unit), factor), getattr(xp, dtype))


def _checked(dims: Dims, dtype: str, xp: Namespace) -> Namespace:
    """The namespace, once it is known to have a dtype, and numbers for so many elements."""
    xp = own_namespace(xp)
    check_elements(dims)
    check_choice("dtype", dtype, FLOATING)
    if not hasattr(xp, dtype):
        raise ValueError(f"expected a dtype of {xp.__name__}; got {dtype!r}: make float32 and convert")
    return xp


def _check_matrix(dims: Dims) -> None:
    check_sizes("a shape (in, out)", dims)
    if len(dims) != 2 or 0 in dims:
        raise ValueError(f"expected a shape (in, out) of two positive sizes; got {dims}")


publish(vars(), __all__)
