"""Operations in reproducible arithmetic, made of plain formulas in float64 that are rounded once to float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .._arrays import Array, Arrays, Gradients, Namespace, is_floating
from .._backend import Backend, Operation, backend_for, register, runs_at_once
from .exact import round_to_float32, to_float64


class Constants(NamedTuple):
    """The plan of an operation: one number, or none."""

    number: Any = None


register("Constants", Constants)


def run(operation: Operation, plan: tuple[Any, ...], *arrays: Array, xp: Namespace) -> Arrays:
    """The results of an operation, by the backend of its arrays."""
    return tuple(backend_for(arrays[0], xp).custom_gradient(operation, plan, arrays))


BLOCK = 2**16  # elements of rows that are computed together: a few arrays of float64 stay in a cache


def in_row_blocks(
    compute: Callable[..., Array], rows: Arrays, *, width: int = 0, block: int | None = None, xp: Namespace
) -> Array:
    """The result of ``compute(*rows)``, which maps each row (..., C) by itself, a few of them at a time.

    All arrays have the same leading axes. Where a library computes at once, temporaries then stay in a cache, and their
    memory is used again. The rows of a block have ``block`` elements, or so many that are ``width`` wide.
    """
    first = rows[0]
    if not first.shape or not runs_at_once(first):
        return compute(*rows)
    *leading, last = first.shape
    num_rows, size = math.prod(leading), max(1, (BLOCK if block is None else block) // max(width, last, 1))
    count = -(-num_rows // size)
    if count < 2:
        return compute(*rows)
    size = -(-num_rows // count)
    flat = [xp.reshape(x, (num_rows, x.shape[-1])) for x in rows]
    cuts = [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    blocks = [compute(*(x[cut, :] for x in flat)) for cut in cuts]
    return xp.reshape(xp.concat(blocks, axis=0), (*leading, blocks[0].shape[-1]))


def _like_first(xp: Namespace, plan: Any, x: Array, *_: Array) -> Array:
    return xp.zeros_like(x)


def rounded_once(
    name: str,
    forward: Callable[..., Array],
    backward: Callable[..., Gradients],
    *,
    abstract: Callable[..., Array] = _like_first,
    raw_forward: bool = False,
    num_rows: int = 0,
) -> Operation:
    """Register an operation with one result, made of plain formulas in float64. Saved programs know it by its name.

    ``forward(xp, plan, *arrays)`` returns the result. ``backward(xp, plan, d_output, *arrays)`` returns a gradient for
    each array, ``None`` for integers. ``abstract`` is like ``forward``, for the shape of the result alone; by default
    the result has that of the first array. With ``raw_forward``, ``forward`` takes float32 arrays and returns one.
    Elements that it only copies then stay as they are, even subnormal ones. ``num_rows`` says how many of the first
    arrays `in_row_blocks` may cut, if ``forward`` computes each of their rows by itself.
    """

    def as_float64(arrays: Arrays, xp: Namespace) -> Arrays:
        return tuple(to_float64(array, xp) if is_floating(array) else array for array in arrays)

    def run_forward(plan: Any, arrays: Arrays, backend: Backend) -> Arrays:
        xp, others = backend.namespace, arrays[num_rows:]

        def compute(*rows: Array) -> Array:
            if raw_forward:
                return forward(xp, plan, *rows, *others)
            return round_to_float32(forward(xp, plan, *as_float64((*rows, *others), xp)), xp)

        return (in_row_blocks(compute, arrays[:num_rows], xp=xp) if num_rows else compute(),)

    def run_backward(plan: Any, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend) -> Gradients:
        xp = backend.namespace
        gradients = backward(xp, plan, *as_float64((cotangents[0], *arrays), xp))
        return tuple(None if gradient is None else round_to_float32(gradient, xp) for gradient in gradients)

    def run_abstract(plan: Any, arrays: Arrays, backend: Backend) -> Arrays:
        return (abstract(backend.namespace, plan, *arrays),)

    return register(name, Operation(run_forward, run_backward, run_abstract, needs_float64=True))


def applied(
    name: str,
    forward: Callable[..., Array],
    backward: Callable[..., Gradients],
    *,
    has_number: bool = False,
    **more: Any,
) -> Callable[..., Array]:
    """The function of arrays, perhaps of a constant number after them, that is an operation of `rounded_once`."""
    operation = rounded_once(name, forward, backward, **more)

    def apply(*arguments: Any, xp: Namespace) -> Array:
        arrays, plan = (arguments[:-1], Constants(arguments[-1])) if has_number else (arguments, Constants())
        return run(operation, plan, *arrays, xp=xp)[0]

    return apply
