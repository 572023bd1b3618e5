"""Other answers than the contract's: conventions that libraries follow, and faults planted in the definition.

A wrong result that equals one of them is reported by name. A bound that cannot tell them apart from the truth proves
little, and so each report counts how many of the faults its bounds reject.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeAlias

import numpy as np

from attention_conformance.oracle.dense import Answer, Dense, answer
from attention_conformance.problem import NumpyArray, Problem

Ask: TypeAlias = Callable[[Problem], Mapping[str, NumpyArray]]
"""One call of a kernel."""

Changed: TypeAlias = Dense | Answer | None
"""Another problem, or another answer; None where a change does not apply, as the truth is the same."""

OPERANDS = ("query", "key", "value")

PARTS = {"mask": "mask", "bias": "bias", "causality": "causal", "softcap": "softcap", "sinks": "sinks",
         "alibi": "alibi"}  # fmt: skip
"""What an attention may lack, by its word."""

AXES = {"sample": -4, "head": -3, "query": -2}
"""The axes of masks besides that of the keys."""

Change: TypeAlias = Callable[[Dense], Changed]
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class Variant:
    """Another answer: a name, the line of the contract it leaves, a sentence, and the change that gives it."""

    name: str
    line: int
    says: str
    change: Change = lambda _: None

    def answer(self, dense: Dense) -> Answer | None:
        """What it gives; None where it does not apply."""
        changed = self.change(dense)
        return answer(changed) if isinstance(changed, Dense) else changed


Changes: TypeAlias = Mapping[str, Change | tuple[Change, ...]]
"""What gives the answers of causes, by their names."""

TABLES = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))
"""The line and the sentence of each cause by its name: of answers, of arrays of calls before, and of experiments."""

TEXTS = {name: text for table in TABLES.values() for name, text in table.items()}


def cause(name: str, *facts: object, change: Change = lambda _: None) -> Variant:
    """The cause of a name, in the words of ``causes.toml`` with these facts."""
    line, says = TEXTS[name]
    return Variant(name, line, says.format(*facts) if facts else says, change)


def causes(changes: Changes) -> tuple[Variant, ...]:
    """The causes of these names, where a name may have several changes."""
    several = ((name, each if isinstance(each, tuple) else (each,)) for name, each in changes.items())
    return tuple(cause(name, change=change) for name, each in several for change in each)


def given(change: Callable[Concatenate[Dense, Arguments], Changed]) -> Callable[Arguments, Change]:
    """A function of a problem and arguments, as one of the arguments that makes a change."""

    def made(*arguments: Arguments.args, **options: Arguments.kwargs) -> Change:
        return lambda dense: change(dense, *arguments, **options)

    return made


@given
def _out(dense: Dense, change: Callable[[NumpyArray], NumpyArray]) -> Answer:
    """Change the output; where gradients are asked for, every one of them."""
    truth = answer(dense)
    with np.errstate(all="ignore"):
        return truth.of(**{n: change(each) for n, each in truth.arrays.items() if n not in ("weights", "logsumexp")})


def empty_rows(dense: Dense) -> NumpyArray | None:
    """The rows (..., H, M, 1) that attend to no key; None where there are none, or no keys."""
    empty = ~dense.through.any(axis=-1, keepdims=True)
    return np.asarray(empty) if empty.any() and dense.key.shape[-2] else None


def _mean_of_all(dense: Dense) -> Dense | None:
    empty = empty_rows(dense)
    return None if empty is None else dense.changed(uniform=empty)


def _mean_without_scores(dense: Dense) -> Answer | None:
    """The same, where no gradient reaches the scores of such rows."""
    mean = _mean_of_all(dense)
    if mean is None or dense.cotangent is None:
        return None
    truth, value = answer(dense), answer(mean)
    scales = {**truth.scales, "value": value.scales["value"]}
    return Answer({**truth.arrays, "value": value.arrays["value"]}, lambda: (scales, truth.kappa))


def _mean_of_past(dense: Dense) -> Answer | None:
    """The average of the keys that causality shows, where the rest of the mask empties the row."""
    empty = empty_rows(dense)
    if empty is None or dense.causal is None or dense.cotangent is not None:
        return None
    past = answer(dense.changed(mask=None, bias=None, scale=0.0, softcap=None, sinks=None)).arrays["output"]
    truth = answer(dense)
    return truth.of(output=np.where(empty, past, truth.arrays["output"]))


def _nan_of_rows(dense: Dense) -> Answer | None:
    empty = np.logical_not(dense.through.any(axis=-1, keepdims=True))  # also without a key
    if not empty.any():
        return None
    truth = answer(dense)
    if dense.cotangent is None:
        return truth.of(output=np.where(empty, np.nan, truth.arrays["output"]))
    bad = of_rows(dense, empty)
    return truth.of(**{**truth.arrays, **{name: np.where(bad[name], np.nan, truth.arrays[name]) for name in OPERANDS}})


@given
def _causal(dense: Dense, offset: Callable[[int, int], int]) -> Dense | None:
    if dense.causal is None:
        return None
    new = offset(dense.query.shape[-2], dense.key.shape[-2])
    return None if new == dense.causal else dense.changed(causal=new)


@given
def shifted_from(dense: Dense, amount: int, start: int = 0) -> Dense | None:
    """Causality off by so many keys, from a query on."""
    rows, columns = dense.positions
    if dense.causal is None or rows.size <= start:
        return None
    seen = columns <= rows + dense.causal + np.where(rows >= start, amount, 0)
    return dense.changed(causal=None).hiding(seen)


@given
def keys_left(dense: Dense, keep: Callable[[NumpyArray], NumpyArray]) -> Dense | None:
    """Lose some keys."""
    kept = keep(np.arange(dense.key.shape[-2]))
    return None if kept.all() else dense.hiding(kept)


@given
def changed(dense: Dense, name: str, change: Callable[[NumpyArray, Dense], NumpyArray]) -> Dense | None:
    """Another mask or bias, or other sinks."""
    array = getattr(dense, name)
    return None if array is None else dense.changed(**{name: change(array, dense)})


def _lowest_hides(dense: Dense) -> Dense | None:
    if dense.bias is None:
        return None
    lowest = (dense.bias <= -65504) & (dense.bias > -np.inf)  # that of float16
    return dense.changed(bias=np.where(lowest, -np.inf, dense.bias)) if lowest.any() else None


@given
def first_of(dense: Dense, axis: int, *names: str) -> Dense | None:
    """Arrays of the first sample, head or query, for all."""
    arrays = {name: getattr(dense, name) for name in names}
    if any(each is None or each.ndim < -axis or each.shape[axis] < 2 for each in arrays.values()):
        return None
    first = {name: np.take(each, np.zeros(each.shape[axis], int), axis=axis) for name, each in arrays.items()}
    return dense.changed(**first)


@given
def heads_in_turn(dense: Dense, *names: str) -> Dense | None:
    """Key or value heads in another order than that of the query heads that share them."""
    heads, size = dense.key.shape[-3], dense.group_size
    if size in (1, heads):
        return None
    order = np.arange(heads) % (heads // size) * size
    return dense.changed(**{name: getattr(dense, name)[..., order, :, :] for name in names})


@given
def scaled(dense: Dense, factor: Callable[[Dense], float]) -> Dense | None:
    """Another scale."""
    new = factor(dense)
    return None if new == dense.scale else dense.changed(scale=new)


@given
def _without(dense: Dense, name: str) -> Dense | None:
    return None if getattr(dense, name) is None else dense.changed(**{name: None})


def _cap_after_bias(dense: Dense) -> Dense | None:
    if dense.softcap is None or dense.bias is None or dense.cotangent is not None:
        return None
    scores = dense.scale * dense.query @ np.swapaxes(dense.key, -1, -2) + dense.bias
    return dense.changed(bias=None).scored(dense.softcap * np.tanh(scores / dense.softcap))


@given
def of_bits(dense: Dense, bits: int, *names: str) -> Dense:
    """Round operands to so many bits."""
    parts = {name: np.frexp(getattr(dense, name)) for name in names}
    return dense.changed(
        **{n: np.ldexp(np.round(np.ldexp(each, bits)), power - bits) for n, (each, power) in parts.items()}
    )


@given
def undivided(dense: Dense, top: Callable[[Dense, Answer], NumpyArray]) -> Answer | None:
    """The output is not divided by the sum of the powers, which are of differences to some number."""
    if dense.cotangent is not None:
        return None
    truth = answer(dense)
    shift, logsumexp = top(dense, truth), truth.arrays["logsumexp"]
    power = np.where(np.isfinite(shift) & np.isfinite(logsumexp), logsumexp - shift, 0)
    return truth.of(output=truth.arrays["output"] * np.exp(np.minimum(power, 69))[..., None])


@given
def unscaled(dense: Dense, block: int, join: np.ufunc, power: float = 1.0) -> Dense | None:
    """Parts of some keys, each divided by its own maximum, or its own sum, or a power of it, and added as they are."""
    keys = dense.key.shape[-2]
    if not block < keys or dense.cotangent is not None:
        return None
    shares = join.reduceat(answer(dense).arrays["weights"], np.arange(0, keys, block), axis=-1)
    bias = -power * np.log(np.where(shares > 0, shares, 1)).repeat(block, axis=-1)[..., :keys]
    return dense.changed(bias=bias if dense.bias is None else dense.bias + bias)


@given
def with_logsumexp(dense: Dense, other: Callable[[Dense, Answer], NumpyArray | None]) -> Answer | None:
    """Another logsumexp with the same output."""
    if dense.cotangent is not None:
        return None
    truth = answer(dense)
    changed = other(dense, truth)
    return None if changed is None else truth.of(**{**truth.arrays, "logsumexp": changed})


def reached(dense: Dense) -> dict[str, NumpyArray]:
    r"""Find the elements that may be NaN in formulas that multiply by weights of 0, or add a mask of -inf.

    Query `i` does not attend to key `j`. A value :math:`v_{je}` that is not finite makes :math:`0 \cdot v_{je}` NaN,
    in channel `e` of row `i`. A key :math:`k_j` that is not finite makes the score :math:`q_i \cdot k_j - \infty` NaN,
    and with it the whole row. In the gradients, such a row reaches all keys of its head.

    Returns
    -------
    dict of str to numpy.ndarray of bool
        Broadcastable to each result: output, weights and logsumexp; where there is a cotangent, the gradients instead.
    """
    masked = (~dense.through).astype(np.float32)
    bad_values = masked @ (~np.isfinite(dense.value)).astype(np.float32) > 0  # (..., H, M, E)
    bad_keys = masked @ (~np.isfinite(dense.key)).any(axis=-1, keepdims=True).astype(np.float32) > 0  # (..., H, M, 1)
    if dense.cotangent is None:
        return {"output": bad_values | bad_keys, "weights": bad_keys, "logsumexp": bad_keys[..., 0]}
    rows = bad_keys | bad_values.any(axis=-1, keepdims=True)
    return of_rows(dense, rows)


def of_rows(dense: Dense, rows: NumpyArray) -> dict[str, NumpyArray]:
    """The elements of each gradient, broadcastable to it, that some rows (..., H, M, 1) of the output reach."""
    *batch, heads, _, _ = rows.shape
    of_heads = rows.any(axis=(-2, -1)).reshape(*batch, heads // dense.group_size, dense.group_size)
    groups = np.expand_dims(of_heads.any(axis=-1), (-2, -1))
    reached = {"query": rows, "key": groups, "value": groups}
    if dense.bias is not None:
        reached["bias"] = _of_any(rows, dense.bias.shape)
    if dense.sinks is not None:
        reached["sinks"] = _of_any(rows, (dense.sinks.shape[0], 1, 1))[..., 0, 0]
    return reached


def _of_any(rows: NumpyArray, shape: tuple[int, ...]) -> NumpyArray:
    """Rows (..., H, M, 1) in a shape that is broadcast to the scores; any row that an element covers reaches it."""
    added = rows.ndim - len(shape)
    covered = tuple(axis for axis in range(rows.ndim) if axis < added or shape[axis - added] == 1)
    reached = rows.any(axis=covered, keepdims=True)
    return np.asarray(reached.reshape(reached.shape[added:]))


LEAK = cause("nan-through-mask")
"""No single answer: NaN in elements that `reached` finds, and elsewhere the truth or another convention."""

ATTENDED = cause("attended-nonfinite")
"""No single answer: anything where the formula gives no number, and elsewhere the truth."""

SINGLE = cause("float64-in-float32")
"""No single answer: an error that float32 explains."""

TF32 = cause("tf32")
"""No single answer: an error that the rounding of operands on an accelerator explains."""

HIDDEN = cause("nan-of-hidden-block")
"""No single answer: NaN in such rows, and elsewhere the truth."""

INEXACT = cause("inexact")
"""No single answer: the same error, where no accelerator rounds operands."""

EMPTY = cause("gradient-of-masked-row")
"""No single answer: right where the cotangent of such rows is 0. All that a gradient may be of them is said here."""

CONVENTIONS = (
    *causes(
        {
            "bottom-right-causal": _causal(lambda m, n: n - m),
            "top-left-causal": _causal(lambda m, n: 0),
            "mean-of-masked-row": (_mean_of_all, _mean_without_scores),
            "mean-of-past-of-masked-row": _mean_of_past,
            "nan-of-masked-row": _nan_of_rows,
            "logsumexp-of-base-2": with_logsumexp(lambda dense, truth: truth.arrays["logsumexp"] / np.log(2.0)),
        }
    ),
    LEAK,
    ATTENDED,
    EMPTY,
    SINGLE,
    TF32,
)
"""Differences of convention, in the order in which they are tried."""

SPREAD = cause("nan-spreads")
"""No single answer: NaN where no 0 × NaN of what is masked explains it, and the truth elsewhere."""

NARROW_SCORES = cause("narrow-scores")
"""No single answer: an error that the rounding of scores to 16 bits explains."""

FAULTS = causes(
    {
        "zeros": _out(lambda array: np.zeros_like(array)),
        "doubled": _out(lambda array: 2 * array),
        "negated": _out(lambda array: -array),
        "small-error": _out(lambda array: array * (1 + 2**-6)),
        "uniform-weights": scaled(lambda dense: 0.0),
        "no-scale": scaled(lambda dense: 1.0),
        "scale-of-width": scaled(lambda dense: dense.scale * max(dense.query.shape[-1], 1) ** -0.5),
        "scale-off": scaled(lambda dense: 1.1 * dense.scale),
        "absolute-scale": scaled(lambda dense: abs(dense.scale)),
        **{f"no-{word}": _without(name) for word, name in PARTS.items()},
        **{
            f"{name}-of-first-{word}": first_of(axis, name)
            for (word, axis), name in itertools.product(AXES.items(), ("mask", "bias"))
        },
        "inverted-mask": changed("mask", lambda mask, dense: ~mask),
        "scaled-bias": changed("bias", lambda bias, dense: np.where(np.isfinite(bias), bias * dense.scale, bias)),
        "negated-bias": changed("bias", lambda bias, dense: np.where(np.isfinite(bias), -bias, bias)),
        "lowest-bias-hides": _lowest_hides,
        "strict-causality": shifted_from(-1),
        "future-key": shifted_from(1),
        "future-key-from-64": shifted_from(1, 64),
        "strict-from-64": shifted_from(-1, 64),
        "last-key-lost": keys_left(lambda at: at < max(1, at.size - 1)),
        "first-key-lost": keys_left(lambda at: (at > 0) | (at.size == 1)),
        "ragged-block-lost": keys_left(lambda at: at < at.size // 64 * 64 if at.size > 64 else at >= 0),
        "first-block-alone": keys_left(lambda at: at < 64),
        "stale-maximum": unscaled(64, np.add),
        "heads-in-turn": heads_in_turn("key", "value"),
        "first-key-head": first_of(-3, "key", "value"),
        "first-sample": first_of(-4, "key", "value"),
        "next-value": lambda dense: (
            dense.changed(value=np.roll(dense.value, 1, axis=-2)) if dense.key.shape[-2] > 1 else None
        ),
        "softcap-after-bias": _cap_after_bias,
        "unnormalized": undivided(lambda dense, truth: np.zeros_like(truth.arrays["logsumexp"])),
        "query-of-5-bits": of_bits(5, "query"),
        "value-of-5-bits": of_bits(5, "value"),
    }
)
"""Faults of the definition, for the power of the bounds and the words of a diagnosis."""
