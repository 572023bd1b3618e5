"""A window of w keys means w in one implementation and w + 1 in another.

The window of a model is a number in its settings. Flash kernels take the number of keys to the left, without the
query's own. One implementation passed the number on as it was, and saw one key more. A long text changes the logits a
little; perplexity shows it, unit tests do not.
"""

# /// script
# dependencies = ["transformers", "torch"]
#
# [tool.attention-core]
# thread = "huggingface/transformers#39408"
# title = "Off-by-one error when using flash_attention with a sliding window"
# property = "window"
# line = 3
# versions = "closed; right in 5.23.0"
# geometry = { B = 1, H = 1, M = 6, N = 6 }
# like = ["window"]
# ///

import torch
from transformers.masking_utils import sliding_window_causal_mask_function

window = sliding_window_causal_mask_function(3)
got = [column for column in range(6) if bool(window(0, 0, torch.tensor(5), torch.tensor(column)))]
print("expected keys [3, 4, 5] for query 5 and a window of 3")
print("got      keys", got)
raise SystemExit(int(got != [3, 4, 5]))
