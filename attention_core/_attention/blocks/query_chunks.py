"""Attention over strips: a few queries at a time, with all keys within reach of the mask, by one softmax of a library.

A library's own softmax takes one pass over scores, where one that is put together takes several; but it cannot go on
from one block of keys to the next.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

from attention_core._arrays import Array, dtype_name, on_device_of
from attention_core._attention.blocks.plan import Operands, Plan
from attention_core._attention.blocks.scores import mask_limit, matmul_per_group
from attention_core._backend import Backend
from attention_core.masks import Positions, unflatten

MAX_CHUNKS = 16  # each is a part of the program
MAX_SCORE_BYTES = 2**27  # of the scores of all strips, which a library may compute side by side


class QueryChunk(NamedTuple):
    """Which queries, and the keys that one of them may attend."""

    rows: range
    columns: range


def query_chunks(plan: Plan, operands: Operands, backend: Backend) -> list[QueryChunk]:
    """The strips of a call under a mask of `key - query` alone, or none if the call is not for strips."""
    least, starts = backend.tuning.strip, cast(Any, plan.starts)
    if not least or plan.mask is None or plan.dropout_rate or None in starts:
        return []
    if not all(isinstance(dim, int) for array in operands[:3] for dim in array.shape):
        return []
    *heads, length, _ = operands.query.shape
    number = operands.key.shape[-2]
    rule = unflatten(plan.mask, operands.mask)
    low, high = rule.reach()
    size = max(least, -(-length // MAX_CHUNKS))
    if not rule.is_relative() or low == -high == -math.inf:
        return []
    ahead = starts[0] - starts[1]  # of the first query before the first key
    strips = []
    for first in range(0, length, size):
        rows = range(first, min(first + size, length))
        begin = int(min(max(0, rows[0] + ahead + low), number - 1))
        end = int(max(min(number, rows[-1] + ahead + high + 1), begin + 1))  # at least one key, attended or not
        strips.append(QueryChunk(rows, range(begin, end)))
    scores = math.prod(heads) * sum(len(strip.rows) * len(strip.columns) for strip in strips)
    size_of_one = 8 if dtype_name(operands.query.dtype) == "float64" else 4
    return strips if scores * size_of_one <= MAX_SCORE_BYTES else []


def attend_query_chunks(
    plan: Plan, operands: Operands, backend: Backend, strips: list[QueryChunk]
) -> tuple[Array, Array]:
    """Output (B, G, R, M, E) and logsumexp (B, G, R, M), where neither scores nor averages overflow."""
    xp = backend.namespace
    query, key, value = (xp.reshape(x, (-1, *x.shape[2:])) for x in operands[:3])  # no rule looks at entry or head
    rule, softmax, starts = (
        unflatten(plan.mask, operands.mask),
        cast(Any, backend.loops.softmax),
        cast(Any, plan.starts),
    )
    zero = xp.zeros((), dtype=xp.int32, **on_device_of(query))

    def attend(strip: QueryChunk) -> tuple[Array, Array]:
        rows, columns = (slice(part.start, part.stop) for part in strip)
        scores = matmul_per_group(query[:, :, rows, :], xp.matrix_transpose(key[:, columns, :]), xp)
        of_rows, of_columns = (
            xp.arange(part.start + start, part.stop + start, dtype=xp.int32, **on_device_of(query))
            for part, start in zip(strip, starts, strict=True)
        )
        allowed = rule.allowed(Positions(zero, zero, xp.expand_dims(of_rows, axis=-1), of_columns), xp=xp)
        scores = xp.minimum(scores, mask_limit(allowed, scores, xp))
        weights = softmax(scores)
        output = matmul_per_group(weights, value[:, columns, :], xp)
        # The greatest weight is 1 over the sum of exponentials of differences from the greatest score.
        normalizer = xp.subtract(xp.max(scores, axis=-1), xp.log(xp.max(weights, axis=-1)))
        alive = xp.any(allowed, axis=-1)
        return xp.where(xp.expand_dims(alive, axis=-1), output, 0.0), xp.where(alive, normalizer, -math.inf)

    outputs, normalizers = zip(*map(attend, strips), strict=True)
    entries = operands.query.shape[:2]
    found = xp.concat(outputs, axis=-2), xp.concat(normalizers, axis=-1)
    return tuple(xp.reshape(x, (*entries, *x.shape[1:])) for x in found)
