"""Functions of positions as a user would write them, for masks and scores: for any array library."""

from __future__ import annotations

from typing import Any

from attention_core.backend import array_namespace


def periodic(batch: Any, head: Any, query: Any, key: Any, period: Any) -> Any:
    """Whether a sum of all positions is no multiple of the period."""
    return (batch + head + query + key) % period != 0


def steepened(scores: Any, batch: Any, head: Any, query: Any, key: Any, factor: Any, distance_factor: Any) -> Any:
    """Scores times a factor, plus another times the distance and the head."""
    xp = array_namespace(scores)
    factor, distance_factor, distance = (
        xp.astype(each, scores.dtype) for each in (factor, distance_factor, (key - query) * (head + 1))
    )
    return scores * factor + distance_factor * distance
