"""The scores of one block in reproducible arithmetic."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arithmetic.elementary import tanh
from attention_core._arithmetic.exact import to_float64, uncontracted
from attention_core._arrays import Array
from attention_core._attention.blocks.grid import BatchEntry, Grid
from attention_core._attention.blocks.scores import block_context
from attention_core._attention.reproducible.slices import SCORE_UNIT, sliced_scores, unsliced_scores
from attention_core.masks import Positions


class ExactScoreBlock(NamedTuple):
    """A block of scores in units of 256 ln 2, -inf where not allowed, and the slope of a cap."""

    scores: Array
    slope: Array | None
    allowed: Array | None
    at: Positions | None


def exact_score_block(
    tiles: Grid, entry: BatchEntry, query: Array, key: Array, i: Any, j: Any, masked: bool
) -> ExactScoreBlock:
    plan, xp = tiles.plan, tiles.xp
    count = plan.num_slices
    scores = (sliced_scores if count == 2 else unsliced_scores)(query, key, xp)
    at, bias, allowed = block_context(tiles, entry, scores, i, j, masked)
    slope = None
    if plan.softcap is not None:
        bent = tanh(uncontracted(xp.multiply(scores, 1 / plan.softcap), xp), xp)
        slope = xp.subtract(1.0, uncontracted(xp.multiply(bent, bent), xp))
        scores = uncontracted(xp.multiply(bent, plan.softcap * SCORE_UNIT), xp)
    if bias is not None:
        scores = xp.add(scores, uncontracted(xp.multiply(to_float64(bias, xp), SCORE_UNIT), xp))
    if allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)
    return ExactScoreBlock(scores, slope, allowed, at)
