"""Cases of pairs of settings, and cases of calls: faults that no other case shows."""

import functools
import itertools

import numpy as np
import planted_kernels as planted
import pytest
from planted_kernels import TAKES, found

from attention_conformance import Subject
from attention_conformance.cases.pairs import TABLE
from attention_conformance.run.job import Job
from attention_conformance.run.questions import questions


def formula(fault=""):
    """A plain formula, but for what becomes of its masks and weights."""
    kept = {}

    def attention(query, key, value, mask=None, is_causal=False, scale=None):
        rows, columns = query.shape[-2], key.shape[-2]
        if fault == "causality lost next to a mask of heads" and mask is not None and mask.shape[1] > 1:
            is_causal = False
        if fault == "a mask's buffer read from its start" and mask is not None and mask.base is not None:
            mask = np.ravel(mask.base)[: mask.size].reshape(mask.shape)
        if fault == "masks kept by their sum" and mask is not None:
            mask = kept.setdefault((mask.shape, int(mask.sum())), mask.copy())
        if fault == "masks kept by their memory" and mask is not None:
            mask = kept.setdefault((mask.ctypes.data, mask.shape), (mask.copy(), mask))[0]
        allowed = np.ones((rows, columns), bool) if mask is None else mask
        allowed = allowed & np.tri(rows, columns, dtype=bool) if is_causal else allowed
        size = query.shape[1] // key.shape[1]
        key, value = (np.repeat(each, size, axis=1) for each in (key, value))
        with np.errstate(all="ignore"):
            scores = query @ np.swapaxes(key, -1, -2) * np.float32(query.shape[-1] ** -0.5 if scale is None else scale)
            low = scores.min() - 30 if fault == "masked scores 30 below the others" else np.float32(-np.inf)
            scores = np.where(allowed, scores, low)
            top = scores[..., -64:] if fault == "the maximum of the last block" else scores
            weights = np.exp(scores - top.max(axis=-1, keepdims=True))
            if fault == "small weights dropped":
                weights = np.where(weights < 1e-4, 0, weights)
            output = weights @ value / weights.sum(axis=-1, keepdims=True)
        if fault == "channels of values beyond 64 lost" and value.shape[-1] > 64 != query.shape[-1]:
            output[..., 64:] = 0
        return output.astype(query.dtype)

    return attention


FORMULA = {
    "causality lost next to a mask of heads": "mask-of-heads-and-causal",
    "a mask's buffer read from its start": "memory-mask-misaligned",
    "masks kept by their sum": "after-rolled-mask",
    "masks kept by their memory": "same-memory-mask",
    "masked scores 30 below the others": "masked-large-value",
    "the maximum of the last block": "steeply-falling-scores",
    "small weights dropped": "small-weights",
    "channels of values beyond 64 lost": "narrow-values-128",
}


def with_fault(fault=""):
    """The honest kernel, but for one setting."""

    def attention(query, key, value, mask=None, is_causal=False, scale=None):
        (batch, heads, rows, width), groups, columns = query.shape, key.shape[1], key.shape[2]
        size = heads // groups
        if fault == "key heads in turn for groups of 4" and size == 4 and rows > 1:
            key, value = (np.tile(each, (1, size, 1, 1)) for each in (key, value))
        if fault == "key heads in turn for one sample" and batch == 1 and groups > 1 and size > 1:
            key, value = (np.tile(each, (1, size, 1, 1)) for each in (key, value))
        if fault == "no causality for groups of 4" and size == 4 and rows > 1:
            is_causal = False
        if fault == "no causality from the third sample on" and is_causal and batch > 2:
            mask = np.ones((1, 1, rows, columns), bool) if mask is None else mask
            mask = np.broadcast_to(mask, (batch, *mask.shape[1:])) & np.tri(rows, columns, dtype=bool)
            mask, is_causal = np.concatenate([mask[:2], mask[2:] | ~np.tri(rows, columns, dtype=bool)]), False
        if fault == "one key of the future in whole blocks of 256" and is_causal and rows == columns == 256:
            seen = np.tri(rows, columns, 1, dtype=bool)
            mask, is_causal = seen if mask is None else mask & seen, False
        if fault == "mask of the first head for all samples" and mask is not None and mask.shape[:2] == (1, heads):
            mask = mask[:, :1]
        if fault == "mask of keys of the first head" and mask is not None and rows > 1 and mask.shape[2] == 1:
            mask = mask[:, :1]
        if fault == "mask of one sample for two alone" and mask is not None and batch > 2 and mask.shape[0] == 1:
            mask = np.concatenate([mask, mask, np.ones((batch - 2, *mask.shape[1:]), bool)])
        if fault == "mask of queries ignored" and mask is not None and mask.shape[3] < columns:
            mask = None
        if fault == "decoding loses the mask of heads" and mask is not None and rows == 1:
            mask = mask[:, :1]
        if fault == "stated scale lost in decoding" and rows == 1:
            scale = None
        if fault == "a part of a cache taken for contiguous in decoding" and rows == 1 and value.base is not None:
            value = np.ravel(value.base)[: value.size].reshape(value.shape)
        if fault in WIDTHS and width == WIDTHS[fault]:
            query = np.concatenate([query[..., : width // 32 * 32], np.zeros_like(query[..., width // 32 * 32 :])], -1)
        if fault == "decoding without the maximum" and rows == 1:
            with np.errstate(all="ignore"):
                return planted.Kernel("no maximum")(query, key, value, mask, is_causal, scale)
        return planted.attention(query, key, value, mask, is_causal, scale)

    return attention


WIDTHS = {f"the end of {width} channels lost": width for width in (40, 48, 112)}

SETTINGS = {
    # fault: the case that shows it
    "key heads in turn for groups of 4": "pair-65x200-head-keys",
    "key heads in turn for one sample": "pair-33x33-causal",
    "no causality for groups of 4": "pair-256x256-causal",
    "no causality from the third sample on": "pair-65x200-causal",
    "one key of the future in whole blocks of 256": "pair-256x256-causal",
    "mask of the first head for all samples": "pair-128x128-heads",
    "mask of keys of the first head": "pair-65x200-head-keys",
    "mask of one sample for two alone": "mask-of-samples",
    "mask of queries ignored": "mask-of-queries",
    "decoding loses the mask of heads": "pair-1x129-heads",
    "stated scale lost in decoding": "pair-1x129-plain",
    "a part of a cache taken for contiguous in decoding": "pair-1x129-plain",
    "decoding without the maximum": "pair-1x256-plain",
    "the end of 40 channels lost": "ladder-33x40-plain",
    "the end of 48 channels lost": "ladder-20x48-mask",
    "the end of 112 channels lost": "ladder-65x112-causal",
}


def test_any_two_values_of_the_settings_are_together_in_a_row():
    sizes, *others = zip(*((row[:2], *row[2:4], row[4:6], *row[6:]) for row in TABLE), strict=True)
    for first, second in itertools.combinations([sizes, *others], 2):
        assert set(zip(first, second, strict=True)) == set(itertools.product(set(first), set(second)))


@pytest.mark.parametrize(
    ("make", "fault", "case"),
    [*((with_fault, *each) for each in SETTINGS.items()), *((formula, *each) for each in FORMULA.items())],
)
@pytest.mark.needs("numpy")
def test_a_fault_of_one_setting_or_of_a_corner_is_caught(make, fault, case):
    verdicts = [found(Subject(make(each), **TAKES), case)[case].verdict for each in ("", fault)]
    assert verdicts[0] == "right"
    assert verdicts[1] in ("silently wrong", "visibly wrong")


@pytest.mark.needs("numpy")
def test_a_few_cases_are_run_in_the_other_types_unless_dtypes_are_asked_for():
    def asked(**job):
        dtypes = ("float16", "bfloat16", "float32", "float64")
        subject = Subject(with_fault(), **TAKES | {"dtypes": dtypes})
        return {each.dtype for each in questions(subject, Job("", **job), None)}

    assert asked() == {"float16", "bfloat16", "float32", "float64"}
    assert asked(dtypes=("float32",)) == {"float32"}


@pytest.mark.needs("torch")
def test_a_second_backward_pass_one_array_for_all_and_a_shared_bias_are_checked():
    import torch

    def attention(query, key, value, bias=None, is_causal=False, fault=""):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if bias is not None:
            bias = bias.expand(*bias.shape[:1], scores.shape[1], *bias.shape[2:])
            rest = bias[:, 1:].detach() if fault == "bias of the first head" else bias[:, 1:]
            scores = scores + torch.cat([bias[:, :1], rest], dim=1)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=bool).tril(), -torch.inf)
        output = scores.softmax(-1) @ value
        if fault == "adds up" and value.requires_grad:
            seen = []
            value.register_hook(lambda gradient: seen.append(gradient) or sum(seen))
        if fault == "one array" and query.data_ptr() == key.data_ptr():
            output = scores.detach().softmax(-1) @ value
        return output

    cases = {
        "adds up": "gradient-of-one-graph-twice",
        "one array": "gradient-memory-one-array",
        "bias of the first head": "gradient-bias-of-samples",
    }
    for fault, case in cases.items():
        for each, verdict in (("", "right"), (fault, "silently wrong")):
            subject = Subject(functools.partial(attention, fault=each), backend="torch")
            assert found(subject, case)[case].verdict == verdict
