"""Further faults of attentions, with which a wrong answer is compared.

They are not planted in the definition, as that takes time in every case. A wrong answer is named by one of them only
where it equals that answer within the bound of the case, in each of its results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from attention_conformance.mistakes.variants import (
    OPERANDS,
    Change,
    Changes,
    cause,
    causes,
    changed,
    first_of,
    given,
    heads_in_turn,
    keys_left,
    of_bits,
    scaled,
    undivided,
    with_logsumexp,
)
from attention_conformance.oracle.dense import Answer, Dense, answer, products
from attention_conformance.problem import NumpyArray

ENDS = {"window-first": (1, -1), "window-last": (-1, 1), "length-last": (0, 1)}
"""How far a pair lies towards an end of what a mask shows: factors of the positions of query and key."""

BLOCKS, LARGE = (4, 8, 16, 32, 64, 128), (256, 512, 1024)


def _scores(dense: Dense) -> NumpyArray:
    """Scaled scores with their bias, where no softcap and no sinks are."""
    scores = (dense.scale * dense.query) @ np.swapaxes(dense.key, -1, -2)
    return scores if dense.bias is None else np.asarray(scores + dense.bias)


def _is_plain(dense: Dense) -> bool:
    finite = all(bool(np.isfinite(each).all()) for each in (dense.query, dense.key, dense.value))
    return finite and dense.softcap is None and dense.sinks is None and dense.alibi is None and dense.uniform is None


@given
def _capped(dense: Dense, cap: Callable[[NumpyArray, float, float], NumpyArray]) -> Dense | None:
    """Another function of the product of query and key in place of the softcap."""
    if dense.softcap is None or dense.cotangent is not None:
        return None
    return dense.scored(cap(dense.query @ np.swapaxes(dense.key, -1, -2), dense.scale, dense.softcap))


@given
def _cap_after_mask(dense: Dense, before: bool) -> Dense | None:
    """The softcap of masked scores, with the bias before it or after it."""
    if dense.softcap is None or dense.cotangent is not None or dense.through.all():
        return None
    scores, bias = dense.scale * dense.query @ np.swapaxes(dense.key, -1, -2), _finite_bias(dense)
    scores = dense.softcap * np.tanh((scores + bias if before else scores) / dense.softcap)
    scores = scores if before else scores + bias
    return dense.changed(mask=None, causal=None, bias=None).scored(np.where(dense.through, scores, -dense.softcap))


@given
def _of_weights(dense: Dense, weights: Callable[[Dense], NumpyArray | None]) -> Answer | None:
    """The sum of the values by other weights."""
    p = weights(dense) if dense.cotangent is None and _is_plain(dense) else None
    if p is None:
        return None
    return Answer({"output": p @ dense.value}, lambda: ({"output": p @ abs(dense.value)}, 0.0))


def _softmax_over(dense: Dense, axis: int) -> NumpyArray:
    """Weights that sum to 1 along another axis than that of the keys."""
    scores = np.where(dense.through, _scores(dense), -np.inf)
    top = scores.max(axis=axis, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = powers.sum(axis=axis, keepdims=True)
    return np.asarray(powers / np.where(total > 0, total, 1))


def _masked_late(dense: Dense) -> NumpyArray | None:
    through = dense.through
    unmasked = answer(dense.changed(mask=None, causal=None)).arrays["weights"]
    return None if through.all() else np.where(through, unmasked, 0)


def _not_transposed(dense: Dense) -> Answer | None:
    """The memory of (M, H) read as (H, M), as where a reshape stands for a transposition."""
    if dense.cotangent is not None or 1 in dense.query.shape[-3:-1]:
        return None
    truth = answer(dense)
    output, scale = (
        np.swapaxes(each, -3, -2).reshape(each.shape) for each in (truth.arrays["output"], truth.scales["output"])
    )
    return Answer({"output": output}, lambda: ({"output": scale}, truth.kappa))


@given
def _narrowed(dense: Dense, keep: Callable[[NumpyArray], NumpyArray]) -> Dense | None:
    kept = keep(np.arange(dense.query.shape[-1]))
    return None if kept.all() else dense.changed(query=np.where(kept, dense.query, 0))


@given
def _causal_by(dense: Dense, see: Callable[[NumpyArray, NumpyArray, int], NumpyArray], block: int = 1) -> Dense | None:
    """Causality by another comparison of query and key positions, perhaps in blocks."""
    if dense.causal is None:
        return None
    return dense.changed(causal=None).hiding(see(dense.positions[0] + dense.causal, dense.positions[1], block))


def _either(dense: Dense) -> Dense | None:
    if dense.mask is None or dense.causal is None:
        return None
    rows, columns = dense.positions
    return dense.changed(mask=dense.mask | (columns <= rows + dense.causal), causal=None)


def _transposed(array: NumpyArray, dense: Dense) -> NumpyArray:
    """Queries and keys exchanged, where there are as many."""
    return np.swapaxes(array, -1, -2) if array.shape[-2:] == (array.shape[-1],) * 2 else array


def _maximum(dense: Dense, truth: Answer) -> NumpyArray:
    top = np.log(truth.arrays["weights"].max(axis=-1, initial=0.0)) + truth.arrays["logsumexp"]
    return np.asarray(top if dense.sinks is None else np.maximum(top, dense.sinks[:, None]))


def _sink_alone(dense: Dense) -> Answer | None:
    """The power of a sink is taken as it is, and those of the scores after their maximum is taken off."""
    if dense.sinks is None or dense.cotangent is not None:
        return None
    truth, sinks = answer(dense), dense.sinks[:, None]
    top = _maximum(dense.changed(sinks=None), answer(dense.changed(sinks=None)))
    total = np.exp(truth.arrays["logsumexp"] - top)
    return truth.of(output=truth.arrays["output"] * (total / (total - np.exp(sinks - top) + np.exp(sinks)))[..., None])


def _without_maximum(dense: Dense, truth: Answer) -> NumpyArray:
    top, logsumexp = _maximum(dense, truth), truth.arrays["logsumexp"]
    return np.where(np.isfinite(top), logsumexp - top, logsumexp)


@given
def _edge(dense: Dense, of_row: int, of_column: int, more: bool) -> Dense | None:
    """What a mask shows of each sample and head ends one key later, or one earlier."""
    if dense.mask is None or not dense.through.any():
        return None
    rows, columns = dense.positions
    at = of_row * rows + of_column * columns
    end = np.where(dense.mask, at, -at.size).max(axis=(-2, -1), keepdims=True)
    return dense.changed(mask=dense.mask | (at == end + 1) if more else dense.mask & (at != end))


@given
def _recomputed(
    dense: Dense,
    d_scores: Callable[[NumpyArray, NumpyArray, NumpyArray], NumpyArray] = lambda p, dp, delta: p * (dp - delta),
    weights: Callable[[Dense, NumpyArray], NumpyArray | None] | None = None,
) -> Answer | None:
    """A backward pass with another derivative of the softmax, or with other weights by the logsumexp."""
    if dense.cotangent is None or not _is_plain(dense):
        return None
    truth, forward = answer(dense), answer(dense.changed(cotangent=None)).arrays
    p = forward["weights"] if weights is None else weights(dense, forward["logsumexp"])
    if p is None:
        return None
    delta = (dense.cotangent * forward["output"]).sum(axis=-1, keepdims=True)
    ds = d_scores(p, dense.cotangent @ np.swapaxes(dense.value, -1, -2), delta)
    sizes = products(dense.magnitudes, p, abs(ds))
    scales = {name: np.maximum(truth.scales[name], each) for name, each in sizes.items()}
    return Answer(products(dense, p, ds), lambda: (scales, truth.kappa))


def _of_all_keys(dense: Dense, logsumexp: NumpyArray) -> NumpyArray | None:
    """Weights of masked keys too, divided by the sum of the others."""
    if dense.through.all():
        return None
    return np.where(np.isfinite(logsumexp)[..., None], np.exp(_scores(dense) - logsumexp[..., None]), 0)


def _whole(block: int, at: NumpyArray) -> NumpyArray:
    return np.asarray((at < at.size // block * block) | (at.size < block))


def _by_width(name: str, other: str, dense: Dense) -> Dense | None:
    """The rows of an array as far apart in memory as those of a narrower one."""
    array, step = getattr(dense, name), getattr(dense, other).shape[-1]
    if array.shape[-1] <= step:
        return None
    at = np.arange(array.shape[-2])[:, None] * step + np.arange(array.shape[-1])
    return dense.changed(**{name: array.reshape(*array.shape[:-2], -1)[..., at]})


def _unhidden(dense: Dense) -> Dense | None:
    """A finite number in place of the mask, where it hides all keys of a row."""
    if dense.through.any(axis=-1).all() or not dense.key.shape[-2]:
        return None
    bias = _finite_bias(dense) + np.where(dense.through, 0, -1e4)
    return dense.changed(mask=None, causal=None, bias=bias)


def _masked_to_zero(dense: Dense) -> Dense | None:
    """The scores of masked keys are 0, as by a product with the mask."""
    if dense.cotangent is not None or dense.softcap is not None or dense.through.all():
        return None
    scores = np.where(dense.through, _scores(dense.changed(bias=_finite_bias(dense))), 0)
    return dense.changed(mask=None, causal=None, bias=None).scored(scores)


def _finite_bias(dense: Dense) -> NumpyArray | float:
    return 0.0 if dense.bias is None else np.where(np.isfinite(dense.bias), dense.bias, 0)


def _near_first(dense: Dense) -> Dense | None:
    """The rates of ALiBi by the distance from the first pair."""
    rows, columns = dense.positions
    if dense.alibi is None or rows.size == columns.size:
        return None
    return dense.changed(alibi=None, bias=_finite_bias(dense) - dense.alibi[:, None, None] * abs(columns - rows))


def _padded_scale(whole: int, dense: Dense) -> float:
    return float(max(whole, -(-dense.query.shape[-1] // whole) * whole) ** -0.5)


def _of_other_heads(name: str, axis: int) -> tuple[Change, ...]:
    """An array of the heads before, and of those from last to first."""

    def other(order: Callable[..., NumpyArray], array: NumpyArray, dense: Dense) -> NumpyArray:
        return order(array, axis=axis) if array.ndim >= -axis else array

    return tuple(changed(name, functools.partial(other, by)) for by in (np.flip, functools.partial(np.roll, shift=1)))


def _from_first(mask: NumpyArray) -> NumpyArray:
    """A mask that shows all keys from the first on that it showed."""
    return np.logical_or.accumulate(mask, axis=-1)


def _to_blocks(block: int, mask: NumpyArray, dense: Dense) -> NumpyArray:
    """A mask that shows all of the block in which it ends."""
    at = np.arange(mask.shape[-1])
    end = np.where(mask, at, -1).max(axis=-1, keepdims=True)
    return np.asarray(mask | ((at > end) & (at // block == end // block)))


def _counted(times: int, sinks: NumpyArray, dense: Dense) -> NumpyArray:
    return np.asarray(sinks + math.log(times))


FINITE = cause("bias-of-minus-10000", change=_unhidden)

CHANGES: Changes = {
    "always-causal": lambda dense: dense.changed(causal=0) if dense.causal is None else None,
    "reversed-causality": _causal_by(lambda m, n, _: n >= m),
    "causality-of-first-query": _causal_by(lambda m, n, _: n <= m.min()),
    "mask-or-causality": _either,
    "mask-transposed": changed("mask", _transposed),
    "bias-transposed": changed("bias", _transposed),
    "masked-scores-of-0": _masked_to_zero,
    "bias-of-next-key": changed("bias", lambda bias, dense: np.roll(bias, 1, axis=-1)),
    "window-without-first": changed("mask", lambda mask, dense: np.flip(_from_first(np.flip(mask, -1)), -1)),
    "window-without-last": changed("mask", lambda mask, dense: _from_first(mask)),
    "mask-of-any-sample": changed("mask", lambda mask, dense: np.asarray(mask.any(axis=0, keepdims=True))),
    "keys-after-hidden-lost": lambda dense: (
        None if dense.mask is None else dense.changed(mask=np.logical_and.accumulate(dense.through, axis=-1))
    ),
    "keys-beyond-queries-lost": lambda dense: keys_left(lambda at: at < dense.query.shape[-2])(dense),
    "softmax-over-queries": _of_weights(lambda dense: _softmax_over(dense, -2)),
    "softmax-over-heads": _of_weights(lambda dense: _softmax_over(dense, -3)),
    "masked-after-softmax": _of_weights(_masked_late),
    "powers-of-2": scaled(lambda dense: dense.scale * math.log(2.0)),
    "powers-of-e": scaled(lambda dense: dense.scale / math.log(2.0)),
    "heads-not-transposed": _not_transposed,
    **{
        f"operands-of-{bits}-bits": tuple(of_bits(bits, *names) for names in (OPERANDS, OPERANDS[:2], OPERANDS[2:]))
        for bits in (8, 11)
    },
    "key-and-value-swapped": lambda dense: (
        dense.changed(key=dense.value, value=dense.key) if dense.key.shape == dense.value.shape else None
    ),
    "not-divided": undivided(_maximum),
    "first-sample-of-key": first_of(-4, "key"),
    "first-sample-of-value": first_of(-4, "value"),
    "scale-ignored": scaled(lambda dense: dense.query.shape[-1] ** -0.5 if dense.query.shape[-1] else dense.scale),
    "scale-of-value-width": lambda dense: (
        dense.changed(scale=dense.value.shape[-1] ** -0.5) if dense.value.shape[-1] else None
    ),
    "value-rows-by-key-width": functools.partial(_by_width, "value", "query"),
    "key-rows-by-value-width": functools.partial(_by_width, "key", "value"),
    "softcap-before-scale": _capped(lambda product, scale, cap: scale * cap * np.tanh(product / cap)),
    "softcap-not-multiplied": _capped(lambda product, scale, cap: np.tanh(scale * product / cap)),
    "softcap-not-divided": _capped(lambda product, scale, cap: cap * np.tanh(scale * product)),
    "sinks-of-others": (
        changed("sinks", lambda sinks, dense: sinks[np.arange(sinks.size) // dense.group_size * dense.group_size]),
        changed("sinks", lambda sinks, dense: sinks.reshape(-1, dense.group_size).T.reshape(-1)),
        *_of_other_heads("sinks", -1),
    ),
    "bias-of-others": _of_other_heads("bias", -3),
    "length-rounded-up": tuple(changed("mask", functools.partial(_to_blocks, block)) for block in BLOCKS[2:]),
    "alibi-from-first": _near_first,
    "alibi-of-others": _of_other_heads("alibi", -1),
    "sink-of-first-head": changed("sinks", lambda sinks, dense: np.full_like(sinks, sinks[0])),
    "sink-twice": tuple(changed("sinks", functools.partial(_counted, by)) for by in range(2, 9)),
    "sink-beyond-maximum": _sink_alone,
    "sink-scaled": changed("sinks", lambda sinks, dense: sinks * dense.scale),
    "logsumexp-without-maximum": with_logsumexp(_without_maximum),
    "logsumexp-is-maximum": with_logsumexp(_maximum),
    "logsumexp-without-sinks": with_logsumexp(
        lambda dense, truth: None if dense.sinks is None else answer(dense.changed(sinks=None)).arrays["logsumexp"]
    ),
    "logsumexp-unscaled": with_logsumexp(lambda dense, truth: answer(dense.changed(scale=1.0)).arrays["logsumexp"]),
    "value-heads-in-turn": heads_in_turn("value"),
    "key-heads-in-turn": heads_in_turn("key"),
    "scale-of-padded-width": tuple(scaled(functools.partial(_padded_scale, whole)) for whole in BLOCKS[2:]),
    "softcap-after-mask": (_cap_after_mask(True), _cap_after_mask(False)),
    "last-channels-lost": tuple(_narrowed(functools.partial(_whole, whole)) for whole in BLOCKS[:4]),
    "gradient-without-delta": _recomputed(lambda p, dp, delta: p * dp),
    "gradient-without-mask": _recomputed(weights=_of_all_keys),
    **{
        f"{end}-key-{word}": _edge(*factors, is_more)
        for end, factors in ENDS.items()
        for word, is_more in (("less", False), ("more", True))
    },
    **{f"width-from-{width}-lost": _narrowed(functools.partial(np.greater, width)) for width in (64, 128)},
    **{f"ragged-block-of-{block}-lost": keys_left(functools.partial(_whole, block)) for block in (*BLOCKS, *LARGE)},
    **{f"causality-by-blocks-of-{block}": _causal_by(lambda m, n, b: n // b <= m // b, block) for block in BLOCKS},
    **{f"causality-anew-at-{block}": _causal_by(lambda m, n, size: n <= m % size, block) for block in BLOCKS},
}

DIAGNOSES = (FINITE, *causes(CHANGES))
"""Faults with which a wrong answer is compared, after those that are planted."""
