"""A window of w keys means w in one implementation and w + 1 in another."""

# /// script
# dependencies = ["transformers", "torch"]
# ///

import torch
from transformers.masking_utils import sliding_window_causal_mask_function

window = sliding_window_causal_mask_function(3)
got = [column for column in range(6) if bool(window(0, 0, torch.tensor(5), torch.tensor(column)))]
print("expected keys [3, 4, 5] for query 5 and a window of 3")
print("got      keys", got)
raise SystemExit(int(got != [3, 4, 5]))
