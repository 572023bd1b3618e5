"""A boolean mask is added to the scores, as 0 and 1.

Fused attention takes a boolean mask, and True means may attend. Eager attention adds whatever it gets: True becomes
+1, and False 0. So a masked key is only a little less likely, and the future is visible. The library makes masks of
the right kind itself; a user's own 4-D mask, or a change of the attention's name, meets the difference.
"""

# /// script
# dependencies = ["transformers", "torch"]
#
# [tool.attention-core]
# thread = "huggingface/transformers#41443"
# title = "Qwen3: fix bool attention_mask in eager_attention_forward"
# property = "mask"
# line = 1
# versions = "closed; 5.23.0 too"
# geometry = { B = 1, H = 1, M = 3, N = 3, D = 4, E = 4 }
# like = ["mask"]
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
