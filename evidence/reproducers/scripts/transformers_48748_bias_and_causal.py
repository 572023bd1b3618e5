"""A model with a bias of its own loses causality."""

# /// script
# dependencies = ["transformers", "torch"]
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
