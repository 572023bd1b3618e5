"""Calls of PyTorch under masks, for tests of accelerators."""

import math

import attention_core as ac

B, H, G, M, N, D = 2, 4, 2, 9, 11, 8

MASKS = {
    "causal": lambda torch: {"is_causal": True},
    "offset": lambda torch: {"mask": ac.Causal(offset=2)},
    "offsets": lambda torch: {"mask": ac.Causal(offset=torch.tensor([1, 3]))},
    "window": lambda torch: {"mask": ac.SlidingWindow(3, 2)},
    "lengths": lambda torch: {"mask": ac.KeyLengths(torch.tensor([4, 8]))},
    "no keys": lambda torch: {"mask": ac.KeyLengths(torch.tensor([0, 8]))},
    "causal and lengths": lambda torch: {"mask": ac.Causal() & ac.KeyLengths(torch.tensor([4, 8]))},
    "documents": lambda torch: {"mask": ac.Segments(torch.arange(M) // 4, torch.arange(N) // 4)},
    "array": lambda torch: {"mask": torch.arange(M)[:, None] * 5 % 7 > torch.arange(N) % 5},
    "array of heads": lambda torch: {"mask": torch.arange(B * H * M * N).reshape(B, H, M, N) * 5 % 7 > 3},
    "bias": lambda torch: {"bias": torch.where(torch.arange(N) % 3 == 1, -math.inf, 0.5).to(torch.float64)},
    "bias and causal": lambda torch: {
        "bias": torch.linspace(-1, 1, H * N).reshape(H, 1, N).double(),
        "is_causal": True,
    },
}


def results(torch, arrays, options, d_output=None):
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    output = ac.scaled_dot_product_attention(*leaves, **options)
    d_output = (
        torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).reshape(output.shape)
        if d_output is None
        else d_output
    )
    return [x.detach() for x in (output, *torch.autograd.grad(output, leaves, d_output))]
