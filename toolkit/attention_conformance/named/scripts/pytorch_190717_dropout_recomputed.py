"""The backward pass drops other weights than the forward pass did.

To save memory, a compiler may compute the weights again in the backward pass, dropout included. The generator has
moved on by then, so other weights are dropped. Each pass alone looks right. The gradient belongs to a function that
was never evaluated.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#190717"
# title = "[BUG] dropout gradient mask mismatch when memory budget is low"
# property = "dropout"
# line = 11
# versions = "reported in July 2026; open; 2.13.0 too"
# geometry = { B = 1, H = 1, M = 64, N = 64, D = 64, E = 64 }
# ///

import torch
import torch._functorch.config as settings


def attention(query, key, value):
    weights = torch.softmax(query @ key.mT / 8, -1)
    return torch.nn.functional.dropout(weights, 0.5) @ value


torch.manual_seed(0)
settings.activation_memory_budget = 0.1
query, key = (torch.randn(1, 1, 64, 64) for _ in range(2))
value = torch.eye(64)[None, None].clone().requires_grad_()  # the output is the weights, after dropout
query.requires_grad_()
output = torch.compile(attention)(query, key, value)
(got,) = torch.autograd.grad(output, value, torch.eye(64)[None, None])  # so is the transpose of this
differ = (got.mT != 0).ne(output != 0).sum().item()
print("expected the same weights dropped")
print("got     ", differ, "of", output.numel(), "dropped in one pass and not in the other")
raise SystemExit(int(differ > 0))
