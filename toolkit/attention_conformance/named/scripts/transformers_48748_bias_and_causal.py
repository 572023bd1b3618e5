"""A model with a bias of its own loses causality.

The fused attention is told to be causal only if it gets no mask. This model computes a bias from its values, and
passes it as the mask. If no token is padded, the library makes no causal mask, and expects the flag. Neither excludes
the future: an earlier output changes with a later token.
"""

# /// script
# dependencies = ["transformers", "torch"]
#
# [tool.attention-core]
# thread = "huggingface/transformers#48748"
# title = "`DogeForCausalLM` attends to future tokens with the default `sdpa` backend — `SmallDoge/Doge-20M` scores ppl 5 instead of 16, and cached and uncached `generate()` disagree"
# property = "combined rules"
# line = 2
# versions = "5.18 development; closed in September 2026; right in 5.23.0"
# geometry = { B = 1, H = 2, M = 6, N = 6, D = 8, E = 8 }
# like = ["causal-and-mask"]
# ///

import torch
from transformers import DogeConfig, DogeForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
config = DogeConfig(vocab_size=32, num_key_value_heads=2, attn_implementation="sdpa", pad_token_id=0, **sizes)
model = DogeForCausalLM(config).eval()
first, second = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[1, 2, 3, 4, 5, 7]])
with torch.no_grad():
    difference = (model(first).logits - model(second).logits)[0, :-1].abs().max().item()
print("expected no change of outputs before the token that differs")
print("got      a change of", difference)
raise SystemExit(int(not difference <= 1e-5))
