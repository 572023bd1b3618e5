"""Lengths that do not fill the last block give infinity."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
errors = {}
for size, width in (
    (1, 16),
    (13, 72),
    (16, 32),
    (63, 64),
    (65, 80),
    (127, 96),
    (129, 128),
    (192, 64),
    (255, 32),
    (257, 256),
):
    arrays = [torch.randn(1, 2, size, width, requires_grad=True) for _ in range(3)]
    query, key, value = (x.detach().double().requires_grad_() for x in arrays)
    future = torch.ones(size, size, dtype=torch.bool).triu(1)
    weights = torch.softmax((query @ key.mT / width**0.5).masked_fill(future, -torch.inf), -1)
    output, expected = attention(*arrays, is_causal=True), weights @ value
    got = [output, *torch.autograd.grad((output * output).sum(), arrays)]
    truth = [expected, *torch.autograd.grad((expected * expected).sum(), (query, key, value))]
    differences = [(one - two).abs().max() for one, two in zip(got, truth, strict=True)]
    errors[size, width] = torch.stack(differences).max().item()
print("expected errors below 1e-4, for each length and width")
print("got     ", {sizes: f"{error:.0e}" for sizes, error in errors.items()})
raise SystemExit(int(not all(error < 1e-4 for error in errors.values())))
