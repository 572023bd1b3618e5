"""Public functions of sequences that ranks share, and the checks of the option ``shards``."""

from __future__ import annotations

import operator
from typing import Any

from .._arrays import Array, shape_text, sizes, type_text
from .._attention.blocks.plan import pad
from .._attention.parts import Run, taken
from .._attention.shards.splits import SPLITS, Place, Shards, gather, own, stack_of
from .._attention.shards.strategies import STRATEGIES
from .._backend import Backend, array_namespace, backend_for
from .._checks import check_bias, check_choice, check_positive
from ..masks._rules import check_mask


def shard(x: Array, shards: Shards, /, *, axis: int = -2) -> Array:
    """Take the positions of this rank out of an array of all, with zeros behind the last if they are padded.

    Parameters
    ----------
    x : Array, shape (..., L, ...)
        The whole, the same on all ranks: a sequence, labels, position ids, a bias along its queries.
    shards : Shards
        Its ``length`` has to be L, if it is not ``None``.
    axis : int
        Of the positions, counted from the end: negative.

    Returns
    -------
    Array, shape (..., n, ...)
        Of n positions on every rank. R n is L, or the next multiple of R; of 2 R under the zigzag split.

    Raises
    ------
    TypeError, ValueError
        When the group is none, or L is not the length.

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> store = torch.distributed.HashStore()  # doctest: +SKIP
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)  # doctest: +SKIP
    >>> shard(torch.ones(3, 2), Shards(torch.distributed.group.WORLD)).shape  # doctest: +SKIP
    torch.Size([4, 2])
    >>> torch.distributed.destroy_process_group()  # doctest: +SKIP
    """
    here, backend = place_of(shards, x, axis)
    xp, length = backend.namespace, x.shape[axis]
    if shards.length not in (None, length):
        raise ValueError(f"expected {shards.length} positions, the length of shards; got {shape_text(x)}")
    fill = here.padded(length) - length
    return own(stack_of(pad(x, axis, fill, xp), axis, here.split, here.size, xp), here.rank, xp)


def unshard(x: Array, shards: Shards, /, *, axis: int = -2) -> Array:
    """Gather the shards of all ranks into the whole, which each of them gets: the inverse of `shard`.

    Parameters
    ----------
    x : Array, shape (..., n, ...)
    shards : Shards
        With the length of the whole, if `shard` padded it.
    axis : int
        Of the positions, counted from the end: negative.

    Returns
    -------
    Array, shape (..., L, ...)

    Raises
    ------
    TypeError, ValueError
        When the group is none, or the shard has other lengths.

    Notes
    -----
    The gradient is that of the sum of the losses of all ranks. Divide a loss that all of them compute by their number.

    `jax.shard_map` does not see that all ranks get the same. To return the whole from there once, by ``out_specs=P()``,
    give it ``check_vma=False``: then the gradient is that of one loss.
    """
    here, backend = place_of(shards, x, axis)
    length = whole_length("x", x, axis, shards, here)
    (whole,) = gather((x,), here, axis, backend)
    return taken(whole, Run(0, length), axis, backend.namespace)


def shard_positions(x: Array, shards: Shards, /, *, axis: int = -2) -> Array:
    """Count the positions of the rows of a shard in the whole.

    They are those of rotary embeddings, labels and segment ids. Rows that `shard` added have positions from L on.

    Parameters
    ----------
    x : Array, shape (..., n, ...)
        A shard.
    shards : Shards
    axis : int
        Of the positions, counted from the end: negative.

    Returns
    -------
    Array of int32, shape (n,)

    Raises
    ------
    TypeError, ValueError
        When the group is none, or the shard has other lengths.
    """
    here, backend = place_of(shards, x, axis)
    whole_length("x", x, axis, shards, here)
    return here.positions(x.shape[axis], x, backend.namespace)


def place_of(shards: Any, like: Array, axis: int = -2) -> tuple[Place, Backend]:
    """Where this rank is in a group of the library of an array.

    Raises
    ------
    TypeError, ValueError
        When something is wrong with the shards, the group or the axis.
    """
    if not isinstance(shards, Shards):
        raise TypeError(f"expected shards as Shards(group, ...); got {type_text(shards)}")
    check_choice("a split of shards", shards.split, SPLITS)
    check_choice("a strategy of shards", shards.strategy, STRATEGIES)
    if shards.length is not None:
        check_positive("the length of shards", shards.length)
    dims = getattr(like, "shape", None)
    if dims is None or not -len(dims) <= axis < 0 or None in sizes(like):
        got = type_text(like) if dims is None else shape_text(like)
        raise ValueError(f"expected an array of known shape with axis {axis}, counted from the end; got {got}")
    backend = backend_for(like, array_namespace(like))
    lent = backend.collectives
    if lent is None:
        raise TypeError(f"expected shards with arrays of a backend with collectives; got those of {backend.name}")
    group = lent.name_of(shards.group)
    return Place(group, lent.size(group), lent.rank(group), shards.split), backend


def whole_length(name: str, x: Array, axis: int, shards: Shards, here: Place) -> int:
    """The length of the whole of a shard.

    Raises
    ------
    ValueError
        When ranks do not share it out evenly, or it is not that of the shards.
    """
    rows, whole = x.shape[axis], x.shape[axis] * here.size
    length = whole if shards.length is None else shards.length
    padded = here.padded(length)
    if whole != padded:
        raise ValueError(
            f"expected {name} with {padded // here.size} positions on each of {here.size} ranks, of length {length}"
            f" under the {here.split} split; got {rows}: shard(x, shards) pads to it, and Shards(length=...) tells the"
            " length"
        )
    return operator.index(length)  # no symbol of a compiler


def whole_lengths(shards: Shards, here: Place, query: Array, key: Array) -> tuple[int, int]:
    """The numbers of queries and keys of the whole; queries that are to be merged are whole."""
    num_queries = query.shape[-2] if shards.strategy == "merge" else whole_length("query", query, -2, shards, here)
    return num_queries, whole_length("key", key, -2, shards, here)


def check_not_shared(shards: Shards | None, **options: Any) -> None:
    """Raise if a layer is asked with shards for what it does not have then."""
    for name, value in options.items():
        if shards is not None and value is not None:
            raise ValueError(f"expected no {name} of a layer with shards; got some")


def check_shared(query: Array, mask: Any, bias: Any, lengths: Any, heads: int | None = None) -> None:
    """Raise unless a mask is one over the whole, of these lengths, and a bias has the rows of a rank and all keys."""
    *leading, rows, _ = sizes(query)
    dims = leading if heads is None else [*leading, heads]
    if mask is not None:
        check_mask(mask, (*dims, *lengths), query)
    if bias is not None:
        check_bias(bias, query, (*dims, rows, lengths[1]))
