"""Further faults of attentions, with which a wrong answer is compared.

They are not planted in the definition, as that takes time in every case. A wrong answer is named by one of them only
where it equals that answer within the bound of the case, in each of its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from attention_conformance.oracle.dense import Answer, Dense, answer
from attention_conformance.oracle.variants import (
    Variant,
    first_of,
    heads_in_turn,
    keys_left,
    scaled,
    shifted_from,
    with_change,
    with_logsumexp,
)
from attention_conformance.problem import NumpyArray

__all__ = ["DIAGNOSES"]

BLOCKS = (16, 32, 64, 128)
EDGES = (16, 32, 128, 256, 512, 1024)
LONG_EDGES = (2048, 4096, 8192, 16384, 32768, 65535, 65536)


def _scores(dense: Dense) -> NumpyArray:
    """Scaled scores with their bias, where no softcap and no sinks are."""
    scores = (dense.scale * dense.query) @ np.swapaxes(dense.key, -1, -2)
    return scores if dense.bias is None else np.asarray(scores + dense.bias)


def _is_plain(dense: Dense) -> bool:
    finite = all(bool(np.isfinite(each).all()) for each in (dense.query, dense.key, dense.value))
    return finite and dense.softcap is None and dense.sinks is None and dense.uniform is None


def _forward_of(dense: Dense) -> Answer:
    return answer(dense.changed(cotangent=None))


def _capped(cap: Callable[[NumpyArray, float, float], NumpyArray]) -> Callable[[Dense], Answer | None]:
    """Another function of the product of query and key in place of the softcap."""

    def answered(dense: Dense) -> Answer | None:
        if dense.softcap is None or dense.cotangent is not None:
            return None
        scores = cap(dense.query @ np.swapaxes(dense.key, -1, -2), dense.scale, dense.softcap)
        bias = scores if dense.bias is None else scores + dense.bias
        return answer(dense.changed(softcap=None, scale=0.0, bias=bias))

    return answered


def _cap_after_mask(dense: Dense) -> Answer | None:
    if dense.softcap is None or dense.cotangent is not None or dense.through.all():
        return None
    scores = dense.softcap * np.tanh(dense.scale * dense.query @ np.swapaxes(dense.key, -1, -2) / dense.softcap)
    bias = np.where(dense.through, scores, -dense.softcap)
    return answer(dense.changed(softcap=None, scale=0.0, bias=bias, mask=None, causal=None))


def _of_weights(weights: Callable[[Dense], NumpyArray | None]) -> Callable[[Dense], Answer | None]:
    """The sum of the values by other weights."""

    def answered(dense: Dense) -> Answer | None:
        found = weights(dense) if dense.cotangent is None and _is_plain(dense) else None
        if found is None:
            return None
        return Answer({"output": found @ dense.value}, lambda: ({"output": found @ abs(dense.value)}, 0.0))

    return answered


def _softmax_over(axis: int, dense: Dense) -> NumpyArray | None:
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


def _narrowed(width: int, dense: Dense) -> Dense | None:
    kept = np.arange(dense.query.shape[-1]) < width
    return None if kept.all() else dense.changed(query=np.where(kept, dense.query, 0))


def _swapped(dense: Dense) -> Dense | None:
    same = dense.key.shape == dense.value.shape
    return dense.changed(key=dense.value, value=dense.key) if same else None


def _causal_by(see: Callable[[NumpyArray, NumpyArray], NumpyArray], dense: Dense) -> Dense | None:
    """Causality by another comparison of query and key positions."""
    if dense.causal is None:
        return None
    seen = see(dense.positions[0] + dense.causal, dense.positions[1])
    return dense.changed(causal=None, mask=seen if dense.mask is None else dense.mask & seen)


def _mask_transposed(dense: Dense) -> Dense | None:
    mask = dense.mask
    is_square = mask is not None and mask.shape[-1] == mask.shape[-2]
    return dense.changed(mask=np.swapaxes(mask, -1, -2)) if mask is not None and is_square else None


def _to_first_hidden(dense: Dense) -> Dense | None:
    return None if dense.mask is None else dense.changed(mask=np.logical_and.accumulate(dense.through, axis=-1))


def _sink_of_first_head(dense: Dense) -> Dense | None:
    return None if dense.sinks is None else dense.changed(sinks=np.full_like(dense.sinks, dense.sinks[0]))


def _sink_unshifted(with_sink: bool, dense: Dense) -> Answer | None:
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
    output = truth.arrays["output"] * factor[..., None]
    return Answer({"output": output, "logsumexp": top + np.log(total)}, truth.sizes)


def _undivided(dense: Dense) -> Answer | None:
    if dense.cotangent is not None:
        return None
    truth = answer(dense)
    top, logsumexp = _maximum(dense, truth), truth.arrays["logsumexp"]
    factor = np.exp(np.where(np.isfinite(top), logsumexp - top, 0))[..., None]
    return Answer({"output": truth.arrays["output"] * factor}, truth.sizes)


def _maximum(dense: Dense, truth: Answer) -> NumpyArray:
    top = np.log(truth.arrays["weights"].max(axis=-1, initial=0.0)) + truth.arrays["logsumexp"]
    return np.asarray(top if dense.sinks is None else np.maximum(top, dense.sinks[:, None]))


def _without_maximum(dense: Dense, truth: Answer) -> NumpyArray:
    top, logsumexp = _maximum(dense, truth), truth.arrays["logsumexp"]
    return np.where(np.isfinite(top), logsumexp - top, logsumexp)


def _without_sinks(dense: Dense, truth: Answer) -> NumpyArray | None:
    return None if dense.sinks is None else answer(dense.changed(sinks=None)).arrays["logsumexp"]


def _of_unscaled_scores(dense: Dense, truth: Answer) -> NumpyArray:
    return answer(dense.changed(scale=1.0)).arrays["logsumexp"]


def _not_rescaled(block: int, which: str, dense: Dense) -> Answer | None:
    """The running softmax, in which the sum or the output is not scaled when a new maximum comes."""
    keys = dense.key.shape[-2]
    if not block < keys <= 1100 or dense.cotangent is not None or not _is_plain(dense):
        return None
    scores = np.where(dense.through, _scores(dense), -np.inf)
    top = np.full((*scores.shape[:-1], 1), -np.inf, scores.dtype)
    total, output = np.zeros_like(top), np.zeros((*scores.shape[:-1], dense.value.shape[-1]), scores.dtype)
    for start in range(0, keys, block):
        part = scores[..., start : start + block]
        new = np.maximum(top, part.max(axis=-1, keepdims=True))
        safe = np.where(np.isfinite(new), new, 0)
        powers, factor = np.exp(part - safe), np.exp(top - safe)
        total = total * (1 if which != "output" else factor) + powers.sum(axis=-1, keepdims=True)
        output = output * (1 if which != "sum" else factor) + powers @ dense.value[..., start : start + block, :]
        top = new
    truth = answer(dense)
    return Answer({"output": output / np.where(total > 0, total, 1)}, truth.sizes)


def _twice_counted(block: int, dense: Dense) -> Dense | None:
    """The last block is moved to the end of the keys, and so overlaps the one before it."""
    keys = dense.key.shape[-2]
    if keys <= block or keys % block == 0:
        return None
    at = np.arange(keys)
    more = np.where((at >= keys - block) & (at < keys // block * block), math.log(2.0), 0.0)
    return dense.changed(bias=more if dense.bias is None else dense.bias + more)


def _in_whole_blocks(block: int, at: NumpyArray) -> NumpyArray:
    return np.asarray(at < at.size // block * block if at.size >= block else at >= 0)


def _in_blocks(block: int, rows: NumpyArray, columns: NumpyArray) -> NumpyArray:
    return np.asarray(columns // block <= rows // block)


def _edge(last: bool, more: bool, dense: Dense) -> Dense | None:
    """A window with one key more, or one less, at an end."""
    if dense.mask is None or dense.causal is not None or not dense.through.any():
        return None
    rows, columns = dense.positions
    distance = columns - rows if last else rows - columns
    end = np.where(dense.through, distance, -distance.size).max()
    return dense.changed(mask=dense.mask | (distance == end + 1) if more else dense.mask & (distance != end))


def _factor(names: tuple[str, ...], factor: Callable[[Dense], float]) -> Callable[[Dense], Answer | None]:
    """Some gradients times a number."""

    def answered(dense: Dense) -> Answer | None:
        number = factor(dense)
        if dense.cotangent is None or number == 1.0:
            return None
        truth = answer(dense)
        arrays = {name: each * number if name in names else each for name, each in truth.arrays.items()}
        return Answer(arrays, truth.sizes)

    return answered


def _first_of_group(names: tuple[str, ...], dense: Dense) -> Answer | None:
    """The gradient of a shared key head is that through its first query head."""
    if dense.cotangent is None or dense.group_size == 1:
        return None
    truth = answer(dense)
    each_head = answer(dense.changed(group_size=1)).arrays
    arrays = {n: each_head[n][..., :: dense.group_size, :, :] if n in names else a for n, a in truth.arrays.items()}
    return Answer(arrays, truth.sizes)


def _recomputed(
    weights: Callable[[Dense, NumpyArray, NumpyArray], NumpyArray | None],
    d_scores: Callable[[NumpyArray, NumpyArray, NumpyArray], NumpyArray] = lambda p, dp, delta: p * (dp - delta),
) -> Callable[[Dense], Answer | None]:
    """A backward pass with other weights, or with another derivative of the softmax."""

    def answered(dense: Dense) -> Answer | None:
        if dense.cotangent is None or not _is_plain(dense):
            return None
        found = _forward_of(dense).arrays
        p = weights(dense, found["weights"], found["logsumexp"])
        if p is None:
            return None
        delta = (dense.cotangent * found["output"]).sum(axis=-1, keepdims=True)
        ds = d_scores(p, dense.cotangent @ np.swapaxes(dense.value, -1, -2), delta)
        truth = answer(dense)
        arrays = _products(dense, p, ds)
        size = dense.changed(query=abs(dense.query), key=abs(dense.key), scale=abs(dense.scale))
        sizes = _products(size.changed(cotangent=abs(dense.cotangent)), p, abs(ds))
        scales = {name: np.maximum(truth.scales[name], each) for name, each in sizes.items()}
        return Answer(arrays, lambda: (scales, truth.kappa))

    return answered


def _products(dense: Dense, p: NumpyArray, ds: NumpyArray) -> dict[str, NumpyArray]:
    """The gradients that come from weights and the gradient of the scores."""
    assert dense.cotangent is not None
    return {
        "query": dense.scale * (ds @ dense.key),
        "key": _summed(dense.scale * (np.swapaxes(ds, -1, -2) @ dense.query), dense.group_size),
        "value": _summed(np.swapaxes(p, -1, -2) @ dense.cotangent, dense.group_size),
    }


def _summed(array: NumpyArray, size: int) -> NumpyArray:
    *leading, heads, rows, width = array.shape
    return np.asarray(array.reshape(*leading, heads // size, size, rows, width).sum(axis=-3))


def _same(dense: Dense, weights: NumpyArray, logsumexp: NumpyArray) -> NumpyArray:
    return weights


def _of_all_keys(dense: Dense, weights: NumpyArray, logsumexp: NumpyArray) -> NumpyArray | None:
    """Weights of masked keys too, divided by the sum of the others."""
    if dense.through.all():
        return None
    return np.where(np.isfinite(logsumexp)[..., None], np.exp(_scores(dense) - logsumexp[..., None]), 0)


def _gradients() -> Iterator[Variant]:
    for names, of in ((("query",), "the query"), (("key",), "the key"), (("query", "key"), "query and key")):
        name = "-and-".join(names)
        yield Variant(f"gradient-of-{name}-unscaled", 7, f"the gradient of {of} lacks the scale",
                      _factor(names, lambda dense: 1 / dense.scale if dense.scale else 1.0))  # fmt: skip
        yield Variant(f"gradient-of-{name}-scaled-twice", 7, f"the gradient of {of} is scaled twice",
                      _factor(names, lambda dense: dense.scale))  # fmt: skip
    for names, of in ((("key", "value"), "keys and values"), (("key",), "keys"), (("value",), "values")):
        name = "-and-".join(names)
        yield Variant(f"gradient-of-{name}-of-first-query-head", 9,
                      f"the gradient of {of} comes from the first query head of a group alone",
                      partial(_first_of_group, names))  # fmt: skip
        yield Variant(f"gradient-of-{name}-averaged", 9,
                      f"the gradient of {of} is the average over the query heads of a group, not the sum",
                      _factor(names, lambda dense: 1 / dense.group_size))  # fmt: skip
    yield Variant("gradient-without-delta", 8, "the gradient of the softmax lacks the sum of p dp",
                  _recomputed(_same, lambda p, dp, delta: p * dp))  # fmt: skip
    yield Variant("gradient-with-mean", 8, "the gradient of the softmax has the mean of dp for the sum of p dp",
                  _recomputed(_same, lambda p, dp, delta: p * (dp - dp.mean(axis=-1, keepdims=True))))  # fmt: skip
    yield Variant("gradient-without-mask", 1, "the backward pass leaves out mask and causality",
                  _recomputed(_of_all_keys))  # fmt: skip


def _edges() -> Iterator[Variant]:
    for last, end in ((False, "first"), (True, "last")):
        yield Variant(f"window-{end}-key-less", 2, f"a window lacks its {end} key",
                      with_change(partial(_edge, last, False)))  # fmt: skip
        nearby = "after its last" if last else "before its first"
        yield Variant(f"window-{end}-key-more", 2, f"a window has one key {nearby}",
                      with_change(partial(_edge, last, True)))  # fmt: skip
    for edge in EDGES:
        yield Variant(f"future-key-from-{edge}", 3, f"queries from {edge} on see one key of the future",
                      with_change(shifted_from(1, edge)))  # fmt: skip
        yield Variant(f"strict-from-{edge}", 3, f"queries from {edge} on do not see the key at their position",
                      with_change(shifted_from(-1, edge)))  # fmt: skip
    for edge in (*EDGES, *LONG_EDGES):
        yield Variant(f"keys-from-{edge}-lost", 10, f"keys from {edge} on are not attended to",
                      with_change(keys_left(partial(np.greater, edge))))  # fmt: skip
    yield Variant("ragged-block-of-8-lost", 10, "keys after the last whole block of 8 are lost",
                  with_change(keys_left(partial(_in_whole_blocks, 8))))  # fmt: skip
    for width in (64, 128):
        yield Variant(f"width-from-{width}-lost", 10, f"the scores lack channels from {width} on",
                      with_change(partial(_narrowed, width)))  # fmt: skip
    for block in BLOCKS:
        yield Variant(f"causality-by-blocks-of-{block}", 3, f"causality counts whole blocks of {block}",
                      with_change(partial(_causal_by, partial(_in_blocks, block))))  # fmt: skip
        if block != 64:
            yield Variant(f"ragged-block-of-{block}-lost", 10, f"keys after the last whole block of {block} are lost",
                          with_change(keys_left(partial(_in_whole_blocks, block))))  # fmt: skip
        yield Variant(f"ragged-block-of-{block}-twice", 10,
                      f"the last block of {block} keys overlaps the one before, whose keys count twice",
                      with_change(partial(_twice_counted, block)))  # fmt: skip
        yield Variant(f"stale-sum-of-{block}", 8,
                      f"the sum of weights is not scaled when a block of {block} keys brings a new maximum",
                      partial(_not_rescaled, block, "sum"))  # fmt: skip
        yield Variant(f"stale-output-of-{block}", 8,
                      f"the output is not scaled when a block of {block} keys brings a new maximum",
                      partial(_not_rescaled, block, "output"))  # fmt: skip
        yield Variant(f"stale-maximum-of-{block}", 8,
                      f"sum and output are not scaled when a block of {block} keys brings a new maximum",
                      partial(_not_rescaled, block, "both"))  # fmt: skip


DIAGNOSES = (
    Variant("always-causal", 3, "causality is applied unasked",
            with_change(lambda dense: dense.changed(causal=0) if dense.causal is None else None)),
    Variant("reversed-causality", 3, "a query sees the keys after it, and none before",
            with_change(partial(_causal_by, lambda rows, columns: columns >= rows))),
    Variant("causality-of-first-query", 3, "all queries see what causality shows the first",
            with_change(partial(_causal_by, lambda rows, columns: columns <= rows.min()))),
    Variant("sink-of-zero", 8, "1 is added to the sum of the weights, as a sink of 0 adds it",
            with_change(lambda dense: dense.changed(sinks=np.zeros(dense.query.shape[-3], dense.query.dtype))
                        if dense.sinks is None else None)),
    Variant("mask-transposed", 1, "queries and keys of the mask are exchanged", with_change(_mask_transposed)),
    Variant("keys-after-hidden-lost", 1, "a query attends to no key after the first that is hidden",
            with_change(_to_first_hidden)),
    Variant("keys-beyond-queries-lost", 10, "keys beyond the number of queries are not attended to",
            with_change(lambda dense: keys_left(lambda at: at < dense.query.shape[-2])(dense))),
    Variant("softmax-over-queries", 8, "the weights sum to 1 over the queries",
            _of_weights(partial(_softmax_over, -2))),
    Variant("softmax-over-heads", 8, "the weights sum to 1 over the heads", _of_weights(partial(_softmax_over, -3))),
    Variant("masked-after-softmax", 1, "the weights of masked keys are 0, and still count in the sum of the weights",
            _of_weights(_masked_late)),
    Variant("powers-of-2", 7, "powers of 2 lack the factor log2(e) of the scores",
            with_change(scaled(lambda dense: dense.scale * math.log(2.0)))),
    Variant("powers-of-e", 7, "the scores have a factor log2(e), and powers of e are taken",
            with_change(scaled(lambda dense: dense.scale / math.log(2.0)))),
    Variant("heads-not-transposed", 9, "the output is reshaped where heads and queries are to be exchanged",
            _not_transposed),
    Variant("key-and-value-swapped", 10, "key and value are swapped", with_change(_swapped)),
    Variant("not-divided", 8, "the output is not divided by the sum of the weights", _undivided),
    Variant("first-sample-of-key", 10, "all samples use the key of the first",
            with_change(first_of(-4, "key"))),
    Variant("first-sample-of-value", 10, "all samples use the value of the first",
            with_change(first_of(-4, "value"))),
    Variant("scale-ignored", 7, "the scale of the caller is not used; 1/√D is",
            with_change(lambda dense: dense.changed(scale=dense.query.shape[-1] ** -0.5)
                        if dense.query.shape[-1] and dense.scale != dense.query.shape[-1] ** -0.5 else None)),
    Variant("scale-of-value-width", 7, "the scale is that of the width of the values",
            with_change(lambda dense: dense.changed(scale=dense.value.shape[-1] ** -0.5)
                        if dense.value.shape[-1] else None)),
    Variant("softcap-before-scale", 7, "the softcap comes before the scale",
            _capped(lambda product, scale, cap: scale * cap * np.tanh(product / cap))),
    Variant("softcap-not-multiplied", 7, "tanh(score / softcap) is not multiplied by the softcap",
            _capped(lambda product, scale, cap: np.tanh(scale * product / cap))),
    Variant("softcap-not-divided", 7, "the score is not divided by the softcap",
            _capped(lambda product, scale, cap: cap * np.tanh(scale * product))),
    Variant("softcap-after-mask", 7, "the softcap comes after the mask, so that masked keys have weights",
            _cap_after_mask),
    Variant("sink-of-first-head", 7, "all heads get the sink of the first", with_change(_sink_of_first_head)),
    Variant("sink-unshifted", 7, "the sink is added to the sum without the shift by the maximum",
            partial(_sink_unshifted, True)),
    Variant("sink-unshifted", 7, "the sink is added to the sum without the shift by the maximum",
            partial(_sink_unshifted, False)),
    Variant("logsumexp-without-maximum", 6, "the logsumexp lacks the maximum", with_logsumexp(_without_maximum)),
    Variant("logsumexp-is-maximum", 6, "the logsumexp is the maximum alone", with_logsumexp(_maximum)),
    Variant("logsumexp-without-sinks", 6, "the logsumexp lacks the sinks", with_logsumexp(_without_sinks)),
    Variant("logsumexp-unscaled", 6, "the logsumexp is that of unscaled scores", with_logsumexp(_of_unscaled_scores)),
    Variant("value-heads-in-turn", 9, "query head h uses key head ⌊h / (H / G)⌋, and value head h % G",
            with_change(heads_in_turn("value"))),
    Variant("key-heads-in-turn", 9, "query head h uses key head h % G, and value head ⌊h / (H / G)⌋",
            with_change(heads_in_turn("key"))),
    *_gradients(),
    *_edges(),
)  # fmt: skip
"""Faults with which a wrong answer is compared, after those that are planted."""
