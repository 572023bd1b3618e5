"""A static cache has room for keys that do not exist yet, and they took part.

A static cache is an array of full length, of which the first part is filled. Keys beyond are zeros, with scores of 0,
and have to be masked. For some lengths the mask was left out, as causality alone seemed enough. The output then
changes with the size of the cache.
"""

# /// script
# dependencies = ["transformers", "torch"]
#
# [tool.attention-core]
# thread = "huggingface/transformers#30400"
# title = "Llama generation with static cache fails in certain sequence lengths"
# property = "decode"
# line = 3
# versions = "closed; right in 5.23.0"
# geometry = { B = 1, H = 2, M = 4, N = 16, D = 8, E = 8 }
# like = ["masked-padding"]
# ///

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
model, tokens = LlamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3, 4, 5]])
cache = StaticCache(config=config, max_cache_len=16)
with torch.no_grad():
    expected = model(tokens).logits
    first = model(tokens[:, :4], past_key_values=cache, cache_position=torch.arange(4)).logits
    last = model(tokens[:, 4:], past_key_values=cache, cache_position=torch.arange(4, 5)).logits
got = torch.cat([first, last], 1)
print("expected", expected[0, -1, :3].tolist())
print("got     ", got[0, -1, :3].tolist())
raise SystemExit(int(not torch.allclose(got, expected, atol=1e-5)))
