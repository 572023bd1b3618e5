"""Token embeddings, and rotary embeddings of positions, with angles that stay exact at large positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .._arithmetic import ARITHMETICS, check_arithmetic
from .._arithmetic.angles import Rotation
from .._arrays import Array, Namespace, cast_to, positions, shape, sizes, type_text, upcast
from .._backend import as_constant, common_namespace, with_autocast
from .._checks import (
    check_flags,
    check_number,
    check_parameters,
    check_positive,
    check_shapes,
    check_within,
    number_text,
    once_per_signature,
    only_array,
    plain_integer,
)
from ..parameters import DecoderLayer, Embeddings
from ..random import Dropout, check_dropout, seeded
from .channels import check_channels, norm_shapes, normalized
from .options import arrays_of


@with_autocast(position=1, lowers=False)
def embed_tokens(
    parameters: Embeddings,
    token_ids: Array,
    /,
    *,
    position_ids: Array | None = None,
    segment_ids: Array | None = None,
    epsilon: float = 1e-12,
    dropout: Dropout | None = None,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
    r"""Embed tokens: add up the rows of their tokens, positions and segments, and normalize.

    .. math:: y_l = \operatorname{layer\_norm}(T_{t_l} + P_{p_l} + S_{s_l})

    Parameters
    ----------
    parameters : Embeddings
    token_ids : Array of int, shape (..., L)
    position_ids : Array of int, broadcastable to (..., L), optional
        By default 0, 1, …, L - 1.
    segment_ids : Array of int, broadcastable to (..., L), optional
        By default 0, if there is a table of segments.
    epsilon : float
        Of the normalization.
    dropout : Dropout, optional
        Applied to the result.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., L, C)
        Of the dtype of the tables.

    Raises
    ------
    TypeError
        When ids are not integers, or dtypes differ.
    ValueError
        When shapes do not fit, or an id has no row in its table (if ids can be read).

    References
    ----------
    J. Devlin et al., "BERT", 2018.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import Embeddings
    >>> tables = Embeddings(token=xp.asarray([[1.0], [2.0]]), position=xp.asarray([[10.0], [20.0]]))
    >>> embed_tokens(tables, xp.asarray([1, 1]))
    Array([[12.],
           [22.]], dtype=array_api_strict.float64)
    """
    check_parameters("embeddings", parameters, Embeddings)
    tables = parameters.token, parameters.position, parameters.segment
    token_ids, position_ids, segment_ids = (
        as_constant(ids, parameters.token) for ids in (token_ids, position_ids, segment_ids)
    )
    ids = {"token_ids": token_ids, "position_ids": position_ids, "segment_ids": segment_ids}
    xp = common_namespace(xp, {**ids, "embeddings": parameters, **arrays_of({"dropout": dropout})})
    check_arithmetic(arithmetic, "token", parameters.token)
    _check_embeddings(parameters, ids, epsilon, dropout)
    dropout = seeded(dropout, token_ids, xp)
    if position_ids is None:
        position_ids = positions(shape(token_ids, xp=xp)[-1], token_ids, xp=xp)
    if segment_ids is None and parameters.segment is not None:
        segment_ids = xp.zeros_like(token_ids)
    dtype = parameters.token.dtype
    maps = ARITHMETICS[arithmetic]
    dims, rows = shape(token_ids, xp=xp), (token_ids, position_ids, segment_ids)
    found = [
        maps.lookup(upcast(table, xp=xp), ids, dims, xp=xp)
        for table, ids in zip(tables, rows, strict=True)
        if table is not None
    ]
    x = functools.reduce(functools.partial(maps.add, xp=xp), found)
    if parameters.norm is not None:
        x = normalized(x, upcast(parameters.norm, xp=xp), epsilon=epsilon, ops=maps, xp=xp)
    return cast_to(maps.drop(x, dropout, xp=xp), dtype, xp=xp)


_TABLES = (
    "token: entries C floating, position: positions C floating like token,"
    " segment: optional segments C floating like token"
)
_IDS = "token_ids: ... L integer, position_ids: optional to ... L integer, segment_ids: optional to ... L integer"


def _check_embeddings(parameters: Embeddings, ids: dict[str, Any], epsilon: float, dropout: Dropout | None) -> None:
    """Raise unless tables and ids fit together, each id has a row (if it can be read), and numbers are valid."""
    norm = parameters.norm
    lines = _TABLES if norm is None else f"{_TABLES}, {norm_shapes('norm', norm, 'C', 'token')}"
    known = check_shapes(lines, parameters._asdict())
    if norm is not None:
        check_channels("token", known["C"])
        check_number("epsilon", epsilon, positive=True)
    if dropout is not None:
        check_dropout(dropout)
    length, rows, segment_ids = check_shapes(_IDS, ids)["L"], known["positions"], ids["segment_ids"]
    if segment_ids is None and known.get("segments") == 0:
        raise ValueError("expected a table of segments with at least one entry; got none")
    if ids["position_ids"] is None and length is not None and rows is not None and length > rows:
        raise ValueError(f"expected at most {rows} tokens, the positions there are; got {length}")
    if segment_ids is not None and parameters.segment is None:
        raise ValueError("expected no segment_ids without a table of segments; got some")
    for (name, found), table in zip(ids.items(), parameters[:3], strict=False):
        check_rows(name, found, table)


def check_rows(name: str, ids: Array | None, table: Array | None) -> None:
    """Raise unless integers have rows in a table, where they can be read."""
    if ids is not None and table is not None and (rows := sizes(table)[0]) is not None and 0 not in sizes(ids):
        check_within(name, ids, rows - 1)


@with_autocast(lowers=False)
def rotary_embedding(
    x: Array,
    positions: Array,
    /,
    *,
    base: float = 10000.0,
    interleaved: bool = False,
    width: int | None = None,
    divisors: tuple[float, ...] | None = None,
    arithmetic: str = "fast",
    xp: Namespace | None = None,
) -> Array:
    r"""Rotate pairs of channels by angles that grow with the position, so that scores depend on distances.

    .. math::

        (y_a, y_b) = (x_a \cos\phi - x_b \sin\phi,\; x_b \cos\phi + x_a \sin\phi), \qquad
        \phi = p\, \theta^{-2i/W} / d_i, \qquad i = 0, …, W/2 - 1

    Pair i is :math:`(a, b) = (i, i + W/2)`, as in GPT-NeoX and Llama; or, interleaved, :math:`(2i, 2i + 1)`, as in
    RoFormer and GPT-J.

    Parameters
    ----------
    x : Array, shape (..., H, L, D)
        Query or key heads. 16-bit types are computed in float32 and rounded once.
    positions : Array of int, broadcastable to (..., L)
        p, below :math:`2^{31}` in magnitude; the same for all heads.
    base : float
        :math:`\theta`, at least 1.
    interleaved : bool
        Whether the channels of a pair are neighbours.
    width : int, optional
        W, even: the first W channels are rotated and the others kept; by default all.
    divisors : tuple of float, optional
        :math:`d_0, …, d_{W/2-1}`, positive; by default 1. All alike divide the positions, as models of longer contexts
        do; Llama 3.1 and YaRN divide low frequencies alone.
    arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., H, L, D)
        Of the dtype of ``x``.

    Notes
    -----
    Angles are computed in fixed point, in turns modulo one, so that large positions lose no accuracy. The measured
    error is at most 2.1 ulps of the length of a pair, at all valid positions. Nor are frequencies rounded to float64.
    Computing the angle in float32, as is common, gives cosines that are off by 3e-3 at position 2**17, and by 2e-2 at
    position 2**20.

    In reproducible arithmetic more than 99 % of the float32 results are correctly rounded, at all positions. If one
    channel of a pair is not finite, both are NaN.

    References
    ----------
    J. Su et al., "RoFormer", 2021. S. Black et al., "GPT-NeoX-20B", 2022, for ``width``. B. Peng et
    al., "YaRN", 2023, for ``divisors``.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> turned = rotary_embedding(xp.asarray([[[1.0, 0.0]]]), xp.asarray([1]))  # by one radian
    >>> [round(float(turned[0, 0, channel]), 4) for channel in (0, 1)]
    [0.5403, 0.8415]
    """
    positions = as_constant(positions, x)
    options: dict[str, Any] = {"base": base, "interleaved": interleaved, "width": width, "divisors": divisors}
    xp, width = _check_call(x=x, positions=positions, arithmetic=arithmetic, xp=xp, **options)
    places = xp.reshape(positions, (1,)) if not len(positions.shape) else positions
    places = xp.expand_dims(xp.expand_dims(xp.astype(places, xp.int32), axis=-2), axis=-1)
    heads = upcast(x, xp=xp)
    plan = Rotation(float(base), width, bool(interleaved), divisors)
    rotate = ARITHMETICS[arithmetic].rotation(plan, places, heads, xp=xp)
    return cast_to(rotate(heads), x.dtype, xp=xp)


def rotations_of(
    layers: tuple[DecoderLayer, ...], like: Array, positions: Array, settled: dict[str, Any], xp: Namespace
) -> dict[int, Callable[[Array], Array]]:
    """What rotates heads by positions (..., L), for each width of the layers' heads: layers share cosines and sines."""
    base, first, divisors, interleaved = (plain_integer(settled.pop(name)) for name in ROTARY)
    if base is None:
        return {}
    widths = {layer.attention.query.weight.shape[1] // settled["num_heads"] for layer in layers}
    places = xp.expand_dims(xp.expand_dims(positions, axis=-2), axis=-1)
    plans = {width: Rotation(float(base), first or width, bool(interleaved), divisors) for width in widths}
    ops = ARITHMETICS[settled["arithmetic"]]
    return {width: ops.rotation(plan, places, like, xp=xp) for width, plan in plans.items()}


ROTARY = ("rotary_base", "rotary_width", "rotary_divisors", "interleaved")
_ROTATED = "x: ... H L D floating, positions: to ... L integer on x"


@once_per_signature
def _check_call(*, x: Array, positions: Array, arithmetic: Any, xp: Any, **options: Any) -> tuple[Namespace, int]:
    """Raise unless the arguments are valid; return the namespace, and the number of channels to rotate."""
    xp = common_namespace(xp, {"x": x, "positions": positions})
    known = check_shapes(_ROTATED, {"x": x, "positions": positions})
    check_arithmetic(arithmetic, "x", x)
    return xp, check_rotation(known["D"], **options, of="")


def check_rotation(
    channels: int | None, base: Any, width: Any, divisors: Any, interleaved: Any, *, of: str = "rotary_"
) -> int:
    """Raise unless heads of so many channels can be rotated by these options; return how many channels are.

    A message names options as a layer does, or without what they are ``of``.
    """
    if channels is None:
        raise ValueError("expected vectors of a known width, to rotate them; got some of an unknown one")
    check_flags(interleaved=interleaved)
    if only_array(base) is not None:
        raise TypeError(f"expected {of}base as a Python number; got {type(base).__name__}")
    check_number(f"{of}base", base)
    if base < 1:
        raise ValueError(f"expected {of}base >= 1; got {number_text(base)}")
    rotated: int = channels if width is None else check_positive(f"{of}width", width)
    if rotated % 2 or rotated > channels:
        hint = f": {of}width=... rotates some of them" if width is None else ""
        raise ValueError(f"expected an even {of}width of at most {channels} channels; got {rotated}{hint}")
    if divisors is not None:
        check_divisors(f"{of}divisors", divisors)
        if len(divisors) != (pairs := rotated // 2):
            raise ValueError(f"expected {pairs} {of}divisors, one for each pair of channels; got {len(divisors)}")
    return rotated


def check_divisors(name: str, divisors: Any) -> None:
    """Raise unless divisors of frequencies are a tuple of positive numbers."""
    if not isinstance(divisors, tuple):
        raise TypeError(f"expected {name} as a tuple of numbers; got {type_text(divisors)}")
    for index, divisor in enumerate(divisors):
        if hasattr(divisor, "dtype"):
            raise TypeError(f"expected {name} as Python numbers; got {type(divisor).__name__}")
        check_number(f"{name}[{index}]", divisor, positive=True)
