"""One query with 32 heads on 2 key heads, and 1024 keys, reads the wrong memory."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
torch.manual_seed(0)
query, key, value = (
    torch.randn(1, heads, size, 128, device=device).bfloat16() for heads, size in ((32, 1), (2, 1024), (2, 1024))
)
repeated = (x.repeat_interleave(16, dim=1) for x in (key, value))
expected = attention(query.double().cpu(), *(x.double().cpu() for x in repeated))
got = attention(query, key, value, enable_gqa=True).double().cpu()
print("expected an error below 0.01")
print("got      an error of", (got - expected).abs().max().item(), "on", device)
raise SystemExit(int(not torch.allclose(got, expected, atol=0.01)))
