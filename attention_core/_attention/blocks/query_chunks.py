"""Attention in query chunks: a few queries at a time, with all keys within reach of the mask, by a library's softmax.

A softmax of the library makes one pass over the scores; one that is put together of other functions makes several. It
cannot go on from one block of keys to the next, so each chunk takes all of its keys at once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

from attention_core._arithmetic.exact import two_sum
from attention_core._arrays import Array, Namespace, dtype_name, on_device_of
from attention_core._attention.blocks.grid import matmul_per_group
from attention_core._attention.blocks.scores import mask_limit
from attention_core._attention.call import Call, score_change
from attention_core._attention.parts import keys_of
from attention_core.masks import Mask, Positions
from attention_core.masks._band import ALL
from attention_core.masks._mask import band_of

MAX_CHUNKS = 16  # each is a part of the program
MAX_SCORE_BYTES = 2**27  # of the scores of all chunks, which a library may compute side by side


class QueryChunk(NamedTuple):
    """Some queries, and the keys that one of them may attend to."""

    rows: range
    columns: range


def query_chunks(call: Call) -> list[QueryChunk]:
    """The chunks of a call under a mask of ``key - query`` alone, or none if it is not for chunks."""
    changed = score_change(call) is not None or call.bias is not None
    dropped = call.dropout is not None and call.dropout.rate
    if not isinstance(call.mask, Mask) or changed or dropped or call.backend.loops.softmax is None:
        return []
    mask, starts, min_queries = call.mask, call.starts, call.backend.tuning.query_chunk
    query, key, value = call[:3]
    sizes = (*query.shape, *key.shape, *value.shape, *starts)
    if not min_queries or not all(isinstance(size, int) for size in sizes) or not mask.bounds().is_relative:
        return []
    band = band_of(mask)
    if band == ALL:
        return []
    *heads, length, _ = query.shape
    num_keys = key.shape[-2]
    size = max(min_queries, -(-length // MAX_CHUNKS))
    chunks = []
    for first in range(0, length, size):
        rows = range(first, min(first + size, length))
        found = keys_of(band, (starts[0] + rows[0], starts[0] + rows[-1]), starts[1], num_keys)
        begin = min(found.first, num_keys - 1)
        chunks.append(QueryChunk(rows, range(begin, max(found.stop, begin + 1))))  # at least one, attended to or not
    num_scores = math.prod(heads) * sum(len(chunk.rows) * len(chunk.columns) for chunk in chunks)
    itemsize = 8 if dtype_name(query.dtype) == "float64" else 4
    return chunks if num_scores * itemsize <= MAX_SCORE_BYTES else []


def attend_query_chunks(call: Call, chunks: list[QueryChunk]) -> tuple[Array, Array, Array]:
    """The results of `forward`, where neither scores nor averages overflow."""
    xp, dims = call.xp, call.query.shape[:2]
    # No rule of `key - query` looks at batch or head.
    query, key, value = (xp.reshape(x, (-1, *x.shape[2:])) for x in call[:3])
    merged = call._replace(query=query, key=key, value=value)
    of_chunks = zip(*(_attend_chunk(merged, chunk) for chunk in chunks), strict=True)
    output, logsumexp, remainder = (xp.concat(parts, axis=2) for parts in of_chunks)  # the axis of queries
    return tuple(xp.reshape(x, (*dims, *x.shape[1:])) for x in (output, logsumexp, remainder))


def _attend_chunk(call: Call, chunk: QueryChunk) -> tuple[Array, Array, Array]:
    xp, (query, key, value) = call.xp, call[:3]
    rows, columns = (slice(part.start, part.stop) for part in chunk)
    scores = matmul_per_group(query[:, :, rows, :], xp.matrix_transpose(key[:, columns, :]), xp)
    allowed = call.mask.allowed(_positions(chunk, call.starts, query, xp), xp=xp)  # type: ignore[union-attr]
    scores = xp.minimum(scores, mask_limit(allowed, scores, xp))
    weights = cast(Any, call.backend.loops.softmax)(scores)
    output = matmul_per_group(weights, value[:, columns, :], xp)
    # The greatest weight is 1 over the sum of exponentials of differences from the greatest score.
    log_total = xp.negative(xp.log(xp.max(weights, axis=-1)))
    logsumexp, remainder = two_sum(xp.max(scores, axis=-1), log_total, xp)
    has_key = xp.any(allowed, axis=-1)
    output = xp.where(xp.expand_dims(has_key, axis=-1), output, 0.0)
    remainder = xp.where(xp.isnan(remainder), 0.0, remainder)  # of a row without keys, or with a score that is inf
    return output, xp.where(has_key, logsumexp, -math.inf), remainder


def _positions(chunk: QueryChunk, starts: tuple[Any, ...], like: Array, xp: Namespace) -> Positions:
    device = on_device_of(like)
    rows, columns = (
        xp.arange(part.start + start, part.stop + start, dtype=xp.int32, **device)
        for part, start in zip(chunk, starts, strict=True)
    )
    zero = xp.zeros((), dtype=xp.int32, **device)
    return Positions(zero, zero, xp.expand_dims(rows, axis=-1), columns)
