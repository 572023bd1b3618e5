"""Collectives as operations: each has another one as its gradient, and no library differentiates them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..._arrays import Array, Gradients, cast_to, is_floating, upcast
from ..._backend import Backend, Operation, register
from .splits import Place, own, stack_of, whole_of

Arrays = tuple[Array, ...]
UNDIFFERENTIATED = (
    "expected strategy='merge' of shards, which is for decoding, not to be differentiated; got it so: 'gather' has"
    " gradients"
)


Way = tuple[int, str]  # how shards make a whole: along an axis, by a split
BY_HEADS: Way = (-3, "contiguous")


class Move(NamedTuple):
    """The plan of a collective, between what is cut for it and what is put together of it."""

    collective: str  # a member of `Collectives`; or "own", what a rank has of its own
    back: str  # that of gradients
    group: str
    size: int
    sent: Way | None = None  # how what is sent is cut for all ranks
    received: Way | None = None  # how what they sent is put together
    is_wide: bool = False  # whether 16-bit types end as float32, so that gradients are summed in it


def gather(
    arrays: Arrays, here: Place, axis: int, backend: Backend, *, is_summed: bool = False, is_wide: bool = False
) -> Arrays:
    """The whole of arrays, shards of which the ranks hold; the gradient is the sum over ranks, or each has that."""
    back, whole = "own" if is_summed else "sum_scatter", (axis, here.split)
    return tuple(backend.custom_gradient(MOVE, Move("all_gather", back, *here[:2], None, whole, is_wide), arrays))


def exchange(arrays: Arrays, here: Place, backend: Backend, *, to_heads: bool) -> Arrays:
    """All rows of the heads of this rank, out of its rows of all heads (..., H, M, D); or the other way round."""
    ways = (BY_HEADS, (-2, here.split)) if to_heads else ((-2, here.split), BY_HEADS)
    return tuple(backend.custom_gradient(MOVE, Move("exchange", "exchange", *here[:2], *ways), arrays))


def total(x: Array, here: Place, backend: Backend) -> Array:
    """The sum of the arrays of all ranks, which has no gradient."""
    (found,) = backend.custom_gradient(TOTAL, Move("total", "", *here[:2]), (x,))
    return found


def _moved(plan: Move, arrays: Arrays, backend: Backend, *, is_empty: bool = False) -> Arrays:
    xp, lent = backend.namespace, backend.collectives

    def moved(x: Array) -> Array:
        x = x if plan.sent is None else stack_of(x, *plan.sent, plan.size, xp)
        if is_empty:
            x = xp.stack([x] * plan.size) if plan.collective == "all_gather" else xp.zeros_like(x)
        elif plan.collective == "own":
            x = own(x, lent.rank(plan.group), xp)  # type: ignore[union-attr]
        else:
            x = getattr(lent, plan.collective)(x, plan.group)
        x = x if plan.received is None else whole_of(x, *plan.received, xp)
        return upcast(x, xp=xp) if plan.is_wide else x

    return tuple(map(moved, arrays))


def _moved_back(plan: Move, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Gradients:
    back = plan._replace(collective=plan.back, sent=plan.received, received=plan.sent, is_wide=False)

    def gradient(x: Array, cotangent: Array) -> Array | None:
        return (
            cast_to(_moved(back, (cotangent,), backend)[0], x.dtype, xp=backend.namespace) if is_floating(x) else None
        )

    return tuple(map(gradient, arrays, cotangents))


def check_no_gradient(arrays: Iterable[Any], backend: Backend) -> None:
    """Raise if a gradient is known to be computed of what is computed from one of these, if they are arrays."""
    known = backend.has_gradient
    if known is not None and any(known(x) for x in arrays if backend.owns(x)):
        _not_differentiated()


def _not_differentiated(*_: Any) -> Any:
    raise NotImplementedError(UNDIFFERENTIATED)


_empty = functools.partial(_moved, is_empty=True)  # for compilers that ask for shapes alone
register("shards.Move", Move)
MOVE = register("shards.move", Operation(_moved, _moved_back, _empty))
TOTAL = register("shards.total", Operation(_moved, _not_differentiated, _empty, refusal=UNDIFFERENTIATED))
