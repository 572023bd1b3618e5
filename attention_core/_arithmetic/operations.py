"""Operations in reproducible arithmetic, made of plain formulas in float64 that are rounded once to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attention_core._arithmetic.exact import round_to_float32, to_float64
from attention_core._arrays import Array, Namespace, is_floating
from attention_core._backend import Backend, Operation, backend_for, register

Arrays = tuple[Array, ...]


class Constants(NamedTuple):
    """The plan of an operation: one number, or none."""

    number: Any = None


register("Constants", Constants)


def run(operation: Operation, plan: tuple[Any, ...], *arrays: Array, xp: Namespace) -> Arrays:
    """The results of an operation, by the backend of its arrays."""
    return tuple(backend_for(arrays[0], xp).custom_gradient(operation, plan, arrays))


def _like_first(xp: Namespace, plan: Any, x: Array, *_: Array) -> Array:
    return xp.zeros_like(x)


def rounded_once(
    name: str,
    forward: Callable[..., Array],
    backward: Callable[..., tuple[Array | None, ...]],
    *,
    abstract: Callable[..., Array] = _like_first,
    raw_forward: bool = False,
) -> Operation:
    """Register an operation with one result, made of plain formulas in float64. Saved programs know it by its name.

    ``forward(xp, plan, *arrays)`` returns the result. ``backward(xp, plan, d_output, *arrays)`` returns a gradient for
    each array, ``None`` for integers. ``abstract`` is like ``forward``, for the shape of the result alone; by default
    the result has that of the first array. With ``raw_forward``, ``forward`` takes float32 arrays and returns one.
    Elements that it only copies then stay as they are, even subnormal ones.
    """

    def as_float64(arrays: Arrays, xp: Namespace) -> Arrays:
        return tuple(to_float64(array, xp) if is_floating(array) else array for array in arrays)

    def run_forward(plan: Any, arrays: Arrays, backend: Backend) -> Arrays:
        xp = backend.namespace
        if raw_forward:
            return (forward(xp, plan, *arrays),)
        return (round_to_float32(forward(xp, plan, *as_float64(arrays, xp)), xp),)

    def run_backward(
        plan: Any, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend
    ) -> tuple[Array | None, ...]:
        xp = backend.namespace
        gradients = backward(xp, plan, *as_float64((cotangents[0], *arrays), xp))
        return tuple(None if gradient is None else round_to_float32(gradient, xp) for gradient in gradients)

    def run_abstract(plan: Any, arrays: Arrays, backend: Backend) -> Arrays:
        return (abstract(backend.namespace, plan, *arrays),)

    return register(name, Operation(run_forward, run_backward, run_abstract, needs_float64=True))
