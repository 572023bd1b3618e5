"""Check the rings of others on gloo: ``torchrun --nproc-per-node 2 evidence/sharding/rings.py NAME``.

The others are ``ring-attention-pytorch``, ``context-parallel``, that of PyTorch, and ``attention-core``. A table of
verdicts is printed.
"""

import collections
import datetime
import importlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental._attention import _cp_options
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_conformance import Subject, check_sharded
from attention_core import Shards, scaled_dot_product_attention as ours, shard_positions


def ring_attention_pytorch(query, key, value, attn_mask=None, is_causal=False, *, shards):
    """Its function of shards (B, N, H, D), which takes a mask of keys, (B, N), of this rank."""
    ring_flash_attn = importlib.import_module("ring_attention_pytorch").ring_flash_attn
    if query.shape[1] != key.shape[1]:
        raise NotImplementedError("other numbers of queries than keys")
    if attn_mask is not None and (attn_mask.shape[-2] > 1 or attn_mask.shape[1] > 1):
        raise NotImplementedError("masks of queries or heads")
    positions = shard_positions(key, shards, axis=-3)
    length = shards.length or query.shape[1] * dist.get_world_size()
    mask = (positions < length)[None].expand(query.shape[0], -1)
    if attn_mask is not None:
        whole = attn_mask[:, 0, 0, :].expand(query.shape[0], -1)
        mask = mask & whole[:, positions.clamp(max=length - 1)]
    bucket = min(512, query.shape[1])
    return ring_flash_attn(query, key, value, mask, is_causal, bucket, True, False, None, dist.get_world_size())


def context_parallel(query, key, value, attn_mask=None, is_causal=False, enable_gqa=False, *, shards):
    """PyTorch's attention inside of its context, without load balancing, which is for causal calls alone."""
    mesh, count = DeviceMesh.from_group(shards.group, "cpu"), query.shape[-2] * dist.get_world_size()
    _cp_options.enable_load_balance = False
    context = experimental.context_parallel(mesh, buffers=[torch.zeros(count)], buffer_seq_dims=[0])
    with context, sdpa_kernel(SDPBackend.MATH):
        options = {"attn_mask": attn_mask, "is_causal": is_causal, "enable_gqa": enable_gqa}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)


KERNELS = {
    "ring-attention-pytorch": (
        ring_attention_pytorch,
        {"layout": "BSHD", "mask": "keep", "grouped": True, "grouped_name": ""},
    ),
    "context-parallel": (context_parallel, {"layout": "BHSD", "mask": "keep"}),
    "attention-core": (ours, {}),
}


ROWS = {
    "lengths that divide": "shape-128x128-plain shape-128x128-causal shape-64x64-d16-causal shape-192x192-lengths",
    "lengths that do not": "shape-1x1-d16-plain shape-13x13-causal shape-31x31-d80-plain shape-65x65-d64-causal",
    "masks of keys": "shape-128x128-maskb shape-33x33-maskb shape-127x127-d64-lengths shape-70x130-h3on3-maskb",
    "masks with causality": "shape-128x128-ragged shape-33x33-ragged shape-130x130-ragged",
    "masks of queries and heads": "shape-128x128-maskhm shape-96x96-mask mask-of-queries shape-70x130-maskbhm band-300",
    "a bias": "shape-128x128-bias bias-130",
    "fully masked rows": "empty-rows-130 gradient-empty-rows-130 padding-nan",
    "grouped heads": "shape-64x128-h4on2-plain shape-65x70-h6on2-plain shape-33x65-h6on2-causal-gradient",
    "sinks": "sinks-grouped-130 gradient-sinks-grouped-130",
    "gradients": "shape-64x64-d64-plain-gradient shape-128x128-causal-gradient shape-256x256-causal-gradient",
    "gradients, odd lengths": "shape-5x5-d16-plain-gradient shape-65x65-causal-gradient shape-33x33-causal-gradient",
    "gradients, masks": "shape-130x130-mask-gradient shape-128x128-maskhm-gradient shape-130x130-ragged-gradient",
}


def main(name):
    """Check one, and print a row of verdicts for each row of cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    function, declared = KERNELS[name]
    kernel = Subject(function, name, backend="torch", device="cpu", dtypes=("float32",), **declared)
    shards, names = Shards(dist.group.WORLD, "contiguous"), " ".join(ROWS.values()).split()
    results = check_sharded(kernel, shards, cases=names, dtypes=["float32"], power=False)
    for row, cases in ROWS.items() if not dist.get_rank() else ():
        chosen = [each for each in results if each.case in cases.split()]
        counts = collections.Counter(each.verdict for each in chosen)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        causes = sorted({each.variant or each.detail[:70] for each in chosen if each.verdict != "right"})
        print(f"| {row} | {verdicts} | {'; '.join(causes[:2])} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
