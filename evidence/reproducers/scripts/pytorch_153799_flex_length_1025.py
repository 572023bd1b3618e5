"""Gradients of a length of 1025 are NaN with a mask and a score function."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)

torch.manual_seed(0)
arrays = [torch.randn(1, 2, 1025, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
causal = create_block_mask(lambda b, h, row, column: row >= column, None, None, 1025, 1025)
output = torch.compile(flex_attention)(
    *arrays, score_mod=lambda s, b, h, row, column: s + row - column, block_mask=causal
)
got = torch.autograd.grad(output.sum(), arrays)
print("expected no NaN in the gradients of query, key and value")
print("got     ", [gradient.isnan().sum().item() for gradient in got])
raise SystemExit(int(any(gradient.isnan().any() for gradient in got)))
