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
from ..parts import Run, cut, cut_of, with_cut

MAX_CHUNKS = 16  # each is a part of the program
MAX_SCORE_BYTES = 2**27  # of the scores of all chunks, which a library may compute side by side


def query_chunks(call: Call) -> list[Call]:
    """Parts of a call, each with some queries and the keys that one of them may attend to; none if it is for no chunks.

    Its mask looks at ``key - query`` alone.
    """
    (query, key), min_queries, band = call[:2], call.backend.tuning.query_chunk, band_of(call.mask)
    sizes = (*query.shape, *key.shape, *call.value.shape, *call.starts)
    is_plain = call.bias is None and call.softcap is None and call.score_mod is None and call.dropout is None
    if call.backend.loops.softmax is None or not (min_queries and is_plain and bounds_of(call.mask).is_relative):
        return []
    if band == ALL or 0 in sizes[:-2] or not all(isinstance(size, int) for size in sizes):
        return []
    length, size = query.shape[-2], max(min_queries, -(-query.shape[-2] // MAX_CHUNKS))
    parts = [cut(call, rows=Run(first, min(size, length - first))) for first in range(0, length, size)]
    parts = [with_cut(part, cut_of(part, [band])) for part in parts]
    num_scores = sum(math.prod(part.query.shape[:-1]) * part.key.shape[-2] for part in parts)
    itemsize = 8 if dtype_name(query.dtype) == "float64" else 4
    return parts if num_scores * itemsize <= MAX_SCORE_BYTES else []


def attend_query_chunks(parts: list[Call]) -> Any:
    """The results of `forward` of parts of a call of five axes, where neither scores nor averages overflow."""
    xp, (batch, heads, group, _, width) = parts[0].xp, parts[0].query.shape
    queries = [xp.reshape(part.query, (batch, heads * group, part.query.shape[-2], width)) for part in parts]
    pairs = zip(parts, queries, strict=True)
    parts = [part._replace(query=query, scale=1.0, assume_finite=True) for part, query in pairs]
    found = [dense(part, facts_of(part), weights=False) for part in parts]

    def join(arrays: list[Array]) -> Array:
        joined = xp.concat(arrays, axis=2)  # the axis of queries
        return xp.reshape(joined, (batch, heads, group, *joined.shape[2:]))

    output, _, *numbers = map(list, zip(*found, strict=True))
    return join(output), *map(join, numbers)
