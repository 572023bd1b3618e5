"""Who looks at what is called of PyTorch, and where tensors are: what decides whether values may be read."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

HOSTS = {"cpu"}
TYPES = (torch.Tensor, torch.nn.Parameter)
_num_dispatch_modes, _is_tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
_functorch_transform = torch._C._functorch.peek_interpreter_stack
_num_early_modes = torch._ops._len_torch_dispatch_stack_pre_dispatch  # which look before autograd does


def check_local(*arrays: torch.Tensor) -> None:
    """Raise unless tensors are of one process; the function that is called says what to write instead."""
    if any(type(array).__name__ == "DTensor" for array in arrays):
        raise RuntimeError("expected tensors of one process; got DTensor")


def is_on_host(array: torch.Tensor) -> bool:
    """Whether values are read without waiting for a device."""
    return array.device.type in HOSTS


def is_on_accelerator(array: torch.Tensor) -> bool:
    """Whether an array has values, for which a host would have to wait."""
    return not is_on_host(array) and not array.is_meta


def has_modes() -> bool:
    """Whether anything but PyTorch's own autograd looks at what is called, so that values may not be read."""
    return (
        getattr(forward_ad, "_current_level", -1) >= 0
        or _num_dispatch_modes() > 0
        or _num_early_modes() > 0
        or _functorch_transform() is not None
        or _is_tracing()
    )
