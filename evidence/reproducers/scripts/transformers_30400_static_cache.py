"""A static cache has room for keys that do not exist yet, and they took part."""

# /// script
# dependencies = ["transformers", "torch"]
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
