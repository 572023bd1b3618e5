"""Collectives as operations: each has another one as its gradient, and no library differentiates them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from attention_core._arrays import Array, Gradients, cast_to, is_floating, upcast
from attention_core._attention.shards.splits import Place, own, stack_of, whole_of
from attention_core._backend import Backend, Operation, register

Arrays = tuple[Array, ...]
BY_HEADS = -3, "contiguous"
UNDIFFERENTIATED = (
    "expected strategy='merge' of shards, which is for decoding, not to be differentiated; got it so: 'gather' has"
    " gradients"
)


class CollectivePlan(NamedTuple):
    """The plan of a collective, and of how what it moves is cut and put together: each an axis and a split of it."""

    group: str
    size: int
    ways: tuple[tuple[int, str], ...] = ()  # of a gather, that of the whole; of an exchange, those of both sides
    is_summed: bool = False  # whether each rank has the gradient of all that was gathered already
    is_wide: bool = False  # whether 16-bit types leave a gather as float32, so that gradients are summed in it


def gather(
    arrays: Arrays, here: Place, axis: int, backend: Backend, *, is_summed: bool = False, is_wide: bool = False
) -> Arrays:
    """The whole of arrays, shards of which the ranks hold; the gradient is the sum over ranks."""
    plan = CollectivePlan(*here[:2], ((axis, here.split),), is_summed, is_wide)
    return tuple(backend.custom_gradient(GATHER, plan, arrays))


def exchange(arrays: Arrays, here: Place, backend: Backend, *, to_heads: bool) -> Arrays:
    """All rows of the heads of this rank, out of its rows of all heads (..., H, M, D); or the other way round."""
    ways = (BY_HEADS, (-2, here.split)) if to_heads else ((-2, here.split), BY_HEADS)
    return tuple(backend.custom_gradient(EXCHANGE, CollectivePlan(*here[:2], ways), arrays))


def total(x: Array, here: Place, backend: Backend) -> Array:
    """The sum of the arrays of all ranks, which has no gradient."""
    (found,) = backend.custom_gradient(TOTAL, CollectivePlan(*here[:2]), (x,))
    return found


def _gather(plan: CollectivePlan, arrays: Arrays, backend: Backend, *, is_empty: bool = False) -> Arrays:
    xp, lent, (way,) = backend.namespace, _collectives(backend), plan.ways
    stacks = (xp.stack([x] * plan.size) if is_empty else lent.all_gather(x, plan.group) for x in arrays)
    wholes = (whole_of(stack, *way, xp) for stack in stacks)
    return tuple(upcast(x, xp=xp) if plan.is_wide else x for x in wholes)


def _scatter(plan: CollectivePlan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Gradients:
    xp, lent, (way,) = backend.namespace, _collectives(backend), plan.ways

    def gradient(x: Array, cotangent: Array) -> Array | None:
        if not is_floating(x):
            return None
        stack = stack_of(cotangent, *way, plan.size, xp)
        rows = own(stack, lent.rank(plan.group), xp) if plan.is_summed else lent.sum_scatter(stack, plan.group)
        return cast_to(rows, x.dtype, xp=xp)

    return tuple(map(gradient, arrays, cotangents))


def _exchanged(plan: CollectivePlan, arrays: Arrays, backend: Backend, *, is_empty: bool = False) -> Arrays:
    xp, lent, (of_sent, of_received) = backend.namespace, _collectives(backend), plan.ways
    stacks = (stack_of(x, *of_sent, plan.size, xp) for x in arrays)
    moved = (stack if is_empty else lent.exchange(stack, plan.group) for stack in stacks)
    return tuple(whole_of(stack, *of_received, xp) for stack in moved)


def _exchange_back(
    plan: CollectivePlan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend
) -> Gradients:
    return _exchanged(plan._replace(ways=plan.ways[::-1]), cotangents, backend)


def _total(plan: CollectivePlan, arrays: Arrays, backend: Backend, *, is_empty: bool = False) -> Arrays:
    xp, lent = backend.namespace, _collectives(backend)
    return tuple(xp.zeros_like(x) if is_empty else lent.total(x, plan.group) for x in arrays)


def check_no_gradient(arrays: Iterable[Any], backend: Backend) -> None:
    """Raise if a gradient is known to be computed of what is computed from one of these, if they are arrays."""
    known = backend.has_gradient
    if known is not None and any(known(x) for x in arrays if backend.owns(x)):
        _not_differentiated()


def _not_differentiated(*_: Any) -> Any:
    raise NotImplementedError(UNDIFFERENTIATED)


def _collectives(backend: Backend) -> Any:
    return backend.collectives


def _empty(forward: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """The same without a collective, for compilers that ask for shapes alone."""
    return functools.partial(forward, is_empty=True)


register("shards.CollectivePlan", CollectivePlan)
GATHER = register("shards.gather", Operation(_gather, _scatter, _empty(_gather)))
EXCHANGE = register("shards.exchange", Operation(_exchanged, _exchange_back, _empty(_exchanged)))
TOTAL = register("shards.total", Operation(_total, _not_differentiated, _empty(_total), refusal=UNDIFFERENTIATED))
