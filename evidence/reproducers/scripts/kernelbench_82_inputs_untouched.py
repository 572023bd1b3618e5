"""A kernel that writes zeros into its arguments passes a test that runs it first."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
arrays = [torch.randn(1, 2, 40, 16) for _ in range(3)]
copies = [array.clone() for array in arrays]
output = attention(*arrays)
touched = [not torch.equal(*pair) for pair in zip(arrays, copies, strict=True)]
shared = [output.untyped_storage().data_ptr() == array.untyped_storage().data_ptr() for array in arrays]
print("expected query, key and value untouched, and memory of its own for the output")
print("got      touched", touched, "shared", shared)
raise SystemExit(int(any(touched + shared)))
