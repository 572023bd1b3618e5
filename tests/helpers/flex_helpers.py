"""Calls that FlexAttention takes, and the kernel as one of a CPU."""

import importlib

from call_table import Sizes

BLOCKS = Sizes((2,), 4, 2, 150, 261, 16, 20)  # two of queries, and three of keys


def as_kernel(backend, monkeypatch):
    """The only kernel, run by its dense form as if this were a GPU; PyTorch refuses its gradient on a CPU."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    kernel = importlib.import_module("attention_torch.kernels.flex").FlexAttention(("cpu",), module.flex_attention)
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(module, "_validate_device", lambda *arrays: None)
    monkeypatch.setattr(backend, "kernels", (kernel,))
    return kernel
