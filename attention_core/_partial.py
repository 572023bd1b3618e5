"""Attention to a part of the keys, and how parts become the whole."""

from __future__ import annotations

import math
from typing import NamedTuple

from attention_core._checks import differ, shape_text, sizes
from attention_core._namespace import array_namespace
from attention_core._typing import Array, Namespace

__all__ = ["Partial", "logaddexp", "merge_partials"]


class Partial(NamedTuple):
    """Attention to some of the keys: output (..., H, M, E) and logsumexp (..., H, M), in the type of the computation.

    ``(0, -inf)`` is attention to no keys.
    """

    output: Array
    logsumexp: Array


def merge_partials(first: Partial, /, *others: Partial, xp: Namespace | None = None) -> Partial:
    r"""Merge attention to some keys with attention to other keys into attention to all of them.

    .. math:: \ell = \log \sum_n e^{\ell_n}, \qquad o = \sum_n e^{\ell_n - \ell} o_n

    The operation is associative and commutative up to rounding, and attention to no keys, (0, -inf), is neutral.

    Parameters
    ----------
    first, *others : Partial
        Of the same shapes and dtypes.
    xp : array namespace, optional

    Returns
    -------
    Partial

    Raises
    ------
    TypeError, ValueError
        When something is no `Partial`, or shapes differ.

    References
    ----------
    M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> half = Partial(xp.ones((1, 1, 2)), xp.zeros((1, 1)))
    >>> other = Partial(xp.zeros((1, 1, 2)), xp.zeros((1, 1)))
    >>> merge_partials(half, other).output
    Array([[[0.5, 0.5]]], dtype=array_api_strict.float64)
    """
    for each in (first, *others):
        if not isinstance(each, tuple) or len(each) != 2:
            raise TypeError(f"expected Partial(output, logsumexp); got {type(each).__name__}")
        for name, array, model in zip(("output", "logsumexp"), each, first, strict=True):
            if not hasattr(array, "dtype") or array.dtype != model.dtype:
                got = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"expected the {name} of all partials of one dtype, {model.dtype}; got {got}")
            if differ(sizes(array), sizes(model)):
                raise ValueError(f"expected the {name} of all partials {shape_text(model)}; got {shape_text(array)}")
    xp = array_namespace(*(array for each in (first, *others) for array in each)) if xp is None else xp
    merged = Partial(*first)
    for other in others:
        logsumexp = logaddexp(merged.logsumexp, other[1], xp=xp)
        anchor = xp.where(xp.equal(logsumexp, -math.inf), 0.0, logsumexp)
        shares = (xp.expand_dims(xp.exp(xp.subtract(each, anchor)), axis=-1) for each in (merged.logsumexp, other[1]))
        ours, theirs = (xp.multiply(o, share) for o, share in zip((merged.output, other[0]), shares, strict=True))
        merged = Partial(xp.add(ours, theirs), logsumexp)
    return merged


def logaddexp(first: Array, second: Array, /, *, xp: Namespace) -> Array:
    r"""The logarithm of a sum of exponentials, :math:`\log(e^a + e^b)`; of two -inf it is -inf, with gradients 0."""
    top = xp.maximum(first, second)
    none = xp.equal(top, -math.inf)
    top = xp.where(none, 0.0, top)
    total = xp.add(xp.exp(xp.subtract(first, top)), xp.exp(xp.subtract(second, top)))
    return xp.where(none, -math.inf, xp.add(top, xp.log(xp.where(none, 1.0, total))))
