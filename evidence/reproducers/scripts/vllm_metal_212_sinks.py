"""A sink is accepted as an argument, and never applied."""

# /// script
# dependencies = ["transformers", "torch"]
# ///

from types import SimpleNamespace

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

sinks = torch.tensor([0.0, 1.0, 3.0])
module = SimpleNamespace(num_key_value_groups=1, training=False, sinks=sinks)
query, ones = torch.zeros(1, 3, 1, 4), torch.ones(1, 3, 4, 4)
output, _ = eager_attention_forward(module, query, ones, ones, None, scaling=0.5)
expected, got = 4 / (4 + sinks.exp()), output[0, 0, :, 0]
print("expected", expected.tolist())
print("got     ", got.tolist())
raise SystemExit(int(not torch.allclose(got, expected)))
