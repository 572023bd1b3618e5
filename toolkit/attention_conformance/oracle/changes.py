"""What becomes of a score by its position, computed number by number from the words of the contract."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from attention_conformance.problem import Problem, Rule

ZERO, ONE = Decimal(0), Decimal(1)


class Change(NamedTuple):
    """A changed score.

    Attributes
    ----------
    score : Decimal
    derivative : Decimal
        In the score as it was.
    size : Decimal
        The magnitude of what was added.
    derivatives : mapping
        In elements of arrays, by name of the array and place in it.
    """

    score: Decimal
    derivative: Decimal
    size: Decimal
    derivatives: Mapping[tuple[str, tuple[int, ...]], Decimal]


def changed(problem: Problem, entry: tuple[int, ...], head: int, query: int, key: int, score: Decimal) -> Change:
    """The score of one query and one key after the problem's ``score_mod``."""
    rule = problem.score_mod
    if rule is None:
        return Change(score, ONE, ZERO, {})
    offset = rule.arguments.get("offset", 0)
    if isinstance(offset, str):
        offset = int(np.broadcast_to(problem.arrays[offset], problem.sizes[0])[entry])
    return _KINDS[rule.kind](rule, problem, head, query + offset, key, score)


def _alibi(rule: Rule, problem: Problem, head: int, query: int, key: int, score: Decimal) -> Change:
    """Rates of 2^(-8/H), 2^(-16/H), …; those of 2^(-4/P), 2^(-12/P), … where P = H of the rates are spent."""
    count = rule.arguments["num_heads"]
    power = 2 ** math.floor(math.log2(count))
    exponent = Decimal(-8 * (head + 1)) / power if head < power else Decimal(-4 * (2 * (head - power) + 1)) / power
    fall = Decimal(2) ** exponent * abs(key - query)
    return Change(score - fall, ONE, fall, {})


def _relative_bias(rule: Rule, problem: Problem, head: int, query: int, key: int, score: Decimal) -> Change:
    name = rule.arguments["table"]
    table = problem.arrays[name]
    settings = rule.arguments
    index = (bucket(key - query, table.shape[0], settings["max_distance"], settings.get("bidirectional", True)), head)
    added = Decimal(float(table[index]))
    return Change(score + added, ONE, abs(added), {(name, index): ONE})


def bucket(distance: int, buckets: int, farthest: int, bidirectional: bool = True) -> int:
    """The bucket of a distance: of both directions the second half is for keys after the query, of one the first."""
    half, steps = (buckets // 2, abs(distance)) if bidirectional else (buckets, max(0, -distance))
    exact, after = half // 2, half if distance > 0 and bidirectional else 0
    if steps < exact:
        return after + steps
    share = (Decimal(steps) / exact).ln() / (Decimal(farthest) / exact).ln()
    nearly = ((half - exact) * share).quantize(Decimal("1e-20"))  # a logarithm that is whole comes out whole
    return after + min(half - 1, exact + int(nearly.to_integral_value(decimal.ROUND_FLOOR)))


def _steepened(rule: Rule, problem: Problem, head: int, query: int, key: int, score: Decimal) -> Change:
    names = rule.arguments["factor"], rule.arguments["distance_factor"]
    factor, distance_factor = (Decimal(float(problem.arrays[name])) for name in names)
    distance = Decimal((key - query) * (head + 1))
    derivatives: dict[tuple[str, tuple[int, ...]], Decimal] = {(names[0], ()): score, (names[1], ()): distance}
    shift = distance_factor * distance
    return Change(score * factor + shift, factor, abs(shift), derivatives)


_KINDS: dict[str, Callable[[Rule, Problem, int, int, int, Decimal], Change]] = {
    "alibi": _alibi,
    "relative_bias": _relative_bias,
    "steepened": _steepened,
}
