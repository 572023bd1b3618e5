"""Normalization by the root of the mean square."""

from __future__ import annotations

from attention_core._arithmetic import arithmetic_of, check_arithmetic
from attention_core._checks import check_floating, check_number, check_rank, check_vector, shape_text, sizes
from attention_core._namespace import array_namespace, narrow, widen
from attention_core._typing import Array, Namespace

__all__ = ["rms_norm"]


def rms_norm(
    scale: Array,
    x: Array,
    /,
    *,
    epsilon: float = 1e-6,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
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
    arithmetic : {"fast", "reproducible"}
        As in `scaled_dot_product_attention`.
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
    check_arithmetic(arithmetic, "x", x)
    check_number("epsilon", epsilon, positive=True)
    if sizes(x)[-1] == 0:
        raise ValueError(f"expected x with at least one channel; got {shape_text(x)}")
    check_vector("scale", scale, sizes(x)[-1], "x", x)
    dtype = x.dtype
    scale, x = widen((scale, x), xp=xp)
    return narrow(arithmetic_of(arithmetic).normalize_rms(x, scale, float(epsilon), xp=xp), dtype, xp=xp)
