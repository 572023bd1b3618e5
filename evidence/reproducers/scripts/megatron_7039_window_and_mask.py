"""A window replaces the mask of the caller."""

# /// script
# dependencies = ["megatron-core", "torch"]
# ///

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.enums import AttnMaskType

if not torch.cuda.is_available():
    print("not here: a GPU")
    raise SystemExit(77)


def softmax(window):
    fill = lambda scores, mask: scores.masked_fill(mask, -10000.0)
    return FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, False, fill, True, None, window_size=window)


mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool, device="cuda")
mask[..., 2] = True  # True excludes here
got = softmax((1, 0))(torch.zeros(1, 1, 4, 4, device="cuda"), mask)
print("expected no weight in the masked key 2")
print("got     ", got[0, 0, :, 2].tolist())
raise SystemExit(int(not (got[..., 2] <= 1e-3).all()))
