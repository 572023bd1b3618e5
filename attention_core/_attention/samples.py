"""Ragged batches: each sample apart, with the keys that its own lengths leave."""

from __future__ import annotations

import itertools
import math

from attention_core._arrays import Array
from attention_core._attention.call import Attention, Call
from attention_core._attention.dense import dense, plan_dense
from attention_core._attention.key_range import KeyCut, find_cut, key_ranges, with_cut
from attention_core._backend import is_concrete
from attention_core.masks._rules import is_of_lengths, sample_masks

MIN_SAVED = 2**16  # numbers of keys and values of a sample: they take as long to read as a call of its own costs


def sample_calls(call: Call) -> list[Call] | None:
    """A call for each sample, with its own lengths as numbers, and keys cut by them; ``None`` where that saves nothing.

    Libraries that trace do not read lengths, and those that differentiate would join gradients of pieces.
    """
    leading, count = call.query.shape[:-3], math.prod(call.query.shape[:-3])
    if count < 2 or not is_of_lengths(call.mask) or call.mask.is_relative():  # type: ignore[union-attr]
        return None
    if call.backend.loops.traced or call.backend.differentiates or not all(map(is_concrete, call[:3])):
        return None
    if call.bias is not None or call.score_mod is not None or call.dropout is not None:  # which tell samples apart
        return None
    ranges = key_ranges(call)
    if ranges is None or len(ranges) < count or call.starts[1] != 0:
        return None
    if not _saves_enough(call, [max(0, each.stop - each.first) for each in ranges]):
        return None
    are_whole = all(each.every_first <= each.first < each.stop <= each.every_stop for each in ranges)
    masks = [None] * count if are_whole else sample_masks(call.mask, leading)  # type: ignore[arg-type]
    calls = []
    for at, keys, mask in zip(itertools.product(*map(range, leading)), ranges, masks, strict=True):
        of_sample = call._replace(query=call.query[at], key=call.key[at], value=call.value[at], mask=mask)
        cut = KeyCut(keys.first, keys.stop, None, (0, 0)) if are_whole else find_cut(of_sample)
        calls.append(with_cut(of_sample, cut))
    return calls


def _saves_enough(call: Call, lengths: list[int]) -> bool:
    """Whether samples with so many keys leave out more of those of the longest than their calls cost."""
    numbers_per_key: int = call.key.shape[-3] * (call.key.shape[-1] + call.value.shape[-1])
    return (max(lengths) - sum(lengths) / len(lengths)) * numbers_per_key >= MIN_SAVED


def attend_per_sample(calls: list[Call], leading: tuple[int, ...], *, logsumexp: bool) -> Attention:
    """The results of `sample_calls`, with the axes of the batch."""
    xp = calls[0].xp
    plan = None if any(call.mask is not None for call in calls) else plan_dense(calls[0])
    results = [dense(call, logsumexp=logsumexp, plan=plan) for call in calls]

    def join(parts: list[Array]) -> Array:
        return xp.reshape(xp.stack(parts), (*leading, *parts[0].shape))

    found = join([each.logsumexp for each in results]) if logsumexp else None
    return Attention(join([each.output for each in results]), None, found)
