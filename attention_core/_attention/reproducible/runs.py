"""Reproducible attention of some runs of queries to all keys: the bits of the whole, gradients of the keys included."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from attention_core._arrays import Array, shape
from attention_core._attention.blocks.grid import is_broadcast
from attention_core._attention.blocks.plan import Plan, unpack_operands
from attention_core._attention.call import Call
from attention_core._attention.reproducible.backward import Share, backward_of_shares
from attention_core._attention.reproducible.forward import arrange, empty_results, forward
from attention_core._backend import Backend, Operation, register

Arrays = tuple[Array, ...]
QUERY_START = 6  # its place among `Operands`


class RunsPlan(NamedTuple):
    """The plan of runs.

    Attributes
    ----------
    plan : Plan
        Of all queries of this rank, as if they were neighbours.
    counts : tuple of int
        How many queries each run has.
    starts : tuple of int, or None
        The first position of each; ``None`` if the last array holds them.
    group : str
        The ranks that have the other queries.
    """

    plan: Plan
    counts: tuple[int, ...]
    starts: tuple[int, ...] | None
    group: str


def reproducible_runs(call: Call, runs: list[tuple[Any, int]], group: str, num_queries: int) -> tuple[Array, Array]:
    """Output and logsumexp of a call, of whose queries each run has a first position, and which are so many in all."""
    xp = call.xp
    plan, arrays = arrange(call)
    starts: Any = tuple(start for start, _ in runs)
    counts = tuple(count for _, count in runs)
    if not all(isinstance(start, int) for start in starts):
        arrays, starts = (*arrays, xp.stack([xp.astype(start, xp.int32) for start in starts])), None
    whole = RunsPlan(plan._replace(num_queries=num_queries), counts, starts, group)
    output, logsumexp, _ = call.backend.custom_gradient(RUNS, whole, arrays)
    *dims, _ = shape(call.query, xp=xp)
    return xp.reshape(output, (*dims, shape(call.value, xp=xp)[-1])), xp.reshape(logsumexp, tuple(dims))


def _split(plan: RunsPlan, arrays: Arrays) -> list[tuple[Plan, Arrays]]:
    """A plan and arrays for each run."""
    operands, first, pieces = unpack_operands(plan.plan, arrays), 0, []
    for index, count in enumerate(plan.counts):
        rows, bias = slice(first, first + count), operands.bias
        if bias is not None and not is_broadcast(bias, -2):
            bias = bias[..., rows, :]
        one = operands._replace(query=operands.query[..., rows, :], bias=bias)
        if plan.starts is None:
            one = one._replace(query_start=arrays[-1][index])
            present = tuple([is_there or index == QUERY_START for index, is_there in enumerate(plan.plan.present)])
            its = plan.plan._replace(starts=(None, 0), present=present)
        else:
            its = plan.plan._replace(starts=(plan.starts[index], 0))
        pieces.append((its, one.arrays()))
        first += count
    return pieces


def _forward(plan: RunsPlan, arrays: Arrays, backend: Backend) -> Arrays:
    results = [forward(*piece, backend) for piece in _split(plan, arrays)]
    axes = -2, -1, -2
    return tuple(
        backend.namespace.concat(list(x), axis=axis) for x, axis in zip(zip(*results, strict=True), axes, strict=True)
    )


def _backward(
    plan: RunsPlan, arrays: Arrays, results: Arrays, cotangents: Arrays, backend: Backend
) -> tuple[Array | None, ...]:
    xp, first, shares = backend.namespace, 0, []
    for (its, ours), count in zip(_split(plan, arrays), plan.counts, strict=True):
        rows = slice(first, first + count)

        def of_run(x: Arrays, rows: slice = rows) -> Arrays:
            return x[0][..., rows, :], x[1][..., rows], x[2][..., rows, :]

        shares.append(Share(its, ours, of_run(results), of_run(cotangents)))
        first += count
    query, key, value, bias = backward_of_shares(shares, plan.group, backend)
    gradients = [xp.concat(query, axis=-2), key, value]
    if bias is not None:
        is_shared = is_broadcast(unpack_operands(plan.plan, arrays).bias, -2)
        gradients.append(functools.reduce(xp.add, bias) if is_shared else xp.concat(bias, axis=-2))
    return *gradients, *(None for _ in range(plan.plan.num_integers + (plan.starts is None)))


def _empty(plan: RunsPlan, arrays: Arrays, backend: Backend) -> Arrays:
    return empty_results(plan.plan, arrays, backend)


register("RunsPlan", RunsPlan)
RUNS = register("reproducible.runs", Operation(_forward, _backward, _empty, needs_float64=True))
