"""Collectives as operations: each has another one as its gradient, and no library differentiates them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from attention_core._arrays import Array, Gradients, Namespace, cast_to, is_floating, upcast
from attention_core._attention.shards.splits import Place, own, stack_of, whole_of
from attention_core._backend import Backend, Operation, register

Arrays = tuple[Array, ...]
UNDIFFERENTIATED = (
    "expected strategy='merge' of shards, which is for decoding, not to be differentiated; got it so: 'gather' has"
    " gradients"
)


class CollectivePlan(NamedTuple):
    """The plan of a collective, and of how what it moves is put together."""

    group: str
    size: int
    split: str
    axis: int = -2  # along which a gather puts together
    is_summed: bool = False  # whether each rank has the gradient of all that was gathered already
    is_wide: bool = False  # whether 16-bit types leave a gather as float32, so that gradients are summed in it
    to_heads: bool = False  # whether an exchange is one of rows for heads, or back


def gather(
    arrays: Arrays, here: Place, axis: int, backend: Backend, *, is_summed: bool = False, is_wide: bool = False
) -> Arrays:
    """The whole of arrays, shards of which the ranks hold; the gradient is the sum over ranks."""
    plan = CollectivePlan(*here[:2], here.split, axis, is_summed, is_wide)
    return tuple(backend.custom_gradient(GATHER, plan, arrays))


def exchange(arrays: Arrays, here: Place, backend: Backend, *, to_heads: bool) -> Arrays:
    """All rows of the heads of this rank, out of its rows of all heads (..., H, M, D); or the other way round."""
    plan = CollectivePlan(*here[:2], here.split, to_heads=to_heads)
    return tuple(backend.custom_gradient(EXCHANGE, plan, arrays))


def total(x: Array, here: Place, backend: Backend) -> Array:
    """The sum of the arrays of all ranks, which has no gradient."""
    (found,) = backend.custom_gradient(TOTAL, CollectivePlan(*here[:2], here.split), (x,))
    return found


def _gather(plan: CollectivePlan, arrays: Arrays, backend: Backend) -> Arrays:
    xp, lent = backend.namespace, _collectives(backend)
    wholes = (whole_of(lent.all_gather(x, plan.group), plan.axis, plan.split, xp) for x in arrays)
    return tuple(upcast(x, xp=xp) if plan.is_wide else x for x in wholes)


def _scatter(plan: CollectivePlan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Gradients:
    xp, lent = backend.namespace, _collectives(backend)

    def gradient(x: Array, cotangent: Array) -> Array | None:
        if not is_floating(x):
            return None
        stack = stack_of(cotangent, plan.axis, plan.split, plan.size, xp)
        rows = own(stack, lent.rank(plan.group), xp) if plan.is_summed else lent.sum_scatter(stack, plan.group)
        return cast_to(rows, x.dtype, xp=xp)

    return tuple(map(gradient, arrays, cotangents))


def _empty_gather(plan: CollectivePlan, arrays: Arrays, backend: Backend) -> Arrays:
    xp = backend.namespace
    stacks = (xp.zeros_like(xp.stack([x] * plan.size)) for x in arrays)
    wholes = (whole_of(stack, plan.axis, plan.split, xp) for stack in stacks)
    return tuple(upcast(x, xp=xp) if plan.is_wide else x for x in wholes)


def _exchanged(plan: CollectivePlan, arrays: Arrays, backend: Backend, *, is_empty: bool = False) -> Arrays:
    move = (lambda x, _: x) if is_empty else _collectives(backend).exchange
    turn = _rows_for_heads if plan.to_heads else _heads_for_rows
    return tuple(turn(x, plan, move, backend.namespace) for x in arrays)


def _rows_for_heads(x: Array, plan: CollectivePlan, move: Any, xp: Namespace) -> Array:
    *leading, heads, rows, width = x.shape
    at = len(leading)
    chunks = xp.reshape(x, (*leading, plan.size, heads // plan.size, rows, width))
    stack = xp.permute_dims(chunks, (at, *range(at), at + 1, at + 2, at + 3))
    return whole_of(move(stack, plan.group), -2, plan.split, xp)


def _heads_for_rows(x: Array, plan: CollectivePlan, move: Any, xp: Namespace) -> Array:
    stack = move(stack_of(x, -2, plan.split, plan.size, xp), plan.group)
    size, *leading, heads, rows, width = stack.shape
    at = len(leading)
    chunks = xp.permute_dims(stack, (*range(1, at + 1), 0, at + 1, at + 2, at + 3))
    return xp.reshape(chunks, (*leading, size * heads, rows, width))


def _exchange_back(
    plan: CollectivePlan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend
) -> Gradients:
    return _exchanged(plan._replace(to_heads=not plan.to_heads), cotangents, backend)


def _empty_exchange(plan: CollectivePlan, arrays: Arrays, backend: Backend) -> Arrays:
    return _exchanged(plan, arrays, backend, is_empty=True)


def _total(plan: CollectivePlan, arrays: Arrays, backend: Backend) -> Arrays:
    return tuple(_collectives(backend).total(x, plan.group) for x in arrays)


def check_no_gradient(arrays: Iterable[Any], backend: Backend) -> None:
    """Raise if a gradient is known to be computed of what is computed from one of these, if they are arrays."""
    known = backend.has_gradient
    if known is not None and any(known(x) for x in arrays if backend.owns(x)):
        _not_differentiated()


def _not_differentiated(*_: Any) -> Any:
    raise NotImplementedError(UNDIFFERENTIATED)


def _empty_total(plan: CollectivePlan, arrays: Arrays, backend: Backend) -> Arrays:
    return tuple(map(backend.namespace.zeros_like, arrays))


def _collectives(backend: Backend) -> Any:
    return backend.collectives


register("shards.CollectivePlan", CollectivePlan)
GATHER = register("shards.gather", Operation(_gather, _scatter, _empty_gather))
EXCHANGE = register("shards.exchange", Operation(_exchanged, _exchange_back, _empty_exchange))
TOTAL = register("shards.total", Operation(_total, _not_differentiated, _empty_total, refusal=UNDIFFERENTIATED))
