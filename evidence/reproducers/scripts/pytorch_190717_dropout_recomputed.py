"""The backward pass drops other weights than the forward pass did."""

# /// script
# dependencies = ["torch"]
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
