"""Attention to pieces of the keys, each on its own, and the results merged.

What does not fit raises `TypeError` or `ValueError`, as in `scaled_dot_product_attention`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Unpack

from ._arrays import Array, Namespace, type_text
from ._attention.softmax import merge_pieces, with_remainder
from ._attention.ways import logsumexp_way, run_call
from ._backend import common_namespace, with_autocast, without_warnings
from ._checks import check_shapes, check_start, once_per_signature
from ._functions.attention import make_call
from ._functions.options import FLAGS, Options, options_but
from ._keywords import publish

__all__ = ["Partial", "merge_partials", "partial_attention"]


@with_autocast(options=options_but(*FLAGS[1:], "sinks", "shards"))
def partial_attention(
    query: Array,
    key: Array,
    value: Array,
    /,
    *,
    query_start: int | Array = 0,
    key_start: int | Array = 0,
    **options: Unpack[Options],
) -> Partial:
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
    is_causal, scale, softcap, score_mod, dropout, assume_finite, xp
        As in `scaled_dot_product_attention`; positions are those in the whole.
    implementation : {"auto", "dense", "blockwise"}
    arithmetic : {"fast", "reproducible"}
        With ``"reproducible"``, the result has the bits of attention to these keys. A merge rounds again, so it does
        not have the bits of the whole; ``shards`` with the strategy ``"merge"`` do.

    Returns
    -------
    Partial
        Output, logsumexp and its remainder in the compute dtype, so that 16-bit types are rounded only after merging.

    Raises
    ------
    TypeError, ValueError
        As in `scaled_dot_product_attention`.

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
    implementation = settled["implementation"]
    if implementation == "auto":
        implementation = logsumexp_way(call).kind
    result = run_call(call, implementation, logsumexp=True)
    return Partial(result.output, result.logsumexp, result.remainder)


class Partial(NamedTuple):
    """Attention to some of the keys: output (..., H, M, E) and logsumexp (..., H, M), in the compute dtype.

    ``(0, -inf)`` is attention to no keys. The remainder (..., H, M) is what rounding took from the logsumexp. Without
    it, a logsumexp of 10,000 in float32 is wrong by up to 0.0005, and so are its shares; kernels give none. What is
    merged has one: begin a compiled loop with zeros for it.
    """

    output: Array
    logsumexp: Array
    remainder: Array | None = None


def merge_partials(first: Partial, /, *others: Partial, xp: Namespace | None = None) -> Partial:
    r"""Merge attention to some keys with attention to other keys into attention to all of them.

    .. math:: \ell = \log \sum_n e^{\ell_n}, \qquad o = \sum_n e^{\ell_n - \ell} o_n

    Each :math:`\ell` is a logsumexp and its remainder together.

    The operation is associative and commutative, and attention to no keys is its neutral element, (0, -inf).
    This holds up to rounding.

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
        When an argument is not a partial, or shapes or dtypes differ.

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
    partials = tuple(map(_as_partial, (first, *others)))
    xp = _check_partials(output=partials[0].output, partials=partials, xp=xp)
    with without_warnings(partials[0].output):
        return functools.reduce(functools.partial(_merge_two, xp=xp), partials)


def _merge_two(first: Partial, second: Partial, *, xp: Namespace) -> Partial:
    pairs = zip(with_remainder(first, xp), with_remainder(second, xp), strict=True)
    return Partial(*merge_pieces(*(xp.stack(pair) for pair in pairs), xp=xp))


def _as_partial(each: Any) -> Partial:
    if not isinstance(each, Partial) and (type(each) is not tuple or len(each) not in (2, len(Partial._fields))):
        raise TypeError(f"expected Partial({', '.join(Partial._fields)}); got {type_text(each)}")
    return Partial(*each)


_PARTIAL = (
    "{0}.output: ... H M E floating like {1}.output, {0}.logsumexp: ... H M like {1}.logsumexp,"
    " {0}.remainder: optional ... H M like {1}.logsumexp"
)


@once_per_signature
def _check_partials(*, output: Any, partials: tuple[Partial, ...], xp: Any) -> Namespace:
    """Raise unless the arrays of all partials have the dtypes and shapes of the first; return the namespace."""
    named = {f"Partial[{index}]": partial for index, partial in enumerate(partials)}
    xp = common_namespace(xp, named)
    check_shapes(", ".join(_PARTIAL.format(name, "Partial[0]") for name in named), named)
    return xp


publish(vars(), __all__)
