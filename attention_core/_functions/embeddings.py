"""Token embeddings."""

from __future__ import annotations

import functools
from typing import Any

from .._arithmetic import ARITHMETICS, check_arithmetic
from .._arrays import Array, Namespace, cast_to, positions, shape, sizes, upcast
from .._backend import as_constant, common_namespace, with_autocast
from .._checks import check_number, check_parameters, check_shapes, check_within
from ..parameters import Embeddings
from ..random import Dropout, check_dropout, seeded
from .normalization import check_channels, norm_shapes, normalized
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
