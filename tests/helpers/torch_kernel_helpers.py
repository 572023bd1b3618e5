"""Calls that PyTorch's kernel takes, and comparisons with the definition."""

import contextlib

import numpy as np
import pytest
import tracing_helpers
from call_table import Sizes, options_of

import attention_core as ac
from attention_core import explain_attention
from attention_core.backend import get_backend

attention = ac.scaled_dot_product_attention

B, H, G, M, N, D = 3, 4, 2, 7, 11, 8


def refusal(arrays, **options):
    return next(each for each in explain_attention(*arrays, **options).candidates if each.name == "fused").refusal


def close(actual, desired, tolerance=1e-13):
    for found, expected in zip(actual, desired, strict=True):
        np.testing.assert_allclose(found.detach(), expected.detach(), rtol=0, atol=tolerance)


def results(torch, arrays, implementation, options):
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    output = attention(*leaves, **options, implementation=implementation)
    factor = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
    return output, *torch.autograd.grad((output.to(torch.float64) * factor).sum(), leaves)


def taken(name):
    """Options of a name for calls of these sizes."""
    return options_of(name, Sizes((B,), H, G, M, N, D, D), get_backend("torch").from_numpy)


def compiled(torch, function, backend="aot_eager"):
    return tracing_helpers.compiled(torch, function, backend)


@contextlib.contextmanager
def accelerator():
    """A context in which a CPU counts as an accelerator: the host may not read its values without waiting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attention_torch.modes.HOSTS", set())
        for module in ("_attention.blocks.visits", "_backend._find"):
            patch.setattr(f"attention_core.{module}.is_on_host", lambda array: False)
        yield


@contextlib.contextmanager
def unread(torch, *, structure=False):
    """A context in which an error is raised where the host reads a value of a tensor; of a mask it may if told so."""
    aten = torch.ops.aten
    reading = {aten._local_scalar_dense, aten.nonzero, aten.is_nonzero, aten.item, aten.equal, aten.masked_select}

    class Unread(torch.utils._python_dispatch.TorchDispatchMode):
        supports_higher_order_operators = True  # FlexAttention, of which a mode sees nothing but the call

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            packet = getattr(function, "overloadpacket", None)
            assert packet not in reading, f"reads a value by {function}"
            indices = arguments[1] if packet in (aten.index, aten.index_put, aten.index_put_) else ()
            assert not any(each is not None and each.dtype == torch.bool for each in indices), "reads booleans"
            return function(*arguments, **(options or {}))

    def refuse(x, *_, **__):
        raise AssertionError("reads values")

    tolist = torch.Tensor.tolist
    with pytest.MonkeyPatch.context() as patch, Unread():
        for name in ("tolist", "numpy", "cpu", "__array__"):  # which call no operator
            patch.setattr(torch.Tensor, name, refuse)
        if structure:
            patch.setattr(torch.Tensor, "tolist", lambda x: refuse(x) if x.is_floating_point() else tolist(x))
        yield
