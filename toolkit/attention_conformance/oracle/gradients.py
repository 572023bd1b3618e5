r"""The gradients of attention in decimal arithmetic, from the formulas.

For a loss with the gradient :math:`g` in the output, and weights kept with the factor :math:`r_{ij}` of dropout:

.. math:: \bar v_j = \sum_i r_{ij} p_{ij} g_i, \quad
          \bar p_{ij} = r_{ij} g_i \cdot v_j, \quad
          \bar s_{ij} = p_{ij} \Bigl(\bar p_{ij} - \sum_{j'} p_{ij'} \bar p_{ij'}\Bigr), \quad
          \bar q_i = \sigma \sum_j c_{ij} \bar s_{ij} k_j, \quad
          \bar k_j = \sigma \sum_i c_{ij} \bar s_{ij} q_i

Here, :math:`c_{ij}` is the derivative of the softcap and of the score modification. A parameter of the latter gets the
sum over :math:`\bar s_{ij}` times its own derivative. The sink, of weight :math:`p_i`, gets
:math:`-\sum_i p_i \sum_j p_{ij} \bar p_{ij}`.

The scale of each gradient is the same sum over magnitudes, with the derivative of the softcap taken as 1. A rounding of
the hyperbolic tangent spoils its derivative by as much.
"""

from __future__ import annotations

import decimal
import math

import numpy as np

from attention_conformance.oracle.attention import CONTEXT, ZERO, Exact, Head, Row, decimals, exact, heads, scan, summed
from attention_conformance.problem import NumpyArray, Problem

Parts = dict[str, NumpyArray]


def gradients(problem: Problem) -> dict[str, Exact]:
    """The gradient of ``sum(output * cotangent)`` for every variable of the problem."""
    if problem.cotangent is None:
        raise ValueError("expected a problem with a cotangent; got none")
    leading, count, *_ = problem.sizes
    with decimal.localcontext(CONTEXT):
        cotangents = decimals(problem.cotangent).reshape(math.prod((*leading, count)), *problem.cotangent.shape[-2:])
        grads = [_head(problem, head, cotangent) for head, cotangent in zip(heads(problem), cotangents, strict=True)]
        if not grads:
            return {name: Exact(*[np.zeros(problem.arrays[name].shape)] * 3) for name in problem.variables}
        stacked = {
            name: np.stack([parts[name] for parts in grads]).reshape(*leading, count, *grads[0][name].shape)
            for name in grads[0]
        }
        return {name: _summed(stacked, name, problem.arrays[name].shape) for name in problem.variables}


def _head(problem: Problem, head: Head, cotangent: NumpyArray) -> Parts:
    arrays = {"query": head.query, "key": head.key, "value": head.value, "bias": head.bias, "sinks": np.zeros(())}
    arrays |= {name: problem.arrays[name] for name in problem.variables if name not in arrays}
    parts = {
        name + kind: np.full(array.shape, ZERO, dtype=object) for name, array in arrays.items() for kind in ("", "|")
    }
    for position, row in enumerate(scan(head)):
        if row.live.size:
            _add_row(parts, head, position, row, cotangent=cotangent[position])
    return parts


def _add_row(parts: Parts, head: Head, position: int, row: Row, cotangent: NumpyArray) -> None:
    live, query = row.live, head.query[position]
    keys, values, keep_scale, weights = (
        head.key[live],
        head.value[live],
        head.keep_scale[position, live],
        row.weights[live],
    )
    of_weights, size = keep_scale * (values @ cotangent), keep_scale * (abs(values) @ abs(cotangent))
    parts["sinks"][()] -= row.sink * (weights @ of_weights)
    parts["sinks|"][()] += row.sink * (weights @ size)
    of_scores, size = weights * (of_weights - weights @ of_weights), weights * (size + weights @ size)
    for change, number, magnitude in zip(row.changes, of_scores, size, strict=True):
        for (name, index), derivative in change.derivatives.items():
            parts[name][index] += derivative * number
            parts[name + "|"][index] += abs(derivative) * magnitude
    steepness = np.array([abs(change.derivative) for change in row.changes], dtype=object)
    d_scores, scale = head.scale * row.derivatives * of_scores, abs(head.scale) * steepness * size
    parts["value"][live] += np.outer(keep_scale * weights, cotangent)
    parts["value|"][live] += np.outer(keep_scale * weights, abs(cotangent))
    parts["bias"][position, live] += of_scores
    parts["bias|"][position, live] += size
    parts["query"][position] += d_scores @ keys
    parts["query|"][position] += scale @ abs(keys)
    parts["key"][live] += np.outer(d_scores, query)
    parts["key|"][live] += np.outer(scale, abs(query))


def _summed(parts: Parts, name: str, shape: tuple[int, ...]) -> Exact:
    """Add up what was broadcast, or repeated to several query heads, so that the shape is that of the argument."""
    numbers, sizes = (summed(parts[name + kind], shape) for kind in ("", "|"))
    return exact(list(numbers.ravel()), list(sizes.ravel()), shape)
