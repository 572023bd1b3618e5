"""A kernel that writes zeros into its arguments passes a test that runs it first.

A grader called the generated kernel, and then the reference with the same arrays. A kernel that fills its arguments
and its output with zeros is right by that test. So the arguments have to be compared with a copy, and the output may
not share their memory. An honest kernel may still scale a query in place, to save memory.
"""

# /// script
# dependencies = ["torch"]
#
# [tool.attention-core]
# thread = "ScalingIntelligence/KernelBench#82"
# title = "Eval Unit Tests for Adversarial Eval Testing"
# property = "repetition"
# line = 0
# versions = "graders of generated kernels; the script asks torch"
# geometry = { B = 1, H = 2, M = 40, N = 40, D = 16, E = 16 }
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
