"""Calls that FlexAttention takes, and the kernel as one of a CPU."""

import importlib
import math

import numpy as np

import attention_core as ac
from attention_core import MaskFunction, Segments, SlidingWindow
from attention_core.scores import ScoreMod, alibi, relative_bias

B, H, G, M, N, D, E = 2, 4, 2, 150, 261, 16, 20  # two blocks of queries, and three of keys
SHAPES = (B, H, M, D), (B, G, N, D), (B, G, N, E)
IDS = np.arange(N) // 40


def as_kernel(backend, monkeypatch):
    """The only kernel, run by its dense form as if this were a GPU; PyTorch refuses its gradient on a CPU."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    kernel = importlib.import_module("attention_torch.flex").FlexAttention(("cpu",), module.flex_attention)
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(module, "_validate_device", lambda *arrays: None)
    monkeypatch.setattr(backend, "kernels", (kernel,))
    return kernel


RULES = {
    "causal": lambda put, rng: ac.Causal(),
    "offset": lambda put, rng: ac.Causal(offset=7),
    "offsets": lambda put, rng: ac.Causal(offset=put(np.asarray([3, -9]))),
    "window": lambda put, rng: SlidingWindow(left=33, right=4, offset=5),
    "window without an end": lambda put, rng: SlidingWindow(right=4, offset=put(np.asarray([3, -9]))),
    "lengths": lambda put, rng: ac.KeyLengths(put(np.asarray([0, 130]))),
    "documents": lambda put, rng: Segments(put(IDS[60 : 60 + M]), put(IDS)),
    "documents of samples": lambda put, rng: Segments(put(np.stack([IDS[:M], IDS[M // 2 :][:M]])), put(IDS)),
    "array": lambda put, rng: put(rng.random((H, M, N)) < 0.5),
    "array and rule": lambda put, rng: ac.Causal(offset=9) & put(rng.random((B, 1, 1, N)) < 0.5),
    "either": lambda put, rng: ~ac.KeyLengths(5) & SlidingWindow(left=3) | ac.KeyLengths(2),
    "function": lambda put, rng: MaskFunction(
        lambda batch, head, query, key, step: (key <= query) & ((query - key) % (head + step) == batch),
        (put(np.asarray(2)),),
    ),
}
SCORES = {
    "softcap": lambda put, rng: {"softcap": 2.0, "is_causal": True},
    "alibi": lambda put, rng: {"score_mod": alibi(H, offset=3)},
    "relative bias": lambda put, rng: {
        "score_mod": relative_bias(put(rng.standard_normal((32, H)), dtype="float32")),
        "mask": SlidingWindow(left=9),
    },
    "function": lambda put, rng: {
        "score_mod": ScoreMod(
            lambda scores, batch, head, query, key, rate: scores * rate[head],
            (put(np.linspace(1, 2, H), dtype="float32"),),
        ),
        "mask": ac.KeyLengths(100),
    },
    "bias": lambda put, rng: {"bias": put(np.where(rng.random((M, N)) < 0.5, -math.inf, 1.0), dtype="float32")},
    "bias of heads": lambda put, rng: {
        "bias": put(np.where((np.arange(M) == 2)[:, None], -math.inf, rng.standard_normal((H, M, N))), dtype="float32"),
        "mask": ac.Causal(offset=60),
    },
    "sinks": lambda put, rng: {"sinks": put(rng.standard_normal(H), dtype="float32"), "mask": SlidingWindow(left=5)},
    "scale": lambda put, rng: {"scale": -0.3, "softcap": 3.0},
    "scale of an array": lambda put, rng: {"scale": put(np.asarray(0.3), dtype="float32"), "softcap": 3.0},
}
OPTIONS = {
    **{f"mask {name}": lambda put, rng, make=make: {"mask": make(put, rng)} for name, make in RULES.items()},
    **SCORES,
}
