r"""The definition of attention in decimal arithmetic of 50 digits, one query at a time.

.. math:: o_i = \sum_j p_{ij} v_j, \qquad p_{ij} = \frac{\exp s_{ij}}{\exp t + \sum_{j'} \exp s_{ij'}}, \qquad
          s_{ij} = f(\operatorname{cap}(\sigma\, q_i \cdot k_j)) + b_{ij}

where f is a function of score and positions, and t the score of the head's sink, if there are any.

Floating-point numbers become decimal ones exactly, and nothing here is shared with the core. Arrays hold Python
objects: NumPy only loops over `decimal`.
"""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any, NamedTuple

import numpy as np

from attention_conformance.oracle.changes import Change, changed
from attention_conformance.oracle.hashing import keep_pattern
from attention_conformance.oracle.positions import allowed
from attention_conformance.problem import NumpyArray, Problem

CONTEXT = Context(prec=50, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])  # no traps: inf - inf is nan, as in IEEE arithmetic
ZERO, ONE, INFINITY, NAN = Decimal(0), Decimal(1), Decimal("Infinity"), Decimal("NaN")


class Exact(NamedTuple):
    """Numbers as unevaluated sums of two floats, and the scale against which an error in each is measured."""

    high: NumpyArray
    low: NumpyArray
    scale: NumpyArray


@dataclass(frozen=True)
class Truth:
    r"""What a call must give.

    Attributes
    ----------
    arrays : dict of str to Exact
        By name. Of ``output``, (..., H, M, E), the scale is :math:`S_{ie} = \sum_j p_{ij} |v_{je}|`. That of
        ``weights``, (..., H, M, N), before dropout, is the weight itself, and that of ``logsumexp``, (..., H, M), is
        :math:`1 + \kappa_i`. Gradients go by the names of the arguments.
    kappa : float
        The largest :math:`\kappa_i = \max_j |f'| \sigma \sum_d |q_{id} k_{jd}| + |f - f' s| + |b_{ij}|` over the keys
        that are attended to, and the sink.
    """

    arrays: dict[str, Exact]
    kappa: float


@dataclass(frozen=True)
class Head:
    """One head of one entry: decimal numbers in all arrays but the two boolean ones."""

    query: NumpyArray  # (M, D)
    key: NumpyArray  # (N, D)
    value: NumpyArray  # (N, E)
    through: NumpyArray  # (M, N), what mask and causality let through
    bias: NumpyArray  # (M, N)
    keep_scale: NumpyArray  # (M, N), by which dropout multiplies the weights
    scale: Decimal
    softcap: Decimal | None
    change: Callable[[int, int, Decimal], Change]  # of query position, key position and capped score
    sink: Decimal | None


@dataclass(frozen=True)
class Row:
    """One query: its weights, and what is needed to differentiate them."""

    live: NumpyArray  # positions of the keys that are attended
    weights: NumpyArray  # over all keys, before dropout
    logsumexp: Decimal
    kappa: Decimal
    derivatives: NumpyArray  # of the changed score in the scaled score, over live keys
    changes: list[Change]  # of live keys
    sink: Decimal  # its weight


def attention(problem: Problem) -> Truth:
    """Compute output, weights and logsumexp of a problem."""
    with decimal.localcontext(CONTEXT):
        leading, count, length, columns = problem.sizes
        shape = (*leading, count, length)
        rows = [(head, position, row) for head in heads(problem) for position, row in enumerate(scan(head))]
        mixed = [_average(head, position, row) for head, position, row in rows]
        weights = [row.weights for *_, row in rows]
        width = problem.arrays["value"].shape[-1]
        kappas = [row.kappa for *_, row in rows]
        arrays = {
            "output": exact([mean for mean, _ in mixed], [size for _, size in mixed], (*shape, width)),
            "weights": exact(weights, weights, (*shape, columns)),
            "logsumexp": exact([row.logsumexp for *_, row in rows], [ONE + kappa for kappa in kappas], shape),
        }
        return Truth(arrays, float(max(kappas, default=ZERO)))


def heads(problem: Problem) -> Iterator[Head]:
    """Every head of every entry; key and value heads are repeated in order, once for every query head they serve."""
    leading, count, rows, columns = problem.sizes
    arrays, options = problem.arrays, problem.options
    full = (*leading, count, rows, columns)
    scale, softcap = options.get("scale"), options.get("softcap")
    sigma = ONE / Decimal(arrays["query"].shape[-1]).sqrt() if scale is None else Decimal(scale)
    cap = None if softcap is None else Decimal(softcap)
    shared = {name: np.repeat(arrays[name], count // arrays[name].shape[-3], axis=-3) for name in ("key", "value")}
    numbers = (arrays["query"], shared["key"], shared["value"], np.broadcast_to(arrays.get("bias", np.zeros(())), full))
    through, keep_scale = allowed(problem), _keep_scale(problem, full)
    matrices = (
        each.reshape(math.prod(full[:-2]), *each.shape[-2:]) for each in (*map(decimals, numbers), through, keep_scale)
    )
    sinks = decimals(arrays["sinks"]) if "sinks" in arrays else None
    for (*entry, head), q, k, v, b, t, g in zip(np.ndindex(*full[:-2]), *matrices, strict=True):
        change = functools.partial(changed, problem, tuple(entry), head)
        sink = None if sinks is None else sinks[head]
        yield Head(
            query=q, key=k, value=v, bias=b, through=t, keep_scale=g, scale=sigma, softcap=cap, change=change, sink=sink
        )


def scan(head: Head) -> Iterator[Row]:
    """Every query of a head."""
    finite = np.array([all(x.is_finite() for x in key) for key in head.key], dtype=bool)
    for position, (query, through, bias) in enumerate(zip(head.query, head.through, head.bias, strict=True)):
        live = np.flatnonzero(through & (bias != -INFINITY))
        if not live.size:
            none = Row(live, _fill(through, ZERO), -INFINITY, ZERO, derivatives=live, changes=[], sink=ZERO)
            sink = head.sink
            yield none if sink is None else replace(none, logsumexp=sink, kappa=abs(sink), sink=ONE)
        elif all(x.is_finite() for x in query) and finite[live].all():
            yield _row(head, position, live)
        else:
            unknown = [Change(NAN, NAN, NAN, {})] * live.size
            yield Row(live, _choose(through, NAN, ZERO), NAN, ZERO, derivatives=live, changes=unknown, sink=NAN)


def _row(head: Head, position: int, live: NumpyArray) -> Row:
    keys, query, bias = head.key[live], head.query[position], head.bias[position, live]
    capped, derivatives = _cap(head.scale * (keys @ query), head.softcap)
    changes = [head.change(position, int(column), score) for column, score in zip(live, capped, strict=True)]
    scores, steepness, sizes = (np.array(each, dtype=object) for each in list(zip(*changes, strict=True))[:3])
    scores = scores + bias
    sink = -INFINITY if head.sink is None else head.sink
    top = max(*scores, sink)  # the exponents of decimal numbers are vast, but exp(-3e38) is beyond them
    powers, power = np.exp(scores - top), (sink - top).exp()
    total = powers.sum() + power
    weights = _fill(head.bias[position], ZERO)
    weights[live] = powers / total
    kappa = (abs(steepness * head.scale) * (abs(keys) @ abs(query)) + sizes + abs(bias)).max()
    kappa = kappa if head.sink is None else max(kappa, abs(sink))
    return Row(
        live, weights, top + total.ln(), kappa, derivatives=derivatives * steepness, changes=changes, sink=power / total
    )


def _cap(scores: NumpyArray, softcap: Decimal | None) -> tuple[NumpyArray, NumpyArray]:
    """Cap scores smoothly, ``c tanh(s / c)``, and return the derivatives as well."""
    if softcap is None:
        return scores, _fill(scores, ONE)
    grown = np.exp(scores * 2 / softcap)
    fractions = (grown - 1) / (grown + 1)
    return softcap * fractions, 1 - fractions * fractions


def _average(head: Head, position: int, row: Row) -> tuple[NumpyArray, NumpyArray]:
    """For every channel the average over live keys, and its scale: the same average of magnitudes."""
    if not row.live.size:
        nothing = _fill(head.value[:0].sum(axis=0), ZERO)
        return nothing, nothing
    kept, value = (row.weights * head.keep_scale[position])[row.live], head.value[row.live]
    return kept @ value, kept @ abs(value)


def _keep_scale(problem: Problem, full: tuple[int, ...]) -> NumpyArray:
    dropout = problem.options.get("dropout")
    if dropout is None:
        return np.full(full, ONE, dtype=object)
    return _choose(keep_pattern(dropout, full), ONE / (ONE - Decimal(dropout.rate)), ZERO)


def decimals(array: NumpyArray) -> NumpyArray:
    """The same numbers, exactly, as decimal ones."""
    return np.array(np.frompyfunc(Decimal, 1, 1)(array.astype(np.float64).astype(object)), dtype=object)


def _choose(condition: NumpyArray, yes: Any, no: Any) -> NumpyArray:
    return np.asarray(np.where(condition, yes, no))


def _fill(like: NumpyArray, number: Decimal) -> NumpyArray:
    return np.full(like.shape, number, dtype=object)


def exact(
    numbers: list[NumpyArray] | list[Decimal], scales: list[NumpyArray] | list[Decimal], shape: tuple[int, ...]
) -> Exact:
    """Decimal numbers as arrays of the given shape."""
    flat = np.array(numbers, dtype=object).reshape(shape)
    high = flat.astype(np.float64)
    with np.errstate(invalid="ignore"):
        rest = flat - decimals(high)
    low = _choose(np.isfinite(high), rest, ZERO).astype(np.float64)
    return Exact(high, low, np.array(scales, dtype=object).reshape(shape).astype(np.float64))


def summed(array: NumpyArray, shape: tuple[int, ...]) -> NumpyArray:
    """Add up what was broadcast, or repeated in order, so that the shape is that of the argument."""
    wanted = (1,) * (array.ndim - len(shape)) + shape
    parts = [size for have, want in zip(array.shape, wanted, strict=True) for size in (want, have // max(want, 1))]
    return np.asarray(array.reshape(parts).sum(axis=tuple(range(1, 2 * array.ndim, 2)))).reshape(shape)
