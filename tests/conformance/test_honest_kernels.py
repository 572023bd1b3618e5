"""Honest kernels of many habits are understood, and called right."""

import numpy as np
import planted_kernels as planted
import pytest
from planted_kernels import found

from attention_conformance import Subject
from attention_conformance.kernel.probe import settled

HONEST = (
    "mask",
    "mask-of-*",
    "masked-nan-*",
    "causal-more-*",
    "empty-row-*",
    "grouped-heads",
    "scale",
    "shape-64x64-d16-causal",
    "shape-129x129-d16-mask",
    "shape-129x129-d64-causal",
    "shape-1x7-plain",
    "shape-3x129-lengths",
    "shape-130x65-causal",
    "shape-65x130-causal",
    "shape-70x200-mask",
    "shape-9x1025-h4on2-d64-mask",
    "shape-18x34-h3on3-plain-permuted",
    "decode-*",
)


def bshd(q, k, v, attn_mask=None, causal=False, softmax_scale=None):
    """FlashAttention's axes and names."""
    turned = (np.swapaxes(each, 1, 2) for each in (q, k, v))
    return np.swapaxes(planted.attention(*turned, attn_mask, causal, softmax_scale), 1, 2)


def refusing(query, key, value, mask=None, is_causal=False):
    """Takes whole blocks of 16 queries, and no scale."""
    if query.shape[-2] % 16:
        raise ValueError("expected a multiple of 16 queries")
    return planted.attention(query, key, value, mask, is_causal)


def narrow_weights(query, key, value, mask=None, is_causal=False, scale=None):
    """Rounds weights to the type of the values before the average, as flash kernels do."""
    kernel = planted.Kernel()
    kernel.narrow_to = value.dtype
    return kernel(query, key, value, mask, is_causal, scale)


def additive(query, key, value, attn_bias=None):
    """One argument for what is added to the scores."""
    kernel = planted.Kernel()
    if attn_bias is None:
        return kernel(query, key, value)
    kernel.bias = np.where(attn_bias == -np.inf, 0, attn_bias).astype(np.float32)
    return kernel(query, key, value, attn_bias != -np.inf)


def dropping(query, key, value, attn_mask=None):
    """True hides, as in modules of PyTorch; the whole shape alone."""
    if attn_mask is not None and attn_mask.shape != (*query.shape[:-1], key.shape[-2]):
        raise ValueError("expected a mask of the whole shape")
    return planted.attention(query, key, value, None if attn_mask is None else ~attn_mask)


def one_sample(q, k, v, scale, is_causal=False):
    """(S, H, D) of one sample, and a scale that has to be stated."""
    if q.ndim != 3:
        raise ValueError("expected three axes")
    turned = (np.swapaxes(each, 0, 1)[None] for each in (q, k, v))
    return np.swapaxes(planted.attention(*turned, None, is_causal, scale)[0], 0, 1)


def ungrouped(query, value, key, mask=None):
    """Equal heads, in Keras' order."""
    if query.shape[1] != key.shape[1]:
        raise ValueError("expected equal heads")
    return planted.attention(query, key, value, mask)


def by_keyword(*, q, k, v, causal=False):
    """Keywords alone, and a result in a tuple."""
    return (bshd(q, k, v, causal=causal), None)


def of_16_bits(q, k, v, softmax_scale=None, causal=False):
    """Half precision alone, as FlashAttention."""
    if q.dtype.itemsize != 2:
        raise TypeError("expected half precision")
    return bshd(q, k, v, causal=causal, softmax_scale=softmax_scale)


def of_64_bits(q, k, v, mask=None, causal=False):
    """Double precision alone."""
    if q.dtype.itemsize != 8:
        raise TypeError("expected double precision")
    return bshd(q, k, v, mask, causal)


def needing_dropout(query, key, value, dropout_p, mask=None):
    """A rate of dropout that has to be stated."""
    if dropout_p:
        raise NotImplementedError("dropout")
    return planted.attention(query, key, value, mask)


def of_integers(query, key, value, attention_mask=None):
    """Masks of 0 and 1 alone, and a result by name, as in models of Transformers."""
    if attention_mask is not None and attention_mask.dtype == bool:
        raise TypeError("expected integers")
    return {"output": planted.attention(query, key, value, None if attention_mask is None else attention_mask == 1)}


FEW = ("mask", "shape-64x64-d16-causal", "shape-129x129-d16-mask")
HABITS = {
    of_integers: {"mask": "integer", "returns": ("output",)},
    bshd: {"layout": "BSHD", "causal": "top-left", "mask": "keep"},
    refusing: {"mask": "keep", "scale_name": ""},
    narrow_weights: {"layout": "BHSD", "default_scale": "sqrt"},
    additive: {"mask": "none", "bias_name": "attn_bias", "causal": "none"},
    dropping: {"mask": "drop", "full_mask": True},
    one_sample: {"layout": "SHD", "mask": "none"},
    ungrouped: {"order": ("query", "value", "key"), "grouped": False},
    planted.Kernel("bottom right"): {"causal": "bottom-right"},
    planted.attention: {"same_width": False, "mask_with_causal": True},
    by_keyword: {"array_names": ("q", "k", "v"), "layout": "BSHD"},
    of_16_bits: {"layout": "BSHD", "grouped": True, "dtypes": ("float16", "bfloat16")},
    of_64_bits: {"layout": "BSHD", "mask": "keep", "causal": "top-left", "dtypes": ("float64",)},
    needing_dropout: {"options": {"dropout_p": 0.0}},
}


@pytest.mark.parametrize(("function", "habits"), HABITS.items(), ids=lambda each: getattr(each, "__name__", None))
def test_an_honest_kernel_is_understood_and_not_called_wrong(function, habits):
    kernel = settled(Subject(function))
    assert {name: getattr(kernel, name) for name in habits} == habits
    for dtype, cases in {"float32": HONEST, "float16": FEW, "float64": FEW}.items():
        results = found(kernel, *cases, dtype=dtype)
        assert {each.verdict for each in results.values()} <= {"right", "refused", "not offered"}
        assert dtype not in kernel.dtypes or any(each.verdict == "right" for each in results.values())
