"""NumPy, and the naive formula."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention_benchmark.candidate import Call
from attention_benchmark.frameworks import Engine
from attention_benchmark.problem import Problem
from attention_numpy import backend

engine = Engine(backend)


def naive(problem: Problem) -> Call:
    """Prepare the formula with all scores in memory, the rows of a group in one product."""
    keys, allowed = (slice(None), problem.allowed()) if problem.is_causal else problem.cut()
    scale = problem.arrays[0].dtype.type(problem.shape[3] ** -0.5)
    sinks = None if problem.sinks is None else problem.sinks[:, None, None]

    def function(query: Any, key: Any, value: Any, *mask: Any) -> Any:
        folded = query.reshape(*key.shape[:2], -1, query.shape[-1])
        scores = folded @ key[:, :, keys].swapaxes(-1, -2) * scale
        scores = scores.reshape(*query.shape[:3], -1)
        if mask:
            scores = np.where(mask[0], scores, -np.inf)
        greatest = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            greatest = np.maximum(greatest, sinks)
        weights = np.exp(scores - greatest)
        total = weights.sum(axis=-1, keepdims=True)
        weights /= total if sinks is None else total + np.exp(sinks - greatest)
        return (weights.reshape(*folded.shape[:3], -1) @ value[:, :, keys]).reshape(*query.shape[:3], -1)

    return Call(function, problem.arrays, () if allowed is None else (allowed,))
