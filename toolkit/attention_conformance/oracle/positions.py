"""Which query may attend to which key, read from the words of the contract."""

from __future__ import annotations

import numpy as np

from attention_conformance.problem import NumpyArray, Problem, Rule


def allowed(problem: Problem) -> NumpyArray:
    """Every pair of a query and a key that the mask and ``is_causal`` let through, as booleans (..., H, M, N)."""
    leading, heads, rows, columns = problem.sizes
    rules = [problem.mask] if problem.mask else []
    if problem.options.get("is_causal"):
        rules.append(Rule("Causal", {"offset": 0}))
    through = np.ones((*leading, heads, rows, columns), dtype=bool)
    for rule in rules:
        through &= passes(rule, problem)
    return through


def passes(rule: Rule, problem: Problem) -> NumpyArray:
    """Whether a rule lets scores through: booleans that are broadcast to (..., H, M, N)."""
    leading, heads, rows, columns = problem.sizes
    query, key = np.arange(rows)[:, None], np.arange(columns)
    args = rule.arguments

    def number(name: str) -> NumpyArray | int:
        """A number as it stands, or one for each entry along the leading axes; an offset is 0 by default."""
        argument: int | str = args.get(name, 0)
        if isinstance(argument, str):
            return np.broadcast_to(problem.arrays[argument], leading)[..., None, None, None]
        return argument

    match rule.kind:
        case "Causal":
            through = key <= query + number("offset")
            if not isinstance(args.get("offset"), str):
                return through
        case "SlidingWindow":
            position, left, right = query + number("offset"), args.get("left"), args.get("right")
            after = True if left is None else key >= position - left
            through = np.asarray(after & (True if right is None else key <= position + right))
        case "KeyLengths":
            return key < number("lengths")
        case "Segments":
            query_ids = np.broadcast_to(problem.arrays[args["query_ids"]], (*leading, rows))
            key_ids = np.broadcast_to(problem.arrays[args["key_ids"]], (*leading, columns))
            through = (query_ids[..., :, None] == key_ids[..., None, :])[..., None, :, :]
        case "periodic":
            entries = np.arange(np.prod(leading, dtype=int)).reshape(*leading, 1, 1, 1)
            through = (entries + np.arange(heads)[:, None, None] + query + key) % problem.arrays[args["period"]] != 0
        case "array":
            return problem.arrays[args["name"]]
        case "and":
            return passes(args["first"], problem) & passes(args["second"], problem)
        case "or":
            return passes(args["first"], problem) | passes(args["second"], problem)
        case "not":
            return ~passes(args["first"], problem)
        case _:
            raise KeyError(rule.kind)
    return np.broadcast_to(through, (*leading, heads, rows, columns))
