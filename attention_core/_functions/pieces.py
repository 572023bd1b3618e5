"""Attention to pieces of the keys, and merging them into attention to all keys."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias, Unpack

from attention_core._arrays import (
    Array,
    Namespace,
    dtype_name,
    dtypes_differ,
    shape_text,
    shapes_differ,
    sizes,
    type_text,
)
from attention_core._attention.reproducible.pieces import (
    ExactPartial,
    Extent,
    complete_exactly,
    extent_of,
    merge_sums,
    merge_two_extents,
    reproducible_partial,
)
from attention_core._attention.softmax import merge_pieces, with_remainder
from attention_core._attention.ways import dense_advantage, run_call
from attention_core._backend import can_be_read, common_namespace, with_autocast, without_warnings
from attention_core._checks import check_start
from attention_core._functions.attention import make_call
from attention_core._functions.options import FLAGS, Options, options_but
from attention_core.random import Dropout, check_dropout, seed_array

NOT_OF_EXTENTS = (
    *FLAGS[1:],
    "score_mod",
    "sinks",
    "dropout",
    "implementation",
    "arithmetic",
    "assume_finite",
    "shards",
)


@with_autocast(options=options_but(*FLAGS[1:], "sinks", "assume_finite", "shards"))
def partial_attention(
    query: Array,
    key: Array,
    value: Array,
    /,
    *,
    query_start: int | Array = 0,
    key_start: int | Array = 0,
    extent: Extent | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Compute attention to a piece of the keys, for `merge_partials` to merge with other pieces.

    This is for a cache that is read in pieces, and for several machines that each hold some of the keys.

    Parameters
    ----------
    query : Array, shape (..., H, M, D)
        All queries or a piece of them.
    key, value : Array, shapes (..., G, N, D) and (..., G, N, E)
        A piece of the keys and their values.
    query_start, key_start : int or 0-d Array of int
        The positions of the first query and of the first key of the pieces.
    mask : Mask or Array of bool, optional
        Over all positions of the whole, not of the piece.
    bias : Array, broadcastable to (..., H, M, N), optional
        Of the piece.
    is_causal, scale, softcap, score_mod, dropout, xp
        As in `scaled_dot_product_attention`; positions are those in the whole.
    implementation : {"auto", "dense", "blockwise"}
    arithmetic : {"fast", "reproducible"}
        With ``"reproducible"``, `complete_partial` of the merged pieces has the bits of attention to all keys, for any
        pieces in any order. It has no gradient.
    extent : Extent, optional
        For reproducible arithmetic only: `merge_extents` of the `attention_extent` of all pieces. An extent that does
        not cover this piece is not noticed, and gives wrong numbers.

    Returns
    -------
    Partial or ExactPartial
        Output, logsumexp and its remainder in the compute dtype, so that 16-bit types are rounded only after merging.
        With reproducible arithmetic, sums of integers that `complete_partial` rounds.

    Raises
    ------
    TypeError, ValueError
        As in `scaled_dot_product_attention`; also when an extent is missing, unexpected, or of other shapes.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.pieces import merge_partials
    >>> query, key, value = xp.zeros((1, 1, 4)), xp.ones((1, 4, 4)), xp.reshape(xp.arange(4.0), (1, 4, 1))
    >>> pieces = (slice(0, 1), slice(1, 4))
    >>> partials = (partial_attention(query, key[:, at, :], value[:, at, :], key_start=at.start) for at in pieces)
    >>> merge_partials(*partials).output
    Array([[[1.5]]], dtype=array_api_strict.float64)
    """
    starts = tuple(map(check_start, ("query_start", "key_start"), (query_start, key_start)))
    settled: dict[str, Any] = {"implementation": "auto", **options}
    call = make_call(query, key, value, starts=starts, **settled)
    check_extent(extent, call.arithmetic, query, value)
    if extent is not None:
        common_namespace(call.xp, {"query": query, "extent": Extent(*extent)})
        return reproducible_partial(call, Extent(*extent))
    implementation = settled["implementation"]
    if implementation == "auto":  # few kernels return the logsumexp
        implementation = "dense" if dense_advantage(call) else "blockwise"
    result = run_call(call, implementation, weights=False, logsumexp=True)
    return Partial(result.output, result.logsumexp, result.remainder)


@with_autocast(options=options_but(*NOT_OF_EXTENTS))
def attention_extent(
    query: Array,
    key: Array,
    value: Array,
    /,
    *,
    query_start: int | Array = 0,
    key_start: int | Array = 0,
    **options: Unpack[Options],
) -> Extent:
    """Find the maxima of the scores and values of a piece: the first of two passes in reproducible arithmetic.

    Reproducible arithmetic rounds relative to the largest score of a query, and to the largest magnitude in a channel
    of the values. All pieces have to use the same maxima: merge the extents with `merge_extents`, then call
    `partial_attention`.

    Parameters
    ----------
    query, key, value, query_start, key_start, mask, bias, is_causal, scale, softcap, xp
        As in `partial_attention` with ``arithmetic="reproducible"``.

    Returns
    -------
    Extent
        Of float32.

    Examples
    --------
    >>> import numpy as np
    >>> query, key = np.ones((1, 1, 4), np.float32), np.ones((1, 3, 4), np.float32)
    >>> extent = attention_extent(query, key, 5 * key, scale=1.0)
    >>> extent.values
    array([[[5., 5., 5., 5.]]], dtype=float32)
    >>> round(float(extent.scores.astype(np.float64).sum() * 256 * np.log(2)), 9)
    4.0
    """
    starts = tuple(map(check_start, ("query_start", "key_start"), (query_start, key_start)))
    settled: dict[str, Any] = {**options, "arithmetic": "reproducible"}
    return extent_of(make_call(query, key, value, starts=starts, **settled))


def check_extent(extent: Any, arithmetic: str, query: Array, value: Array) -> None:
    """Raise unless the extent has the shapes of a call with reproducible arithmetic, or is absent with fast."""
    if arithmetic == "fast":
        if extent is not None:
            raise ValueError("expected no extent with arithmetic='fast'; got one")
        return
    if not isinstance(extent, tuple) or len(extent) != 2:
        got = "none" if extent is None else type(extent).__name__
        raise TypeError(f"expected the extent of all keys with arithmetic='reproducible', of merge_extents; got {got}")
    shapes = (*sizes(query)[:-1], 3), (*sizes(value)[:-2], 1, sizes(value)[-1])
    for name, array, wanted in zip(("scores", "values"), extent, shapes, strict=True):
        if not hasattr(array, "dtype") or dtype_name(array.dtype) != "float32":
            got = dtype_name(array.dtype) if hasattr(array, "dtype") else type(array).__name__
            raise TypeError(f"expected the {name} of the extent of dtype float32; got {got}")
        if shapes_differ(sizes(array), wanted):
            raise ValueError(f"expected the {name} of the extent of shape {wanted}; got {shape_text(array)}")


class Partial(NamedTuple):
    """Attention to some of the keys: output (..., H, M, E) and logsumexp (..., H, M), in the compute dtype.

    ``(0, -inf)`` is attention to no keys. The remainder (..., H, M) is what rounding took from the logsumexp. Without
    it, a logsumexp of 10,000 in float32 is wrong by up to 0.0005, and so are its shares; kernels give none. What is
    merged has one: begin a compiled loop with zeros for it.
    """

    output: Array
    logsumexp: Array
    remainder: Array | None = None


AnyPartial: TypeAlias = Partial | ExactPartial


def merge_partials(first: AnyPartial, /, *others: AnyPartial, xp: Namespace | None = None) -> Any:
    r"""Merge attention to some keys with attention to other keys into attention to all of them.

    .. math:: \ell = \log \sum_n e^{\ell_n}, \qquad o = \sum_n e^{\ell_n - \ell} o_n

    Each :math:`\ell` is a logsumexp and its remainder together.

    The operation is associative and commutative, and attention to no keys is its neutral element, (0, -inf) as a
    `Partial`. This holds up to rounding for `Partial`, and exactly for `ExactPartial`, whose integers are added.

    Parameters
    ----------
    first, *others : Partial or ExactPartial
        All of one class, of the same shapes and dtypes; if exact, relative to the same extent.
    xp : array namespace, optional

    Returns
    -------
    Partial or ExactPartial

    Raises
    ------
    TypeError, ValueError
        When an argument is not a partial, or classes, shapes, or extents (if they can be read) differ.

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
        return _merge_exact(first, others, xp)
    _check_pairs(Partial, (first, *others))
    xp = common_namespace(xp, _numbered(Partial, (first, *others)))
    with without_warnings(first[0]):
        return functools.reduce(functools.partial(_merge_two, xp=xp), (Partial(*each) for each in (first, *others)))


def _merge_two(first: Partial, second: Partial, *, xp: Namespace) -> Partial:
    pairs = zip(with_remainder(first, xp), with_remainder(second, xp), strict=True)
    return Partial(*merge_pieces(*(xp.stack(pair) for pair in pairs), xp=xp))


def _numbered(kind: Any, tuples: tuple[Any, ...]) -> dict[str, Any]:
    """Tuples of a kind by names that tell them apart."""
    return {f"{kind.__name__}[{index}]": kind(*each) for index, each in enumerate(tuples)}


def _check_pairs(kind: type[Partial | Extent], pairs: tuple[Any, ...]) -> None:
    for pair in pairs:
        if not isinstance(pair, kind) and (type(pair) is not tuple or len(pair) not in (2, len(kind._fields))):
            raise TypeError(f"expected {kind.__name__}({', '.join(kind._fields)}); got {type_text(pair)}")
    several = f"{kind.__name__.lower()}s"
    _check_alike(several, kind._fields[:2], tuple(pair[:2] for pair in pairs))
    _check_alike(
        several, ("remainder",), ((pairs[0][1],), *((x,) for pair in pairs for x in pair[2:] if x is not None))
    )
    first, second = (sizes(array) for array in pairs[0][:2])
    if kind is Partial and shapes_differ(second, first[:-1]):
        raise ValueError(
            f"expected the logsumexp of a Partial (..., H, M) to match its output {shape_text(pairs[0][0])}; got"
            f" {shape_text(pairs[0][1])}"
        )


def _check_alike(kind: str, names: tuple[str, ...], tuples: tuple[Any, ...]) -> None:
    """Raise unless the arrays of all tuples have the dtypes and shapes of the first."""
    for name, model in zip(names, tuples[0], strict=True):
        if not hasattr(model, "dtype"):
            raise TypeError(f"expected the {name} of all {kind} as arrays; got {type(model).__name__}")
    for each in tuples:
        for name, array, model in zip(names, each, tuples[0], strict=True):
            if not hasattr(array, "dtype") or dtypes_differ(array, model):
                got = dtype_name(array.dtype) if hasattr(array, "dtype") else type(array).__name__
                expected = dtype_name(model.dtype)
                raise TypeError(f"expected the {name} of all {kind} of one dtype, {expected}; got {got}")
            if shapes_differ(sizes(array), sizes(model)):
                raise ValueError(f"expected the {name} of all {kind} {shape_text(model)}; got {shape_text(array)}")


def _merge_exact(first: ExactPartial, others: tuple[Any, ...], xp: Namespace | None) -> ExactPartial:
    for each in others:
        if not isinstance(each, ExactPartial):
            raise TypeError(f"expected ExactPartial like the first; got {type(each).__name__}")
    _check_alike("partials", ("weights", "values"), tuple(each[:2] for each in (first, *others)))
    _check_alike("extents", ("scores", "values"), tuple(each.extent for each in (first, *others)))
    xp = common_namespace(xp, _numbered(ExactPartial, (first, *others)))
    for each in others:
        for ours, theirs in zip(first.extent, each.extent, strict=True):
            if ours is theirs or not (can_be_read(ours, theirs)):
                continue
            same = xp.logical_or(xp.equal(ours, theirs), xp.logical_and(xp.isnan(ours), xp.isnan(theirs)))
            if not bool(xp.all(same)):
                raise ValueError("expected partials relative to one extent, that of merge_extents; got two")
    with without_warnings(first.weights):
        for each in others:
            weights, values = (merge_sums(ours, theirs, xp) for ours, theirs in zip(first[:2], each[:2], strict=True))
            first = ExactPartial(weights, values, first.extent)
    return first


def merge_extents(first: Extent, /, *others: Extent, xp: Namespace | None = None) -> Extent:
    """Merge extents of pieces into the extent of all keys, by elementwise maxima.

    Parameters
    ----------
    first, *others : Extent
        Of the same shapes.
    xp : array namespace, optional

    Raises
    ------
    TypeError, ValueError
        When an argument is not an `Extent`, or shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> low, high = (Extent(np.full((1, 1, 3), number), np.full((1, 1, 2), number)) for number in (1.0, 2.0))
    >>> merge_extents(low, high).values
    array([[[2., 2.]]])
    """
    _check_pairs(Extent, (first, *others))
    xp = common_namespace(xp, _numbered(Extent, (first, *others)))
    merged = Extent(*first)
    for other in others:
        merged = merge_two_extents(merged, Extent(*other), xp)
    return merged


def complete_partial(partial: AnyPartial, /, *, dropout: Dropout | None = None, xp: Namespace | None = None) -> Partial:
    """Turn the merged pieces into output and logsumexp.

    Parameters
    ----------
    partial : Partial or ExactPartial
        A `Partial` is returned as it is.
    dropout : Dropout, optional
        The dropout that all pieces were given.
    xp : array namespace, optional

    Returns
    -------
    Partial
        In the compute dtype. Of an `ExactPartial`, float32 with the bits of attention to all keys at once.

    Raises
    ------
    TypeError, ValueError
        When the argument is not a partial.

    Examples
    --------
    >>> import numpy as np
    >>> from attention_core import scaled_dot_product_attention
    >>> from attention_core.pieces import attention_extent, partial_attention
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
        named = _numbered(ExactPartial, (partial,)) | seed_array(dropout)
        xp = common_namespace(xp, named)
        with without_warnings(partial.weights):
            return Partial(*complete_exactly(partial, dropout, xp))
    if not isinstance(partial, Partial) and type(partial) is not tuple:
        raise TypeError(f"expected Partial or ExactPartial; got {type_text(partial)}")
    _check_pairs(Partial, (partial,))
    common_namespace(xp, _numbered(Partial, (partial,)))
    return Partial(*partial)
