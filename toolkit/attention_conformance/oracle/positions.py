"""Which query may attend to which key, told position by position from the words of the contract."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention_conformance.problem import NumpyArray, Problem, Rule


@dataclass(frozen=True)
class _Score:
    """The indices of one score: batch, head, query position and key position."""

    entry: tuple[int, ...]
    head: int
    query: int
    key: int


def allowed(problem: Problem) -> NumpyArray:
    """Every pair of a query and a key that the mask and ``is_causal`` let through, as booleans (..., H, M, N)."""
    leading, heads, rows, columns = problem.sizes
    through = np.ones((*leading, heads, rows, columns), dtype=bool)
    rules = [problem.mask] if problem.mask else []
    if problem.options.get("is_causal"):
        rules.append(Rule("Causal", {"offset": 0}))
    for rule in rules:
        for *entry, head, query, key in np.ndindex(through.shape):
            score = _Score(tuple(entry), head, query, key)
            through[(*entry, head, query, key)] &= _passes(rule, score, problem)
    return through


def _passes(rule: Rule, score: _Score, problem: Problem) -> bool:
    leading, heads, rows, columns = problem.sizes
    told = rule.arguments

    def number(name: str) -> int:
        """A number as it stands, or the entry of an array along the leading axes; an offset is 0 by default."""
        argument: int | str = told.get(name, 0)
        if isinstance(argument, str):
            return int(np.broadcast_to(problem.arrays[argument], leading)[score.entry])
        return argument

    match rule.kind:
        case "Causal":
            return score.key <= score.query + number("offset")
        case "SlidingWindow":
            position, left, right = score.query + number("offset"), told.get("left"), told.get("right")
            return (left is None or score.key >= position - left) and (right is None or score.key <= position + right)
        case "KeyLengths":
            return score.key < number("lengths")
        case "Segments":
            query_ids = np.broadcast_to(problem.arrays[told["query_ids"]], (*leading, rows))
            key_ids = np.broadcast_to(problem.arrays[told["key_ids"]], (*leading, columns))
            return bool(query_ids[(*score.entry, score.query)] == key_ids[(*score.entry, score.key)])
        case "periodic":
            entry = int(np.ravel_multi_index(score.entry, leading)) if score.entry else 0
            return (entry + score.head + score.query + score.key) % int(problem.arrays[told["period"]]) != 0
        case "array":
            mask = np.broadcast_to(problem.arrays[told["name"]], (*leading, heads, rows, columns))
            return bool(mask[(*score.entry, score.head, score.query, score.key)])
        case "and":
            return _passes(told["first"], score, problem) and _passes(told["second"], score, problem)
        case "or":
            return _passes(told["first"], score, problem) or _passes(told["second"], score, problem)
        case "not":
            return not _passes(told["first"], score, problem)
    raise KeyError(rule.kind)
