"""A sink counts once, also if the keys are split, or all masked.

A kernel for decoding splits the keys into parts and merges the results. Each part may add the sink, which then counts
twice; or only parts with keys add it, and a row without keys loses it. The script leaves out keys 128 to 511, and
then all of them. With no key left, the sink takes all weight and the output is 0.
"""

# /// script
# dependencies = ["transformers", "torch"]
#
# [tool.attention-core]
# thread = "ROCm/rocm-libraries#12229"
# title = "fix(ck_tile/fmha): correct attention sink handling in the split-KV pipelines"
# property = "sinks"
# line = 7
# versions = "open; the script asks transformers"
# geometry = { B = 1, H = 1, G = 1, M = 1, N = 640, D = 16, E = 16 }
# like = ["sinks"]
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
