"""Options of kernels at the sizes of several blocks: causality with more queries, softcap, sinks and biases."""

import functools

import numpy as np
import planted_kernels as planted
import pytest
from planted_kernels import TAKES, found, verdict_of

from attention_conformance import Subject
from attention_conformance.kernel.probe import settled


def test_a_kernel_that_counts_from_the_bottom_right_does_so_with_more_queries_too():
    takes = TAKES | {"causal": "bottom-right"}
    case = "shape-130x65-causal"
    assert found(Subject(planted.Kernel("bottom right"), **takes), case)[case].verdict == "right"
    got = verdict_of(Subject(planted.Kernel("bottom right of more keys alone"), **takes), case)
    assert got == ("differs by convention", "top-left-causal")


def capped(query, key, value, is_causal=False, softcap=None, sinks=None, *, fault=""):
    """Softcap and sinks for blocks of 64 keys."""
    size = query.shape[1] // key.shape[1]
    key, value = (np.repeat(each, size, axis=1) for each in (key, value))
    scores = query @ np.swapaxes(key, -1, -2) / np.float32(query.shape[-1] ** 0.5)
    if softcap and not (fault == "no softcap of many keys" and key.shape[-2] > 512):
        last = 64 if fault == "softcap of the first block" else None
        scores[..., :last] = softcap * np.tanh(scores[..., :last] / np.float32(softcap))
    if is_causal:
        hidden = -softcap if softcap and fault == "mask before softcap" else -np.inf
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, np.float32(hidden))
    if sinks is not None:
        of_heads = np.repeat(sinks[::size], size) if fault == "sinks of key heads" else sinks
        is_split = fault == "a sink for each half" and key.shape[-2] > 512
        count = -(-key.shape[-2] // 64) if fault == "a sink for each block" else 1 + is_split
        sink = np.broadcast_to(of_heads[:, None, None], (*scores.shape[:-1], 1))
        sink = sink + scores.max(axis=-1, keepdims=True) * (fault == "sink beyond the maximum")
        scores = np.concatenate([scores, *[sink] * count], axis=-1).astype(query.dtype)
    if fault == "old scores":  # stay where the last block has no key
        scores = np.concatenate([scores, scores[..., key.shape[-2] - 64 : key.shape[-2] // 64 * 64]], axis=-1)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return ((powers / powers.sum(axis=-1, keepdims=True))[..., : key.shape[-2]] @ value).astype(query.dtype)


FAULTS = {
    "softcap of the first block": ("softcap-130", ""), "mask before softcap": ("softcap-130", "softcap-after-mask"), "no softcap of many keys": ("softcap-65x1025", "no-softcap"),
    "sinks of key heads": ("sinks-grouped-130", "sinks-of-others"), "a sink for each block": ("sinks-grouped-130", ""),
    "a sink for each half": ("sinks-1x1100", "sink-twice"), "sink beyond the maximum": ("sinks-1x1100", "sink-beyond-maximum"), "old scores": ("shape-65x130-plain", "other-sum"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_softcap_sinks_and_sums_of_several_blocks_and_grouped_heads_are_checked(fault):
    case, cause = FAULTS[fault]
    for each, verdict in (("", ("right", "")), (fault, ("silently wrong", cause))):
        kernel = settled(Subject(functools.partial(capped, fault=each), backend="numpy"))
        assert (kernel.softcap_name, kernel.sinks_name) == ("softcap", "sinks")
        told = found(kernel, case)[case]
        assert told.verdict == verdict[0]
        assert verdict[1] in ("", told.variant)
