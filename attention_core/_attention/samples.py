"""Ragged batches: each sample apart, with the keys that its own lengths leave."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from attention_core._arrays import Array
from attention_core._attention.call import Attention, Call
from attention_core._attention.definition import guarded_dense
from attention_core._attention.facts import lasting_facts
from attention_core._attention.key_range import KeyCut, find_cut, key_ranges, with_cut
from attention_core._backend import is_concrete
from attention_core.masks._mask import KeyRange
from attention_core.masks._rules import is_of_lengths, sample_masks

MIN_SAVED = 2**16  # numbers of keys and values of a sample: they take as long to read as a call of its own costs


def cuts_that_save(call: Call) -> list[KeyCut] | None:
    """The cuts of samples of a ragged batch; ``None`` where to take these apart saves no time, or is not known to.

    Libraries that trace do not read lengths, and those that differentiate would join gradients of pieces.
    """
    backend = call.backend
    if call.mask is None or backend.loops.traced or backend.differentiates or not all(map(is_concrete, call[:3])):
        return None
    if call.bias is not None or call.score_mod is not None or call.dropout is not None:  # which tell samples apart
        return None
    ranges = sample_ranges(call)
    if ranges is None or not _saves_enough(call, [max(0, each.stop - each.first) for each in ranges]):
        return None
    return sample_cuts(call, ranges)


def sample_calls(call: Call, cuts: list[KeyCut]) -> list[Call]:
    """A call (H, M, D) for each sample of a batch, with the keys of its own cut."""
    return [with_cut(each, cut) for each, cut in zip(_samples(call), cuts, strict=True)]


def sample_ranges(call: Call) -> list[KeyRange] | None:
    """The keys of each sample of a ragged batch; ``None`` of other batches, and where they are not known."""
    mask: Any = call.mask
    count = math.prod(call.query.shape[:-3])
    if count < 2 or not is_of_lengths(mask) or mask.is_relative():
        return None
    ranges = key_ranges(call)
    return ranges if ranges is not None and len(ranges) == count else None


def sample_cuts(call: Call, ranges: list[KeyRange]) -> list[KeyCut]:
    """The keys that the lengths of each sample leave, and the mask of numbers that is left for them."""
    if all(each.every_first <= each.first < each.stop <= each.every_stop for each in ranges):
        return [KeyCut(each.first, each.stop, None, (0, 0)) for each in ranges]
    mask: Any = call.mask
    samples = [
        each._replace(mask=rule)
        for each, rule in zip(_samples(call), sample_masks(mask, call.query.shape[:-3]), strict=True)
    ]
    return [find_cut(each) or KeyCut(0, each.key.shape[-2], each.mask, each.starts) for each in samples]


def _samples(call: Call) -> Iterator[Call]:
    """Calls of samples (H, M, D), under the mask of all."""
    for index in itertools.product(*map(range, call.query.shape[:-3])):
        at = (*index, ...)
        yield call._replace(query=call.query[at], key=call.key[at], value=call.value[at])


def _saves_enough(call: Call, lengths: list[int]) -> bool:
    """Whether samples with so many keys leave out more of those of the longest than their calls cost."""
    numbers_per_key: int = call.key.shape[-3] * (call.key.shape[-1] + call.value.shape[-1])
    return (max(lengths) - sum(lengths) / len(lengths)) * numbers_per_key >= MIN_SAVED


def attend_per_sample(call: Call, cuts: list[KeyCut], *, logsumexp: bool) -> Attention:
    """The results of `sample_calls`, with the axes of the batch."""
    calls, xp, leading = sample_calls(call, cuts), call.xp, call.query.shape[:-3]
    facts = None if any(cut.mask is not None for cut in cuts) else lasting_facts(calls[0])
    results = [guarded_dense(each, facts, logsumexp=logsumexp) for each in calls]

    def join(parts: list[Array]) -> Array:
        return xp.reshape(xp.stack(parts), (*leading, *parts[0].shape))

    found = join([each.logsumexp for each in results]) if logsumexp else None
    return Attention(join([each.output for each in results]), None, found)
