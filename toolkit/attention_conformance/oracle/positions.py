"""Which query may attend to which key, told position by position from the words of the contract."""

from __future__ import annotations

import numpy as np

from attention_conformance.problem import NumpyArray, Problem, Rule


def allowed(problem: Problem) -> NumpyArray:
    """Every pair of a query and a key that the mask and ``is_causal`` let through, as booleans (..., H, M, N)."""
    leading, heads, rows, columns = problem.sizes
    through = np.ones((*leading, heads, rows, columns), dtype=bool)
    rules = [problem.mask] if problem.mask else []
    if problem.options.get("is_causal"):
        rules.append(Rule("Causal", {"offset": 0}))
    for rule in rules:
        for at in np.ndindex(through.shape):
            through[at] &= _passes(rule, at, problem)
    return through


def _passes(rule: Rule, at: tuple[int, ...], problem: Problem) -> bool:
    """Whether a rule lets one score through, at a place in the batch, a head, and positions of query and key."""
    leading, heads, rows, columns = problem.sizes
    *batch, head, query, key = at
    entry, told = tuple(batch), rule.arguments

    def number(name: str) -> int:
        """A number as it stands, or the entry of an array along the leading axes; an offset is 0 by default."""
        argument: int | str = told.get(name, 0)
        if isinstance(argument, str):
            return int(np.broadcast_to(problem.arrays[argument], leading)[entry])
        return argument

    match rule.kind:
        case "Causal":
            return key <= query + number("offset")
        case "SlidingWindow":
            position, left, right = query + number("offset"), told.get("left"), told.get("right")
            return (left is None or key >= position - left) and (right is None or key <= position + right)
        case "KeyLengths":
            return key < number("lengths")
        case "Segments":
            query_ids = np.broadcast_to(problem.arrays[told["query_ids"]], (*leading, rows))
            key_ids = np.broadcast_to(problem.arrays[told["key_ids"]], (*leading, columns))
            return bool(query_ids[(*entry, query)] == key_ids[(*entry, key)])
        case "periodic":
            number_of = int(np.ravel_multi_index(entry, leading)) if entry else 0
            return (number_of + head + query + key) % int(problem.arrays[told["period"]]) != 0
        case "array":
            mask = np.broadcast_to(problem.arrays[told["name"]], (*leading, heads, rows, columns))
            return bool(mask[at])
        case "and":
            return _passes(told["first"], at, problem) and _passes(told["second"], at, problem)
        case "or":
            return _passes(told["first"], at, problem) or _passes(told["second"], at, problem)
        case "not":
            return not _passes(told["first"], at, problem)
    raise KeyError(rule.kind)
