"""Normalization by the root of the mean square."""

from __future__ import annotations

from attention_core._checks import check_floating, check_number, check_rank, check_vector, shape_text, sizes
from attention_core._namespace import array_namespace, dtype_name, narrow, widen
from attention_core._typing import Array, Namespace

__all__ = ["rms_norm"]

# Beyond the bound, elements are multiplied by a power of two before they are squared: that is exact, and no square
# overflows.
_BOUNDS = {"float32": (2.0**60, 2.0**-96), "float64": (2.0**500, 2.0**-768)}


def rms_norm(scale: Array, x: Array, /, *, epsilon: float = 1e-6, xp: Namespace | None = None) -> Array:
    r"""Divide the channels of every position by the root of their mean square.

    .. math:: y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \cdot \gamma

    Over the channels of query and key heads, it bounds the scores of attention (query-key normalization).

    Parameters
    ----------
    scale : Array, shape (C,)
        :math:`\gamma`, of the dtype of ``x``.
    x : Array, shape (..., C)
        Types of 16 bits are computed in float32 and rounded once. Squares may overflow: the result does not.
    epsilon : float
        Added to the mean square, under the root.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., C)
        Of the dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        When dtypes or shapes do not fit, or epsilon is not a positive number.

    References
    ----------
    B. Zhang, R. Sennrich, "Root mean square layer normalization", 2019. A. Henry et al., "Query-key normalization for
    transformers", 2020.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> rms_norm(xp.ones(2), xp.asarray([[1.0, 7.0]]), epsilon=1e-9)
    Array([[0.2, 1.4]], dtype=array_api_strict.float64)
    """
    xp = array_namespace(x, scale) if xp is None else xp
    check_rank("x", x, 1, "(..., C)")
    check_floating("x", x)
    check_number("epsilon", epsilon, positive=True)
    if sizes(x)[-1] == 0:
        raise ValueError(f"expected x with at least one channel; got {shape_text(x)}")
    check_vector("scale", scale, sizes(x)[-1], "x", x)
    dtype = x.dtype
    scale, x = widen((scale, x), xp=xp)
    bound, power = _BOUNDS[dtype_name(x.dtype)]
    largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
    factor = xp.where(xp.greater(largest, bound), xp.full_like(largest, power), 1.0)
    x = xp.multiply(x, factor)
    square = xp.mean(xp.multiply(x, x), axis=-1, keepdims=True)
    noise = xp.multiply(xp.multiply(factor, factor), float(epsilon))
    return narrow(xp.multiply(xp.divide(x, xp.sqrt(xp.add(square, noise))), scale), dtype, xp=xp)
