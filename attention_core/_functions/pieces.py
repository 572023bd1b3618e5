"""Attention to pieces of the keys, and merging them into attention to all keys."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Unpack

from .._arrays import (
    Array,
    Namespace,
    dtype_name,
    dtypes_differ,
    shape_text,
    shapes_differ,
    sizes,
    type_text,
)
from .._attention.softmax import merge_pieces, with_remainder
from .._attention.ways import dense_advantage, run_call
from .._backend import common_namespace, with_autocast, without_warnings
from .._checks import check_start
from .attention import make_call
from .options import FLAGS, Options, options_but


@with_autocast(options=options_but(*FLAGS[1:], "sinks", "assume_finite", "shards"))
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
    is_causal, scale, softcap, score_mod, dropout, xp
        As in `scaled_dot_product_attention`; positions are those in the whole.
    implementation : {"auto", "dense", "blockwise"}
    arithmetic : {"fast", "reproducible"}
        With ``"reproducible"``, the bits of attention to these keys. Merged with others, they are rounded again, so
        they do not have the bits of the whole: ranks of ``shards`` with the strategy ``"merge"`` have.

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
    if implementation == "auto":  # few kernels return the logsumexp
        implementation = "dense" if dense_advantage(call) else "blockwise"
    result = run_call(call, implementation, weights=False, logsumexp=True)
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
    _check_partials((first, *others))
    named = {f"Partial[{index}]": Partial(*each) for index, each in enumerate((first, *others))}
    xp = common_namespace(xp, named)
    with without_warnings(first[0]):
        return functools.reduce(functools.partial(_merge_two, xp=xp), (Partial(*each) for each in (first, *others)))


def _merge_two(first: Partial, second: Partial, *, xp: Namespace) -> Partial:
    pairs = zip(with_remainder(first, xp), with_remainder(second, xp), strict=True)
    return Partial(*merge_pieces(*(xp.stack(pair) for pair in pairs), xp=xp))


def _check_partials(partials: tuple[Any, ...]) -> None:
    fields = Partial._fields
    for partial in partials:
        if not isinstance(partial, Partial) and (type(partial) is not tuple or len(partial) not in (2, len(fields))):
            raise TypeError(f"expected Partial({', '.join(fields)}); got {type_text(partial)}")
    _check_alike(fields[:2], tuple(partial[:2] for partial in partials))
    remainders = ((x,) for partial in partials for x in partial[2:] if x is not None)
    _check_alike(("remainder",), ((partials[0][1],), *remainders))
    output, logsumexp = partials[0][:2]
    if shapes_differ(sizes(logsumexp), sizes(output)[:-1]):
        raise ValueError(
            f"expected the logsumexp of a Partial (..., H, M) to match its output {shape_text(output)}; got"
            f" {shape_text(logsumexp)}"
        )


def _check_alike(names: tuple[str, ...], tuples: tuple[Any, ...]) -> None:
    """Raise unless the arrays of all tuples have the dtypes and shapes of the first."""
    for name, model in zip(names, tuples[0], strict=True):
        if not hasattr(model, "dtype"):
            raise TypeError(f"expected the {name} of all partials as arrays; got {type(model).__name__}")
    for each in tuples:
        for name, array, model in zip(names, each, tuples[0], strict=True):
            if not hasattr(array, "dtype") or dtypes_differ(array, model):
                got = dtype_name(array.dtype) if hasattr(array, "dtype") else type(array).__name__
                expected = dtype_name(model.dtype)
                raise TypeError(f"expected the {name} of all partials of one dtype, {expected}; got {got}")
            if shapes_differ(sizes(array), sizes(model)):
                raise ValueError(f"expected the {name} of all partials {shape_text(model)}; got {shape_text(array)}")
