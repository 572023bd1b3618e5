"""Gradients of a length of 1025 are NaN with a mask and a score function.

The last block holds one real key and 127 that do not exist. The gradient was NaN if a mask and a score function were
given together. With one of them alone, or with a length that fills its blocks, it was right.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#153799"
# title = "FlexAttention causes nun in backward if sequence length is not multiple of 128 and both block_mask and score_mod used"
# property = "gradient"
# line = 0
# versions = "2.7.0 on CUDA; open"
# needs = "cuda"
# geometry = { B = 1, H = 2, M = 1025, N = 1025, D = 64, E = 64 }
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
