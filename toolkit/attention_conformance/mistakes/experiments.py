"""Why an answer is wrong, found by asking again: without a setting, or with values that show the weights."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from attention_conformance.cases.case import Draw
from attention_conformance.cases.kernels import KERNELS
from attention_conformance.launch.fit import fit, meant
from attention_conformance.measure.finding import CONVENTION, WRONG, Finding
from attention_conformance.measure.measures import drawn
from attention_conformance.measure.properties import positioned, taken
from attention_conformance.measure.question import Question
from attention_conformance.measure.where import Worst
from attention_conformance.mistakes.former import CALL, STRIDES
from attention_conformance.mistakes.variants import (
    TABLES,
    Ask,
    Change,
    Variant,
    cause,
    keys_left,
    shifted_from,
    unscaled,
)
from attention_conformance.oracle.dense import Dense, answer, dense_of
from attention_conformance.oracle.positions import passes
from attention_conformance.problem import NARROW, NumpyArray, Problem

Predicts = Callable[[Variant], bool]

UNLIKE = {
    "shuffled": "unlike-shuffled",
    "hidden": "unlike-hidden",
    "parts": "unlike-parts",
    "again": "unlike-again",
    "overwritten": "unlike-rewritten",
}
"""What is wrong where one call is right, by the measure of several."""

MORE, LESS = "counts more than the keys, as where padding or a sink adds to it", "lacks keys, or does not divide"

AVERAGE = next(case for case in KERNELS if case.name == "average-32768")
MOST_UNITS = 3.0
"""Units of 16 bits within which an average of one sign is."""

ALIKE = 0.02
"""How far ratios of weights that are right lie apart, in 16 bits."""

SHARES: tuple[tuple[str, ...], ...] = (("key",), ("key", "value"), ("value",))
"""Arrays whose rows may be read at the wrong place."""

PARTS = (64, 128, 256, 512, 1024)
"""Keys in a block."""

MERGES: tuple[tuple[str, Any, float], ...] = (
    ("unscaled-parts", np.maximum, 1.0), ("equal-parts", np.add, 1.0),
    ("parts-of-another-base", np.add, 1 - 1 / math.log(2)), ("parts-of-another-base", np.add, 1 - math.log(2)),
)  # fmt: skip
"""How parts are merged wrongly: what they are divided by, and the power of it."""

CAUSE = ("variant", "says", "line", "equals", "rejected")


def is_exact(name: str) -> bool:
    """Whether a cause gives the numbers that were wrong, and not their kind alone."""
    return bool(name) and name not in TABLES["experiments"]


def simplest(question: Question, judge: Callable[[Question], Finding]) -> tuple[Finding | None, Variant | None, bool]:
    """The result of a simpler question that is wrong, too, or what is wrong as a simpler one is right.

    The last says whether the same is right in float32, where it is asked for in 16 bits.
    """
    is_wide_right = False
    for name, other, variant in _simpler(question):
        known, key = question.kernel.known, (name, other.case.name, other.case.measure, other.dtype, other.seed)
        if key not in known:
            known[key] = judge(replace(other, power=False))
        result = known[key]
        if result.verdict in (*WRONG, CONVENTION, "accepted"):
            return result, None, False
        if result.verdict == "right" and variant is not None:
            return None, variant, is_wide_right
        is_wide_right = is_wide_right or result.verdict == "right"
    return None, None, is_wide_right


def _simpler(question: Question) -> Iterator[tuple[str, Question, Variant | None]]:
    """The question without one of its settings, and what that setting is called where the rest is right."""
    case, inputs = question.case, question.case.inputs
    if question.dtype in NARROW and question.narrow_is_habit:
        yield "wide", replace(question, dtype="float32"), None
    if case.measure in UNLIKE:
        yield "relation", replace(question, case=replace(case, measure="ulp")), cause(UNLIKE[case.measure])
    kinds = set(drawn(question).memory.values()) - {"contiguous", "query"}
    if kinds and not case.memory:
        plain = replace(case, inputs=lambda draw: inputs(draw).changed(memory={}))
        yield "memory", replace(question, case=plain), STRIDES
    if case.before is not None:
        yield "before", replace(question, case=replace(case, before=None)), CALL


def has_narrow_sums(question: Question, judge: Callable[[Question], Finding]) -> bool:
    """Whether an average of many values of one sign, with as many channels, is off by more than its rounding."""
    width = drawn(question).arrays["query"].shape[-1]

    def of_width(draw: Draw) -> Problem:
        problem = AVERAGE.inputs(draw)
        arrays = {name: each[..., np.arange(width) % each.shape[-1]] for name, each in problem.arrays.items()}
        return problem.changed(arrays=arrays)

    known, key = question.kernel.known, (AVERAGE.name, question.dtype, width)
    if key not in known:
        average = replace(AVERAGE, inputs=of_width)
        known[key] = judge(replace(question, case=average, power=False, causes=False))
    return bool(known[key].verdict == "silently wrong" and known[key].error > MOST_UNITS)


def read(question: Question, problem: Problem, worst: Worst | None, ask: Ask, predicts: Predicts) -> list[Variant]:
    """What the weights of the row with the worst error are, and of which head, as values that are indicators show it.

    A cause that ``predicts`` all that is wrong comes before one that fits this row.
    """
    if worst is None or worst.result != "output" or problem.score_mod is not None or len(problem.sizes[0]) != 1:
        return []
    sample, head, query = row = worst.index[:3]
    value, shared = problem.arrays["value"], problem.sizes[1] // problem.arrays["value"].shape[1]
    groups, keys, width = value.shape[1:]
    dense = dense_of(meant(problem, question.kernel))
    weights = answer(dense).arrays["weights"][row].astype(np.float64)
    output = ask(problem)["output"][row].astype(np.float64)
    of_row = itertools.chain(_multiples(dense, row, output), _cuts(dense, row, output))
    if exact := next(filter(predicts, of_row), None):
        return [exact]
    plain = problem.changed(memory={name: each for name, each in problem.memory.items() if name != "value"})

    def shown(codes: NumpyArray, at: tuple[Any, ...] = row) -> NumpyArray:
        """What the row, or several, give for other values."""
        codes = np.ascontiguousarray(np.broadcast_to(codes, value.shape)).astype(value.dtype)
        return np.asarray(ask(plain.changed(arrays={**plain.arrays, "value": codes}))["output"][at].astype(np.float64))

    def sums(start: int, size: int) -> tuple[NumpyArray, NumpyArray]:
        """What blocks of keys have for weights, and should have."""
        codes = ((np.arange(keys) - start)[:, None] // size == np.arange(width)).astype(np.float64)
        return shown(codes), weights @ codes

    entry = sample * groups + head // shared
    of_heads = np.arange(value.shape[0] * groups).reshape(-1, groups, 1, 1) % width == np.arange(width)
    got = shown(of_heads.astype(np.float64), (sample, slice(None), query))
    others = [int(each) for each in got.argmax(axis=-1)]
    other = others[head]
    if weights.sum() > 0.5 and other != entry % width and other < of_heads.shape[0] * groups and got[head].max() > 0.9:
        if groups > 1 and {each // groups for each in others} == {sample}:
            wanted = [each // shared for each in range(len(others))]
            return [cause("other-kv-heads", *(", ".join(map(str, each)) for each in (np.mod(others, groups), wanted)))]
        return [cause("other-values", head, sample, other % groups, other // groups)]
    size = -(-keys // width)
    got, expected = sums(0, size)
    (blocks,) = np.nonzero(expected > 1e-3 / width)
    if not (np.isfinite(got).all() and blocks.size):
        return []
    ratios = got[blocks] / expected[blocks]
    alike = ALIKE if question.dtype in NARROW else ALIKE / 10
    kept = -np.sort(-ratios[ratios > 0.1]) if (ratios > 0.1).any() else np.ones(1)
    usual = kept[(abs(kept[:, None] / kept - 1) < alike).sum(axis=0).argmax()]  # the ratio that most blocks share
    (odd,) = np.nonzero(abs(ratios / usual - 1) > alike)
    (ends,) = np.nonzero(np.diff(odd) > 1)
    runs, best = (ends.size + 1) * bool(odd.size), cause("other-sum", usual, MORE if usual < 1 else LESS)
    if runs:

        def edge(at: int, last: bool) -> tuple[int, float]:
            """The first or last key of a block whose weight is odd, and how odd it is."""
            start, factor, step = int(at) * size, float(ratios[blocks == at][0] / usual), size
            while step > 1 < width:
                step = -(-step // width)
                total, wanted = sums(start, step)
                with np.errstate(all="ignore"):
                    share = np.where(wanted > 1e-2 * step / keys, total / (usual * wanted), 1)
                (unlike,) = np.nonzero(abs(share - 1) > alike)
                if not unlike.size:
                    break
                start, factor = start + int(unlike[-last]) * step, float(share[unlike[-last]])
            return start, factor

        (first, factor), (last, _) = edge(blocks[odd[0]], False), edge(blocks[odd[[*ends, -1][0]]], True)
        guesses = list(_guesses(dense, first, last, factor))
        if exact := next(filter(predicts, guesses), None):
            return [exact]
        best = guesses[0 if factor < 0.1 else -1]
    elif usual < 1:
        count = (1 / usual - 1) * math.exp(answer(dense).arrays["logsumexp"][row])
        sinks = np.full(problem.sizes[1], math.log(count))
        zeros = cause("keys-of-score-0", f"{count:.3g}", change=functools.partial(Dense.changed, sinks=sinks))
        best = zeros if dense.sinks is None and predicts(zeros) else best
    if another := _of_another(dense, row, output):
        return [another]
    hidden, off = (expected == 0) & (got > 1e-3 / width), abs(ratios - 1).max()
    if off < alike and not hidden.any():
        return [best] if runs else []
    wrong = _error(output, answer(dense).arrays["output"][row])
    falling, equal, *alone = (each < wrong / 10 for each in _errors_in_order(question, problem, row, weights, ask))
    if any(alone) and best.name in ("other-sum", "other-weights"):
        return [cause("place-of-query", row[2])]
    if hidden.any():
        return [cause("hidden-keys", int(hidden.argmax()) * size)]
    if falling and equal:
        return [cause("unscaled-maximum")]
    if runs > 2 and off < 1 / 4:
        return [cause("inexact-weights", 100 * off)]
    return [cause("unequal-scores") if equal else best]


def _guesses(dense: Dense, first: int, last: int, factor: float) -> Iterator[Variant]:
    """What keys from one to another may be, whose weights are so many times those of the others."""
    keys = dense.key.shape[-2]

    def within(at: NumpyArray) -> NumpyArray:
        return np.asarray((first <= at) & (at <= last))

    if factor < 0.1:
        yield cause("lost-keys", first, last, keys, change=keys_left(lambda at: ~within(at)))
        for limit in (keys, keys - 1) if first == last else ():
            yield cause("last-seen-key-lost", change=functools.partial(_last_lost, limit))
        for block, (which, at) in itertools.product((16, 32, 64, 128), (("first", 0), ("last", -1))):
            yield cause("skipped-blocks", block, which, block, change=_skipping(block, at))
    for names in SHARES if len(dense.key) > 1 else ():
        taken = within(np.arange(keys))[:, None]
        first_page = {name: np.where(taken, (array := getattr(dense, name))[:1], array) for name in names}
        change = functools.partial(Dense.changed, **first_page)
        yield cause("keys-of-first-sample", first, last, keys, change=change)
    if abs(factor - 2) < 0.1:
        bias = math.log(2) * within(np.arange(keys)) + (0 if dense.bias is None else dense.bias)
        yield cause("keys-twice", first, last, keys, change=functools.partial(Dense.changed, bias=bias))
    ends = dict.fromkeys([first, 2 ** max(first.bit_length() - 1, 0)]) if 0 < first < keys else ()
    for end, names in itertools.product(ends, SHARES):
        again = {name: getattr(dense, name)[..., np.arange(keys) % end, :] for name in names}
        change = functools.partial(Dense.changed, **again)
        yield cause("wrapped-offset", " and ".join(f"{each}s" for each in names), end, change=change)
    for block, (name, *merge) in itertools.product(PARTS, MERGES):
        yield cause(name, block, change=unscaled(block, *merge))
    yield cause("other-weights", first, last, keys, factor)


def _last_lost(limit: int, dense: Dense) -> Dense:
    """Hide the last key that each query sees, where that is below a limit."""
    last = dense.key.shape[-2] - 1 - dense.through[..., ::-1].argmax(axis=-1, keepdims=True)
    return dense.hiding((dense.positions[1] != last) | (last >= limit))


def _skipping(block: int, at: int) -> Change:
    """Leave out blocks of keys that one of a block of queries does not see."""

    def change(dense: Dense) -> Dense:
        rows, keys = dense.query.shape[-2], dense.key.shape[-2]
        seen = np.logical_or.reduceat(dense.through, np.arange(0, keys, block), axis=-1)
        of_block = np.minimum(np.arange(rows) // block * block + at % block, rows - 1)
        return dense.hiding(seen[..., of_block, :][..., np.arange(keys) // block])

    return change


def _of_another(dense: Dense, row: tuple[int, ...], got: NumpyArray) -> Variant | None:
    """Whether a row is what the mask and the bias of another row make of it."""
    if (dense.mask is None and dense.bias is None) or dense.softcap is not None or dense.sinks is not None:
        return None
    if not dense.through[row].any():  # of which conventions are
        return None
    sample, head, query = row
    with np.errstate(all="ignore"):
        bias = np.where(dense.through, 0 if dense.bias is None else dense.bias, -np.inf)
        scores = dense.scale * (dense.key[sample, head] @ dense.query[row]) + bias
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs = powers @ dense.value[sample, head] / powers.sum(axis=-1, keepdims=True)
        errors = np.nan_to_num(abs(outputs - got.astype(np.float64)).max(axis=-1), nan=np.inf)
    near = np.argwhere(errors < min(errors[row] / 100, 2 * errors.min()))
    other = max(near, key=lambda each: int((each == row).sum()), default=None)  # of equal masks, that of its own place
    return None if other is None else cause("mask-of-another", query, head, sample, *map(int, other[::-1]))


def _errors_in_order(
    question: Question, problem: Problem, row: tuple[int, ...], weights: NumpyArray, ask: Ask
) -> Iterator[float]:
    """The errors of a row where weights fall from key to key, where scores are equal, and where it is the first."""
    whole = positioned(problem, question.kernel).changed(memory={})
    if whole.mask is not None:
        whole = whole.holding(mask=passes(whole.mask, whole))
    zeros = {name: np.zeros_like(whole.arrays[name]) for name in ("query", "bias") if name in whole.arrays}
    others = [(taken(whole, -1, np.argsort(-weights, kind="stable")), row), (whole.holding(**zeros), row)]
    if at := row[2]:
        turned = taken(whole, -2, np.roll(np.arange(problem.sizes[2]), -at))
        others.append((turned, (*row[:2], 0)))
    for other, at_row in others:
        asked = fit(other, question.kernel)
        truth = answer(dense_of(meant(asked, question.kernel))).arrays["output"][at_row]
        yield _error(ask(asked)["output"][at_row], truth)


def _error(got: NumpyArray, truth: NumpyArray) -> float:
    """How far a row is off, as a part of its largest number."""
    return float(abs(got - truth).max() / abs(truth).max())


def _multiples(dense: Dense, row: tuple[int, ...], got: NumpyArray) -> Iterator[Variant]:
    """What a row is where its scores, bias or sink are times one number: the number that comes nearest to it."""
    seen, head = dense.through[row], row[1]
    if not (seen.any() and np.isfinite(got).all()):
        return
    key, value = dense.key[row[:2]][seen], dense.value[row[:2]][seen]
    zero, cap = np.zeros(len(key)), dense.softcap
    added = {"bias": 0.0 if dense.bias is None else dense.bias, "alibi": dense.changed(bias=None).added}
    parts = {"scale": dense.scale * (key @ dense.query[row])}
    parts |= {name: np.broadcast_to(part, dense.through.shape)[row][seen] for name, part in added.items()}
    if dense.sinks is not None:
        parts["sinks"], value = dense.sinks[head : head + 1], np.concatenate([value, 0 * value[:1]])

    def error(name: str, factors: NumpyArray) -> NumpyArray:
        """How far rows are off where a part is times each of these factors."""
        times = {each: factors[:, None] * part if each == name else part + zero[:1] for each, part in parts.items()}
        scores = times["scale"] if cap is None else cap * np.tanh(times["scale"] / cap)
        powers = np.broadcast_to(scores + times["bias"] + times["alibi"], (factors.size, len(key)))
        if dense.sinks is not None:
            powers = np.concatenate([powers, np.broadcast_to(times["sinks"], (factors.size, 1))], axis=-1)
        powers = np.exp(powers - powers.max(axis=-1, keepdims=True))
        return np.asarray(((powers @ value / powers.sum(axis=-1, keepdims=True) - got) ** 2).sum(axis=-1))

    for name in (each for each, part in parts.items() if part.any()):
        factors, step = np.concatenate([sign * 2.0 ** np.arange(-8, 8, 0.25) for sign in (-1, 1)]), 0.25
        while step > 2.0**-28:
            factor = float(factors[error(name, factors).argmin()])
            factors, step = factor * 2.0 ** np.linspace(-step, step, 17), step / 8
        more = {name: factor * getattr(dense, name)}
        yield cause(f"other-{name}", factor, change=functools.partial(Dense.changed, **more))


def _cuts(dense: Dense, row: tuple[int, ...], got: NumpyArray) -> Iterator[Variant]:
    """What a row is where its scores lack the last channels, or where it sees the keys from another on, or up to it."""
    if dense.softcap is not None or dense.sinks is not None or not np.isfinite(got).all():
        return
    terms, value = dense.scale * dense.query[row] * dense.key[row[:2]], dense.value[row[:2]]
    added = np.broadcast_to(dense.added, dense.through.shape)[row]
    scores = terms.cumsum(axis=-1).T + added  # with the channels up to each

    def nearest(outputs: NumpyArray) -> int:
        return int(np.nan_to_num(((outputs - got) ** 2).sum(axis=-1), nan=np.inf).argmin())

    with np.errstate(all="ignore"):
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        seen, unseen = powers * dense.through[row], powers[-1] * dense.changed(causal=None).through[row]
        kept = 1 + nearest(seen @ value / seen.sum(axis=-1, keepdims=True))
        last = nearest((unseen[:, None] * value).cumsum(axis=0) / unseen.cumsum()[:, None])
        first = nearest((seen[-1, ::-1, None] * value[::-1]).cumsum(axis=0)[::-1] / seen[-1, ::-1].cumsum()[::-1, None])
    width, (rows, columns) = row[2] - first + 1, dense.positions
    yield cause("windowed", width, change=functools.partial(Dense.hiding, through=columns > rows - width))
    short = np.where(np.arange(len(scores)) < kept, dense.query, 0)
    yield cause("lost-channels", kept, len(scores), change=functools.partial(Dense.changed, query=short))
    shift = 0 if dense.causal is None else last - row[2] - dense.causal
    for start in (0, *2 ** np.arange(row[2].bit_length())) if shift else ():
        yield cause("shifted-causality", start, shift, change=shifted_from(shift, start))
