"""A sink is accepted as an argument, and never applied.

A sink is a learnt number for each head that takes part in the softmax and has no value. With scores of 0 and values
of 1, the output of a head is N / (N + exp(sink)), and a kernel that forgets it gives 1. This closed form needs no
reference. One backend accepted sinks and ignored them.
"""

# /// script
# dependencies = ["transformers", "torch"]
#
# [tool.attention-core]
# thread = "vllm-project/vllm-metal#212"
# title = "[GPT-OSS] Ground truth tests + sink attention kernel support"
# property = "sinks"
# line = 7
# versions = "vllm-metal; the script asks transformers"
# geometry = { B = 1, H = 3, G = 3, M = 1, N = 4, D = 4, E = 4 }
# like = ["sinks"]
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
