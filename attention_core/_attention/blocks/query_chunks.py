"""Attention in query chunks: a few queries at a time, with all keys within reach of the mask, by the definition.

A softmax of the library makes one pass over the scores; one that is put together of other functions makes several. It
cannot go on from one block of keys to the next, so each chunk takes all of its keys at once.
"""

from __future__ import annotations

import math
from typing import Any

from ..._arrays import Array, dtype_name
from ...masks._band import ALL
from ...masks._mask import band_of, bounds_of
from ..call import Call
from ..dense import dense
from ..facts import facts_of
from ..parts import Run, cut, keys_of

MAX_CHUNKS = 16  # each is a part of the program
MAX_SCORE_BYTES = 2**27  # of the scores of all chunks, which a library may compute side by side


def query_chunks(call: Call) -> list[tuple[Run, Run]]:
    """Runs of queries, each with the keys that one of them may attend to; none if the call is not for chunks.

    Its mask looks at ``key - query`` alone.
    """
    (query, key), starts, min_queries = call[:2], call.starts, call.backend.tuning.query_chunk
    sizes = (*query.shape, *key.shape, *call.value.shape, *starts)
    is_plain = call.bias is None and call.softcap is None and call.score_mod is None and call.dropout is None
    if call.backend.loops.softmax is None or not (min_queries and is_plain and bounds_of(call.mask).is_relative):
        return []
    band = band_of(call.mask)
    if band == ALL or 0 in sizes[:-2] or not all(isinstance(size, int) for size in sizes):
        return []
    *heads, length, _ = query.shape
    num_keys, size, chunks = key.shape[-2], max(min_queries, -(-length // MAX_CHUNKS)), []
    for first in range(0, length, size):
        rows = Run(first, min(size, length - first))
        found = keys_of(band, (starts[0] + first, starts[0] + first + rows.size - 1), starts[1], num_keys)
        begin = min(found.first, num_keys - 1)
        chunks.append((rows, Run(begin, max(found.stop - begin, 1))))  # at least one, attended to or not
    num_scores = math.prod(heads) * sum(rows.size * columns.size for rows, columns in chunks)
    itemsize = 8 if dtype_name(query.dtype) == "float64" else 4
    return chunks if num_scores * itemsize <= MAX_SCORE_BYTES else []


def attend_query_chunks(call: Call, chunks: list[tuple[Run, Run]]) -> Any:
    """The results of `forward`, where neither scores nor averages overflow."""
    xp, (batch, heads, group, rows, width) = call.xp, call.query.shape
    flat = call._replace(
        query=xp.reshape(call.query, (batch, heads * group, rows, width)), scale=1.0, assume_finite=True
    )
    parts = [cut(flat, rows=rows, columns=columns) for rows, columns in chunks]
    found = [dense(part, facts_of(part), weights=False) for part in parts]

    def join(arrays: list[Array]) -> Array:
        joined = xp.concat(arrays, axis=2)  # the axis of queries
        return xp.reshape(joined, (batch, heads, group, *joined.shape[2:]))

    output, _, *numbers = map(list, zip(*found, strict=True))
    return join(output), *map(join, numbers)
