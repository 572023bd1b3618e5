"""A mask of documents in one sequence gives other results in bfloat16 on a GPU."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
query, key, value = (torch.randn(1, 2, 600, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
document = torch.arange(600, device=device) // 150
mask = document[:, None] == document
scores = (query.double() @ key.double().mT / 8).masked_fill(~mask, -torch.inf)
expected = torch.softmax(scores, -1) @ value.double()
got = attention(query, key, value, attn_mask=mask[None, None]).double()
print("expected an error below 0.02")
print("got      an error of", (got - expected).abs().max().item(), "on", device)
raise SystemExit(int(not torch.allclose(got, expected, atol=0.02)))
