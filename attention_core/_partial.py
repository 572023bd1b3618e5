"""Attention to a part of the keys, and how parts become the whole."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from attention_core._checks import differ, shape_text, sizes
from attention_core._exact_partial import ExactPartial, Extent, completed, merged_extents, merged_sums
from attention_core._namespace import array_namespace, is_concrete
from attention_core._typing import Array, Namespace
from attention_core.random import Dropout, check_dropout

__all__ = ["Partial", "complete_partial", "logaddexp", "merge_extents", "merge_partials"]


class Partial(NamedTuple):
    """Attention to some of the keys: output (..., H, M, E) and logsumexp (..., H, M), in the type of the computation.

    ``(0, -inf)`` is attention to no keys.
    """

    output: Array
    logsumexp: Array


AnyPartial: TypeAlias = Partial | ExactPartial


def merge_partials(first: AnyPartial, /, *others: AnyPartial, xp: Namespace | None = None) -> Any:
    r"""Merge attention to some keys with attention to other keys into attention to all of them.

    .. math:: \ell = \log \sum_n e^{\ell_n}, \qquad o = \sum_n e^{\ell_n - \ell} o_n

    The operation is associative and commutative, and attention to no keys is neutral: up to rounding for `Partial`,
    where that is (0, -inf); exactly for `ExactPartial`, whose sums of integers are added.

    Parameters
    ----------
    first, *others : Partial or ExactPartial
        All of one kind, of the same shapes and dtypes; if exact, relative to one extent.
    xp : array namespace, optional

    Returns
    -------
    Partial or ExactPartial

    Raises
    ------
    TypeError, ValueError
        When something is no partial, kinds, shapes, or extents that can be read differ.

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
    if isinstance(first, ExactPartial):
        return _merged_exactly(first, others, xp)
    for each in (first, *others):
        if not isinstance(each, tuple) or len(each) != 2:
            raise TypeError(f"expected Partial(output, logsumexp); got {type(each).__name__}")
    _check_alike("partials", ("output", "logsumexp"), (first, *others))
    xp = array_namespace(*(array for each in (first, *others) for array in each)) if xp is None else xp
    merged = Partial(*first)
    for other in others:
        logsumexp = logaddexp(merged.logsumexp, other[1], xp=xp)
        anchor = xp.where(xp.equal(logsumexp, -math.inf), 0.0, logsumexp)
        shares = (xp.expand_dims(xp.exp(xp.subtract(each, anchor)), axis=-1) for each in (merged.logsumexp, other[1]))
        ours, theirs = (xp.multiply(o, share) for o, share in zip((merged.output, other[0]), shares, strict=True))
        merged = Partial(xp.add(ours, theirs), logsumexp)
    return merged


def _check_alike(kind: str, names: tuple[str, ...], tuples: tuple[Any, ...]) -> None:
    """Raise unless the arrays of all tuples have the dtypes and shapes of the first."""
    for name, model in zip(names, tuples[0], strict=True):
        if not hasattr(model, "dtype"):
            raise TypeError(f"expected the {name} of all {kind} as arrays; got {type(model).__name__}")
    for each in tuples:
        for name, array, model in zip(names, each, tuples[0], strict=True):
            if not hasattr(array, "dtype") or array.dtype != model.dtype:
                got = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"expected the {name} of all {kind} of one dtype, {model.dtype}; got {got}")
            if differ(sizes(array), sizes(model)):
                raise ValueError(f"expected the {name} of all {kind} {shape_text(model)}; got {shape_text(array)}")


def _merged_exactly(first: ExactPartial, others: tuple[Any, ...], xp: Namespace | None) -> ExactPartial:
    for each in others:
        if not isinstance(each, ExactPartial):
            raise TypeError(f"expected ExactPartial like the first; got {type(each).__name__}")
    _check_alike("partials", ("weights", "values"), tuple(each[:2] for each in (first, *others)))
    _check_alike("extents", ("scores", "values"), tuple(each.extent for each in (first, *others)))
    xp = array_namespace(*first[:2]) if xp is None else xp
    for each in others:
        for ours, theirs in zip(first.extent, each.extent, strict=True):
            if ours is theirs or not (is_concrete(ours) and is_concrete(theirs)):
                continue
            same = xp.logical_or(xp.equal(ours, theirs), xp.logical_and(xp.isnan(ours), xp.isnan(theirs)))
            if not bool(xp.all(same)):
                raise ValueError("expected partials relative to one extent, that of merge_extents; got two")
    for each in others:
        weights, values = (merged_sums(ours, theirs, xp) for ours, theirs in zip(first[:2], each[:2], strict=True))
        first = ExactPartial(weights, values, first.extent)
    return first


def merge_extents(first: Extent, /, *others: Extent, xp: Namespace | None = None) -> Extent:
    """Merge the extents of some keys into that of all of them, by maxima: in any order, the result is the same.

    Parameters
    ----------
    first, *others : Extent
        Of the same shapes.
    xp : array namespace, optional

    Returns
    -------
    Extent

    Raises
    ------
    TypeError, ValueError
        When something is no `Extent`, or shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> low, high = (Extent(np.full((1, 1, 3), number), np.full((1, 1, 2), number)) for number in (1.0, 2.0))
    >>> merge_extents(low, high).values
    array([[[2., 2.]]])
    """
    for each in (first, *others):
        if not isinstance(each, tuple) or len(each) != 2:
            raise TypeError(f"expected Extent(scores, values); got {type(each).__name__}")
    _check_alike("extents", ("scores", "values"), (first, *others))
    xp = array_namespace(*first) if xp is None else xp
    merged = Extent(*first)
    for other in others:
        merged = merged_extents(merged, Extent(*other), xp)
    return merged


def complete_partial(partial: AnyPartial, /, *, dropout: Dropout | None = None, xp: Namespace | None = None) -> Partial:
    """Turn what was merged of all keys into output and logsumexp.

    Parameters
    ----------
    partial : Partial or ExactPartial
        The former is complete, and returned as it is.
    dropout : Dropout, optional
        That of all pieces.
    xp : array namespace, optional

    Returns
    -------
    Partial
        In the type of the computation, float32 if exact: the bits are those of attention to all keys at once.

    Raises
    ------
    TypeError, ValueError
        When this is no partial.

    Examples
    --------
    >>> import numpy as np
    >>> from attention_core import attention_extent, partial_attention, scaled_dot_product_attention
    >>> query, key, value = (np.linspace(0, 1, 12, dtype=np.float32).reshape(1, 6, 2) for _ in range(3))
    >>> pieces = [(key[:, at, :], value[:, at, :]) for at in (slice(4, 6), slice(0, 4))]
    >>> extent = merge_extents(*[attention_extent(query, *piece) for piece in pieces])
    >>> exactly = {"arithmetic": "reproducible"}
    >>> partials = [partial_attention(query, *piece, extent=extent, **exactly) for piece in pieces]
    >>> whole = scaled_dot_product_attention(query, key, value, **exactly)
    >>> bool((complete_partial(merge_partials(*partials)).output == whole).all())
    True
    """
    if dropout is not None:
        check_dropout(dropout)
    if isinstance(partial, ExactPartial):
        return Partial(*completed(partial, dropout, array_namespace(*partial[:2]) if xp is None else xp))
    if not isinstance(partial, tuple) or len(partial) != 2 or isinstance(partial, Extent):
        raise TypeError(f"expected Partial or ExactPartial; got {type(partial).__name__}")
    return Partial(*partial)


def logaddexp(first: Array, second: Array, /, *, xp: Namespace) -> Array:
    r"""The logarithm of a sum of exponentials, :math:`\log(e^a + e^b)`; of two -inf it is -inf, with gradients 0."""
    top = xp.maximum(first, second)
    none = xp.equal(top, -math.inf)
    top = xp.where(none, 0.0, top)
    total = xp.add(xp.exp(xp.subtract(first, top)), xp.exp(xp.subtract(second, top)))
    return xp.where(none, -math.inf, xp.add(top, xp.log(xp.where(none, 1.0, total))))
