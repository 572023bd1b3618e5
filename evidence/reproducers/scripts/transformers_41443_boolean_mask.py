"""A boolean mask is added to the scores, as 0 and 1."""

# /// script
# dependencies = ["transformers", "torch"]
# ///

from types import SimpleNamespace

import torch
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

torch.manual_seed(0)
query, key, value = (torch.randn(1, 1, 3, 4) for _ in range(3))
mask = torch.ones(3, 3).tril().bool()[None, None]
module = SimpleNamespace(num_key_value_groups=1, training=False)
_, weights = eager_attention_forward(module, query, key, value, mask, scaling=0.5)
print("expected zeros above the diagonal")
print("got     ", weights[0, 0, 0].tolist())
raise SystemExit(int(weights.triu(1).any()))
