"""Scores of -inf by overflow are taken for a mask."""

# /// script
# dependencies = ["torch"]
# ///

import torch
from torch.nn.functional import scaled_dot_product_attention as attention


def row(num_keys):
    query, key = torch.full((1, 1, 1, 16), 1e20), torch.full((1, 1, num_keys, 16), -1e20)
    return attention(query, key, torch.ones(1, 1, num_keys, 16))[0, 0, 0, 0].item()


got = {num_keys: row(num_keys) for num_keys in (7, 33)}
print("expected NaN for 7 keys, and for 33")
print("got     ", got)
raise SystemExit(int(any(value == value for value in got.values())))
