"""Further faults of attentions, with which a wrong answer is compared.

They are not planted in the definition, as that takes time in every case. A wrong answer is named by one of them only
where it equals that answer within the bound of the case, in each of its results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from attention_conformance.mistakes.variants import (
    Variant,
    first_of,
    given,
    heads_in_turn,
    keys_left,
    scaled,
    shifted_from,
    with_logsumexp,
)
from attention_conformance.oracle.dense import Answer, Dense, answer, grouped
from attention_conformance.problem import NumpyArray

BLOCKS = (4, 16, 32, 64, 128)
EDGES = (16, 32, 128, 256, 512, 1024)


def _scores(dense: Dense) -> NumpyArray:
    """Scaled scores with their bias, where no softcap and no sinks are."""
    scores = (dense.scale * dense.query) @ np.swapaxes(dense.key, -1, -2)
    return scores if dense.bias is None else np.asarray(scores + dense.bias)


def _is_plain(dense: Dense) -> bool:
    finite = all(bool(np.isfinite(each).all()) for each in (dense.query, dense.key, dense.value))
    return finite and dense.softcap is None and dense.sinks is None and dense.uniform is None


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
    found = weights(dense) if dense.cotangent is None and _is_plain(dense) else None
    if found is None:
        return None
    return Answer({"output": found @ dense.value}, lambda: ({"output": found @ abs(dense.value)}, 0.0))


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
def _narrowed(dense: Dense, width: Callable[[int], int]) -> Dense | None:
    kept = np.arange(dense.query.shape[-1]) < width(dense.query.shape[-1])
    return None if kept.all() else dense.changed(query=np.where(kept, dense.query, 0))


@given
def _causal_by(dense: Dense, see: Callable[[NumpyArray, NumpyArray], NumpyArray]) -> Dense | None:
    """Causality by another comparison of query and key positions."""
    if dense.causal is None:
        return None
    return dense.changed(causal=None).hiding(see(dense.positions[0] + dense.causal, dense.positions[1]))


def _by_blocks(block: int, rows: NumpyArray, columns: NumpyArray) -> NumpyArray:
    return np.asarray(columns // block <= rows // block)


def _either(dense: Dense) -> Dense | None:
    if dense.mask is None or dense.causal is None:
        return None
    rows, columns = dense.positions
    return dense.changed(mask=dense.mask | (columns <= rows + dense.causal), causal=None)


def _mask_transposed(dense: Dense) -> Dense | None:
    mask = dense.mask
    is_square = mask is not None and mask.shape[-1] == mask.shape[-2]
    return dense.changed(mask=np.swapaxes(mask, -1, -2)) if mask is not None and is_square else None


@given
def _sink_unshifted(dense: Dense, with_sink: bool) -> Answer | None:
    """The power of the sink is added as it is, to powers of differences to the maximum."""
    if dense.sinks is None or dense.cotangent is not None:
        return None
    truth, sinks = answer(dense), dense.sinks[:, None]
    weights, logsumexp = truth.arrays["weights"], truth.arrays["logsumexp"]
    top = np.log(weights.max(axis=-1)) + logsumexp
    top = np.maximum(top, sinks) if with_sink else top
    powers = np.exp(logsumexp - top) - np.exp(sinks - top)
    total = powers + np.exp(sinks)
    factor = np.exp(logsumexp - top) / total
    return truth.of(output=truth.arrays["output"] * factor[..., None], logsumexp=top + np.log(total))


def _undivided(dense: Dense) -> Answer | None:
    if dense.cotangent is not None:
        return None
    truth = answer(dense)
    top, logsumexp = _maximum(dense, truth), truth.arrays["logsumexp"]
    factor = np.exp(np.where(np.isfinite(top), logsumexp - top, 0))[..., None]
    return truth.of(output=truth.arrays["output"] * factor)


def _maximum(dense: Dense, truth: Answer) -> NumpyArray:
    top = np.log(truth.arrays["weights"].max(axis=-1, initial=0.0)) + truth.arrays["logsumexp"]
    return np.asarray(top if dense.sinks is None else np.maximum(top, dense.sinks[:, None]))


def _without_maximum(dense: Dense, truth: Answer) -> NumpyArray:
    top, logsumexp = _maximum(dense, truth), truth.arrays["logsumexp"]
    return np.where(np.isfinite(top), logsumexp - top, logsumexp)


@given
def _edge(dense: Dense, last: bool, more: bool) -> Dense | None:
    """A window with one key more, or one less, at an end."""
    if dense.mask is None or dense.causal is not None or not dense.through.any():
        return None
    rows, columns = dense.positions
    distance = columns - rows if last else rows - columns
    end = np.where(dense.through, distance, -distance.size).max()
    return dense.changed(mask=dense.mask | (distance == end + 1) if more else dense.mask & (distance != end))


@given
def _factor(dense: Dense, names: Sequence[str], factor: Callable[[Dense], float]) -> Answer | None:
    """Some gradients times a number."""
    number = factor(dense)
    if dense.cotangent is None or number == 1.0:
        return None
    truth = answer(dense)
    return truth.of(**{**truth.arrays, **{name: truth.arrays[name] * number for name in names}})


@given
def _one_of_group(dense: Dense, names: Sequence[str], at: int) -> Answer | None:
    """The gradient of a shared key head is that through one of its query heads."""
    if dense.cotangent is None or dense.group_size == 1:
        return None
    truth, each_head = answer(dense), answer(dense.changed(group_size=1)).arrays
    of_one = {name: each_head[name][..., at % dense.group_size :: dense.group_size, :, :] for name in names}
    return truth.of(**{**truth.arrays, **of_one})


@given
def _bias_of_first(dense: Dense, axis: int) -> Answer | None:
    """The gradient of a bias that is broadcast along an axis comes from the first along it alone."""
    if dense.cotangent is None or dense.bias is None or dense.bias.shape[axis:][:1] not in ((), (1,)):
        return None
    truth, first = answer(dense), np.zeros_like(dense.cotangent)
    np.moveaxis(first, axis, 0)[0] = 1.0
    of_first = answer(dense.changed(cotangent=dense.cotangent * first)).arrays["bias"]
    return truth.of(**{**truth.arrays, "bias": of_first})


@given
def _recomputed(
    dense: Dense,
    d_scores: Callable[[NumpyArray, NumpyArray, NumpyArray], NumpyArray] = lambda p, dp, delta: p * (dp - delta),
    weights: Callable[[Dense, NumpyArray], NumpyArray | None] | None = None,
) -> Answer | None:
    """A backward pass with another derivative of the softmax, or with other weights by the logsumexp."""
    if dense.cotangent is None or not _is_plain(dense):
        return None
    truth, found = answer(dense), answer(dense.changed(cotangent=None)).arrays
    p = found["weights"] if weights is None else weights(dense, found["logsumexp"])
    if p is None:
        return None
    delta = (dense.cotangent * found["output"]).sum(axis=-1, keepdims=True)
    ds = d_scores(p, dense.cotangent @ np.swapaxes(dense.value, -1, -2), delta)
    size = dense.changed(query=abs(dense.query), key=abs(dense.key), scale=abs(dense.scale))
    sizes = _products(size.changed(cotangent=abs(dense.cotangent)), p, abs(ds))
    scales = {name: np.maximum(truth.scales[name], each) for name, each in sizes.items()}
    return Answer(_products(dense, p, ds), lambda: (scales, truth.kappa))


def _products(dense: Dense, p: NumpyArray, ds: NumpyArray) -> dict[str, NumpyArray]:
    """The gradients that come from weights and the gradient of the scores."""
    assert dense.cotangent is not None
    return {
        "query": dense.scale * (ds @ dense.key),
        "key": grouped(dense.scale * (np.swapaxes(ds, -1, -2) @ dense.query), dense),
        "value": grouped(np.swapaxes(p, -1, -2) @ dense.cotangent, dense),
    }


def _of_all_keys(dense: Dense, logsumexp: NumpyArray) -> NumpyArray | None:
    """Weights of masked keys too, divided by the sum of the others."""
    if dense.through.all():
        return None
    return np.where(np.isfinite(logsumexp)[..., None], np.exp(_scores(dense) - logsumexp[..., None]), 0)


def _gradients() -> Iterator[Variant]:
    for names, of in ((("query",), "the query"), (("key",), "the key"), (("query", "key"), "query and key")):
        name, of = f"gradient-of-{'-and-'.join(names)}", f"the gradient of {of}"
        unscaled = _factor(names, lambda dense: 1 / dense.scale if dense.scale else 1.0)
        yield Variant(f"{name}-unscaled", 7, f"{of} lacks the scale", unscaled)
        yield Variant(f"{name}-scaled-twice", 7, f"{of} is scaled twice", _factor(names, lambda dense: dense.scale))
    for names, of in ((("key", "value"), "keys and values"), (("key",), "keys"), (("value",), "values")):
        name, of = f"gradient-of-{'-and-'.join(names)}", f"the gradient of {of}"
        for at, which in enumerate(("last", "first"), -1):
            yield Variant(f"{name}-of-{which}-query-head", 9, f"{of} is from the {which} query head of a group alone",
                          _one_of_group(names, at))  # fmt: skip
        yield Variant(f"{name}-averaged", 9, f"{of} is the average over the query heads of a group, not the sum",
                      _factor(names, lambda dense: 1 / dense.group_size))  # fmt: skip
    for axis, word in ((-4, "sample"), (-3, "head"), (-2, "query")):
        says = f"the gradient of the bias is from the first {word} alone"
        yield Variant(f"gradient-of-bias-of-first-{word}", 1, says, _bias_of_first(axis))
    yield Variant("gradient-without-delta", 8, "the gradient of the softmax lacks the sum of p dp",
                  _recomputed(lambda p, dp, delta: p * dp))  # fmt: skip
    yield Variant("gradient-with-mean", 8, "the gradient of the softmax has the mean of dp for the sum of p dp",
                  _recomputed(lambda p, dp, delta: p * (dp - dp.mean(axis=-1, keepdims=True))))  # fmt: skip
    yield Variant("gradient-without-mask", 1, "the backward pass leaves out mask and causality",
                  _recomputed(weights=_of_all_keys))  # fmt: skip


def _edges() -> Iterator[Variant]:
    for last, end, near in ((False, "first", "before its first"), (True, "last", "after its last")):
        yield Variant(f"window-{end}-key-less", 2, f"a window lacks its {end} key", _edge(last, False))
        yield Variant(f"window-{end}-key-more", 2, f"a window has one key {near}", _edge(last, True))
    for edge in EDGES:
        one_more, one_less = shifted_from(1, edge), shifted_from(-1, edge)
        yield Variant(f"future-key-from-{edge}", 3, f"queries from {edge} on see one key of the future", one_more)
        yield Variant(
            f"strict-from-{edge}", 3, f"queries from {edge} on do not see the key at their position", one_less
        )
    for width in (64, 128):
        says = f"the scores lack channels from {width} on"
        yield Variant(f"width-from-{width}-lost", 10, says, _narrowed(functools.partial(min, width)))
    yield Variant("last-channels-lost", 10, "the scores lack the channels after the last 16 that are whole",
                  _narrowed(lambda size: size // 16 * 16 or size))  # fmt: skip
    for block in (8, *BLOCKS):
        yield Variant(f"ragged-block-of-{block}-lost", 10, f"keys after the last whole block of {block} are lost",
                      keys_left(functools.partial(_whole, block)))  # fmt: skip
    for block in BLOCKS:
        yield Variant(f"causality-by-blocks-of-{block}", 3, f"causality counts whole blocks of {block}",
                      _causal_by(functools.partial(_by_blocks, block)))  # fmt: skip


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


def _finite_bias(dense: Dense) -> NumpyArray | float:
    return 0.0 if dense.bias is None else np.where(np.isfinite(dense.bias), dense.bias, 0)


def _padded_scale(whole: int, dense: Dense) -> float:
    return float(max(whole, -(-dense.query.shape[-1] // whole) * whole) ** -0.5)


FINITE = Variant("bias-of-minus-10000", 4, "a bias of −10,000 stands for the mask: a fully masked row attends to all",
                 _unhidden)  # fmt: skip

DIAGNOSES = (
    FINITE,
    Variant("always-causal", 3, "causality is applied unasked",
            lambda dense: dense.changed(causal=0) if dense.causal is None else None),
    Variant("reversed-causality", 3, "a query sees the keys after it, and none before",
            _causal_by(lambda rows, columns: columns >= rows)),
    Variant("causality-of-first-query", 3, "all queries see what causality shows the first",
            _causal_by(lambda rows, columns: columns <= rows.min())),
    Variant("mask-or-causality", 1, "a query sees what the mask or causality shows, in place of what both show",
            _either),
    Variant("sink-of-zero", 8, "1 is added to the sum of the weights, as a sink of 0 adds it",
            lambda dense: dense.changed(sinks=np.zeros(dense.query.shape[-3], dense.query.dtype))
            if dense.sinks is None else None),
    Variant("mask-transposed", 1, "queries and keys of the mask are exchanged", _mask_transposed),
    Variant("keys-after-hidden-lost", 1, "a query attends to no key after the first that is hidden",
            lambda dense: None if dense.mask is None else dense.changed(
                mask=np.logical_and.accumulate(dense.through, axis=-1))),
    Variant("keys-beyond-queries-lost", 10, "keys beyond the number of queries are not attended to",
            lambda dense: keys_left(lambda at: at < dense.query.shape[-2])(dense)),
    Variant("softmax-over-queries", 8, "the weights sum to 1 over the queries",
            _of_weights(lambda dense: _softmax_over(dense, -2))),
    Variant("softmax-over-heads", 8, "the weights sum to 1 over the heads",
            _of_weights(lambda dense: _softmax_over(dense, -3))),
    Variant("masked-after-softmax", 1, "the weights of masked keys are 0, and still count in the sum of the weights",
            _of_weights(_masked_late)),
    Variant("powers-of-2", 7, "powers of 2 lack the factor log2(e) of the scores",
            scaled(lambda dense: dense.scale * math.log(2.0))),
    Variant("powers-of-e", 7, "the scores have a factor log2(e), and powers of e are taken",
            scaled(lambda dense: dense.scale / math.log(2.0))),
    Variant("heads-not-transposed", 9, "the output is reshaped where heads and queries are to be exchanged",
            _not_transposed),
    Variant("key-and-value-swapped", 10, "key and value are swapped", lambda dense:
            dense.changed(key=dense.value, value=dense.key) if dense.key.shape == dense.value.shape else None),
    Variant("not-divided", 8, "the output is not divided by the sum of the weights", _undivided),
    Variant("first-sample-of-key", 10, "all samples use the key of the first", first_of(-4, "key")),
    Variant("first-sample-of-value", 10, "all samples use the value of the first", first_of(-4, "value")),
    Variant("scale-ignored", 7, "the scale of the caller is not used; 1/√D is",
            scaled(lambda dense: dense.query.shape[-1] ** -0.5 if dense.query.shape[-1] else dense.scale)),
    *(Variant("scale-of-padded-width", 7, "the scale is that of a padded width",
              scaled(functools.partial(_padded_scale, whole))) for whole in BLOCKS[1:]),
    Variant("scale-of-value-width", 7, "the scale is that of the width of the values",
            lambda dense: dense.changed(scale=dense.value.shape[-1] ** -0.5) if dense.value.shape[-1] else None),
    Variant("value-rows-by-key-width", 10, "rows of the value are read as far apart as those of the key",
            functools.partial(_by_width, "value", "query")),
    Variant("key-rows-by-value-width", 10, "rows of the key are read as far apart as those of the value",
            functools.partial(_by_width, "key", "value")),
    Variant("softcap-before-scale", 7, "the softcap comes before the scale",
            _capped(lambda product, scale, cap: scale * cap * np.tanh(product / cap))),
    Variant("softcap-not-multiplied", 7, "tanh(score / softcap) is not multiplied by the softcap",
            _capped(lambda product, scale, cap: np.tanh(scale * product / cap))),
    Variant("softcap-not-divided", 7, "the score is not divided by the softcap",
            _capped(lambda product, scale, cap: cap * np.tanh(scale * product))),
    *(Variant("softcap-after-mask", 7, "the softcap comes after the mask, so that masked keys have weights",
              _cap_after_mask(before)) for before in (True, False)),
    Variant("sink-of-first-head", 7, "all heads get the sink of the first", lambda dense:
            None if dense.sinks is None else dense.changed(sinks=np.full_like(dense.sinks, dense.sinks[0]))),
    Variant("sink-twice", 7, "the sink is counted twice, as by two parts of the keys", lambda dense:
            None if dense.sinks is None else dense.changed(sinks=dense.sinks + math.log(2.0))),
    *(Variant("sink-unshifted", 7, "the sink is added to the sum without the shift by the maximum",
              _sink_unshifted(with_sink)) for with_sink in (True, False)),
    Variant("logsumexp-without-maximum", 6, "the logsumexp lacks the maximum", with_logsumexp(_without_maximum)),
    Variant("logsumexp-of-both-bases", 6, "the maximum is of base e, and the logarithm of the sum of base 2",
            with_logsumexp(lambda dense, truth:
                           _maximum(dense, truth) + _without_maximum(dense, truth) / math.log(2.0))),
    Variant("logsumexp-is-maximum", 6, "the logsumexp is the maximum alone", with_logsumexp(_maximum)),
    Variant("logsumexp-without-sinks", 6, "the logsumexp lacks the sinks", with_logsumexp(lambda dense, truth:
            None if dense.sinks is None else answer(dense.changed(sinks=None)).arrays["logsumexp"])),
    Variant("logsumexp-unscaled", 6, "the logsumexp is that of unscaled scores",
            with_logsumexp(lambda dense, truth: answer(dense.changed(scale=1.0)).arrays["logsumexp"])),
    Variant("value-heads-in-turn", 9, "query head h uses key head ⌊h / (H / G)⌋, and value head h % G",
            heads_in_turn("value")),
    Variant("key-heads-in-turn", 9, "query head h uses key head h % G, and value head ⌊h / (H / G)⌋",
            heads_in_turn("key")),
    *_gradients(),
    *_edges(),
)  # fmt: skip
"""Faults with which a wrong answer is compared, after those that are planted."""
