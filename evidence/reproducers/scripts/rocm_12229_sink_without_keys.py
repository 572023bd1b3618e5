"""A sink counts once, also if the keys are split, or all masked."""

# /// script
# dependencies = ["transformers", "torch"]
# ///

from types import SimpleNamespace

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

module = SimpleNamespace(num_key_value_groups=1, training=False, sinks=torch.tensor([2.0]))
query, ones = torch.zeros(1, 1, 1, 16), torch.ones(1, 1, 640, 16)
hole, everything = torch.zeros(1, 1, 1, 640), torch.full((1, 1, 1, 640), -torch.inf)
hole[..., 128:512] = -torch.inf
outputs = [
    eager_attention_forward(module, query, ones, ones, mask, 0.25)[0].flatten()[0] for mask in (hole, everything)
]
expected, got = torch.tensor([256 / (256 + 7.389056), 0.0]), torch.stack(outputs)
print("expected", expected.tolist())
print("got     ", got.tolist())
raise SystemExit(int(not torch.allclose(got, expected)))
