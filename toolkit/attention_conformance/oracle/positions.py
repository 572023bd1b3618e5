"""Which query may attend to which key, told position by position from the words of the contract."""

from __future__ import annotations

from collections.abc import Callable
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
    return _KINDS[rule.kind](rule, score, problem)


def _number(rule: Rule, name: str, score: _Score, problem: Problem, default: int | None = None) -> int | None:
    """An argument of a rule: a number as it stands, or the entry of an array along the leading axes."""
    argument: int | str | None = rule.arguments.get(name, default)
    if isinstance(argument, str):
        return int(np.broadcast_to(problem.arrays[argument], problem.sizes[0])[score.entry])
    return argument


def _causal(rule: Rule, score: _Score, problem: Problem) -> bool:
    offset = _number(rule, "offset", score, problem, default=0) or 0
    return score.key <= score.query + offset


def _window(rule: Rule, score: _Score, problem: Problem) -> bool:
    position = score.query + (_number(rule, "offset", score, problem, default=0) or 0)
    left, right = rule.arguments.get("left"), rule.arguments.get("right")
    return (left is None or score.key >= position - left) and (right is None or score.key <= position + right)


def _lengths(rule: Rule, score: _Score, problem: Problem) -> bool:
    length = _number(rule, "lengths", score, problem)
    return length is not None and score.key < length


def _segments(rule: Rule, score: _Score, problem: Problem) -> bool:
    leading, _, rows, columns = problem.sizes
    query_ids = np.broadcast_to(problem.arrays[rule.arguments["query_ids"]], (*leading, rows))
    key_ids = np.broadcast_to(problem.arrays[rule.arguments["key_ids"]], (*leading, columns))
    return bool(query_ids[(*score.entry, score.query)] == key_ids[(*score.entry, score.key)])


def _periodic(rule: Rule, score: _Score, problem: Problem) -> bool:
    entry = int(np.ravel_multi_index(score.entry, problem.sizes[0])) if score.entry else 0
    return (entry + score.head + score.query + score.key) % int(problem.arrays[rule.arguments["period"]]) != 0


def _array(rule: Rule, score: _Score, problem: Problem) -> bool:
    leading, heads, rows, columns = problem.sizes
    mask = np.broadcast_to(problem.arrays[rule.arguments["name"]], (*leading, heads, rows, columns))
    return bool(mask[(*score.entry, score.head, score.query, score.key)])


def _and(rule: Rule, score: _Score, problem: Problem) -> bool:
    return _passes(rule.arguments["first"], score, problem) and _passes(rule.arguments["second"], score, problem)


def _or(rule: Rule, score: _Score, problem: Problem) -> bool:
    return _passes(rule.arguments["first"], score, problem) or _passes(rule.arguments["second"], score, problem)


def _not(rule: Rule, score: _Score, problem: Problem) -> bool:
    return not _passes(rule.arguments["first"], score, problem)


_KINDS: dict[str, Callable[[Rule, _Score, Problem], bool]] = {
    "Causal": _causal,
    "SlidingWindow": _window,
    "KeyLengths": _lengths,
    "Segments": _segments,
    "periodic": _periodic,
    "array": _array,
    "and": _and,
    "or": _or,
    "not": _not,
}
