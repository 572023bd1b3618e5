"""Calls that FlexAttention takes, and the kernel as one of a CPU."""

import copy
import importlib

from call_table import Sizes

BLOCKS = Sizes((2,), 4, 2, 150, 261, 16, 20)  # two of queries, and three of keys


def flags_of(blocks):
    """Which blocks (B, H, of queries, of keys) a block mask has, and which of them it leaves without its rule."""
    whole = copy.copy(blocks)
    whole.kv_num_blocks = blocks.kv_num_blocks * 0
    return blocks.to_dense().bool(), whole.to_dense().bool()


def by_blocks(blocks, size=128):
    """The block mask with a rule that knows its blocks, as a dense form asks the rule of every pair."""
    some, full = flags_of(blocks)
    rule = blocks.mask_mod

    def allowed(b, h, q, k):
        at = (b if len(some) > 1 else b * 0), (h if some.shape[1] > 1 else h * 0), q // size, k // size
        return some[at] & (full[at] | rule(b, h, q, k))

    blocks = copy.copy(blocks)
    blocks.mask_mod = allowed
    return blocks


def as_kernel(backend, monkeypatch, masks=None):
    """The only kernel, run by its dense form as if this were a GPU; PyTorch refuses its gradient on a CPU.

    Block masks that it takes go to a list, if there is one.
    """
    module = importlib.import_module("torch.nn.attention.flex_attention")

    def attend(*arrays, block_mask, **options):
        if masks is not None:
            masks.append(block_mask)
        block_mask = block_mask if block_mask is None else by_blocks(block_mask)
        return module.flex_attention(*arrays, block_mask=block_mask, **options)

    kernel = importlib.import_module("attention_torch.kernels.flex").FlexAttention(("cpu",), attend)
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(module, "_validate_device", lambda *arrays: None)
    monkeypatch.setattr(backend, "kernels", (kernel,))
    return kernel
