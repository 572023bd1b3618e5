"""Cases of drawn shapes, their relations, and corners: faults that no other case shows."""

import functools
import itertools

import numpy as np
import planted_kernels as planted
import pytest
from planted_kernels import TAKES, found

from attention_conformance import Subject
from attention_conformance.cases.shapes import ALWAYS, KEYS, MEMORY, RELATIONS, RULES, case_of, drawn, shape_of
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
        if fault == "channels after the last whole 8 lost":
            query = query[..., : query.shape[-1] // 8 * 8]
            key = key[..., : query.shape[-1]]
        if fault == "heads counted in a byte":
            query = query[:, np.arange(query.shape[1]) % 256]
        size = query.shape[1] // key.shape[1]
        key, value = (np.repeat(each, size, axis=1) for each in (key, value))
        with np.errstate(all="ignore"):
            width = query.shape[-1]
            width = -(-width // 64) * 64 if fault == "the scale of widths beyond 128, padded" and width > 128 else width
            scores = query @ np.swapaxes(key, -1, -2) * np.float32(width**-0.5 if scale is None else scale)
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
    "a mask's buffer read from its start": "shape-70x130-h3on3-maskbhm-offsetmask",
    "masks kept by their sum": "after-rolled-mask",
    "masks kept by their memory": "shape-20x34-mask-rewritten",
    "masked scores 30 below the others": "masked-large-value",
    "the maximum of the last block": "steeply-falling-scores",
    "small weights dropped": "small-weights",
    "channels of values beyond 64 lost": "shape-33x65-d192e128-causal",
    "channels after the last whole 8 lost": ALWAYS[1].name,
    "heads counted in a byte": ALWAYS[0].name,
    "the scale of widths beyond 128, padded": next(each.name for each, _ in drawn() if each.width == 160),
}


def level(classes, value):
    return next(number for number, each in enumerate(classes) if value in each)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_any_three_settings_of_a_call_meet_in_a_drawn_shape(seed):
    """But for heads, queries and samples, of which large calls have fewer."""
    rows = [
        (
            level(KEYS, each.keys),
            level(RULES, each.rule),
            level(MEMORY, each.memory),
            RELATIONS.index(each.relation),
            narrow,
        )
        for each, narrow in drawn(seed)
        if each not in ALWAYS
    ]
    for axes in itertools.combinations(zip(*rows, strict=True), 3):
        lost = set(itertools.product(*map(set, axes))) - set(zip(*axes, strict=True))
        assert len(lost) <= 14  # nobody writes into memory that is expanded


def test_a_name_tells_all_of_a_shape_and_makes_the_same_case():
    for shape, _ in drawn(0):
        assert shape_of(shape.name) == shape
    first, second = (case_of(shape_of("shape-3x70-h4on2-ragged-permuted")).problem("float32") for _ in range(2))
    assert all((first.arrays[name] == second.arrays[name]).all() for name in first.arrays)
    assert shape_of("shape-3x70-h4on3-plain") is shape_of("shape-0x0") is shape_of("shape-3x70-odd") is None


@pytest.mark.parametrize(("fault", "case"), FORMULA.items())
def test_a_fault_of_a_corner_is_caught(fault, case):
    verdicts = [found(Subject(formula(each), **TAKES), case)[case].verdict for each in ("", fault)]
    assert verdicts[0] == "right"
    assert verdicts[1] in ("silently wrong", "visibly wrong")


def test_a_few_cases_are_run_in_the_other_types_unless_dtypes_are_asked_for():
    def asked(**job):
        dtypes = ("float16", "bfloat16", "float32", "float64")
        kernel = Subject(planted.Kernel(), **TAKES | {"dtypes": dtypes})
        return {each.dtype for each in questions(kernel, Job("", **job))}

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
            kernel = Subject(functools.partial(attention, fault=each), backend="torch")
            assert found(kernel, case)[case].verdict == verdict
