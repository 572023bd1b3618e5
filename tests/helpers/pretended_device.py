"""A GPU that is pretended: tensors of device ``cuda`` whose values lie on the host, and an error where it would wait.

Numbers, kernels by their dense form, and the choice of implementations are those of a call on a GPU. Time is not.
"""

import contextlib
import math
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from attention_torch import sdpa
from attention_torch.backend import backend
from attention_torch.flex import FlexAttention

aten = torch.ops.aten
DEVICE = torch.device("cuda:0")
READING = {aten._local_scalar_dense, aten.nonzero, aten.is_nonzero, aten.item, aten.equal, aten.masked_select}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._unsafe_index_put}


class WaitsError(AssertionError):
    """The host would wait for the GPU."""


class OnDevice(torch.Tensor):
    """A tensor that lies on the pretended GPU."""

    @staticmethod
    def __new__(cls, held):
        """Wrap a tensor of the host."""
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )

    def __init__(self, held):
        """Keep it."""
        self.held = held

    device = property(lambda self: DEVICE)  # as Python sees it; PyTorch's own code sees a host, and so needs no GPU
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def _refuse(self, *_, **__):
        raise WaitsError("reads values")

    tolist = numpy = cpu = __array__ = _refuse

    def to(self, *arguments, **options):
        """Convert, but to no device of the host."""
        if any(str(each) == "cpu" for each in (*arguments, options.get("device"))):
            self._refuse()
        return super().to(*arguments, **options)

    def __repr__(self, **_):
        """Show shape and dtype alone."""
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        """Run an operator, and refuse one that waits."""
        return _run(function, arguments, options or {})


class Pretended(TorchDispatchMode):
    """Makes new tensors of the GPU, too."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        """Run an operator, and refuse one that waits."""
        return _run(function, arguments, options or {})


def _run(function, arguments, options):
    packet, wrappers, hosts = getattr(function, "overloadpacket", function), {}, []

    def held(x):
        if isinstance(x, OnDevice):
            wrappers[id(x.held)] = x
            return x.held
        if isinstance(x, torch.Tensor) and x.numel() != 1 and x.any():  # no gradient of 0 that autograd makes
            hosts.append(x)
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x

    inner, inner_options = tree_map(held, arguments), tree_map(held, options)
    asked = options.get("device")
    asked = None if asked is None else torch.device(asked).type
    is_here = bool(wrappers)
    if is_here and packet in READING:
        raise WaitsError(f"{function} reads a value")
    if is_here and asked == "cpu" and packet is aten._to_copy:
        raise WaitsError(f"{function} copies to the host")
    copied = [x for x in (*inner, *inner_options.values()) if isinstance(x, torch.Tensor)]
    if asked == "cuda" and not is_here and copied and not options.get("non_blocking"):
        raise WaitsError(f"{function} copies from the host")
    if is_here and hosts and packet is not aten.index_put_:  # whose number under `vmap` is one of the host here alone
        raise WaitsError(f"{function} mixes devices: {[tuple(x.shape) for x in hosts]}")
    if packet in INDEXING and is_here and any(x is not None and x.dtype == torch.bool for x in inner[1]):
        raise WaitsError(f"{function} counts booleans")
    results = function(*inner, **inner_options)
    if not (is_here or asked == "cuda"):
        return results

    def wrapped(x):
        if not isinstance(x, torch.Tensor):
            return x
        return wrappers[id(x)] if id(x) in wrappers else OnDevice(x)

    return tree_map(wrapped, results)


def to_device(tree):
    """Tensors of the host as ones of the GPU."""
    return tree_map(lambda x: OnDevice(x.detach().clone()) if isinstance(x, torch.Tensor) else x, tree)


def to_host(tree):
    """Tensors of the GPU as ones of the host."""
    return tree_map(lambda x: x.detach().held if isinstance(x, OnDevice) else x, tree)


def flex_attention(query, key, value, *, score_mod, block_mask, scale, enable_gqa, return_aux=None):
    """FlexAttention by its definition: of blocks that the block mask does not list, nothing is computed."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.mT).float() * scale
    at = [torch.arange(size, dtype=torch.int32, device=query.device) for size in scores.shape]
    where = torch.meshgrid(*at, indexing="ij")
    if score_mod is not None:
        scores = _at_all(score_mod, scores, *where)
    if block_mask is not None:
        allowed = _at_all(block_mask.mask_mod, *where)
        sides = (
            (block_mask.kv_num_blocks, block_mask.kv_indices),
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        )
        partly, fully = (_listed(*side, block_mask.BLOCK_SIZE, scores.shape) for side in sides)
        scores = torch.where((allowed & partly) | fully, scores, -math.inf)
    logsumexp = scores.logsumexp(dim=-1)
    top = torch.where(logsumexp.isinf(), 0.0, logsumexp)
    output = (torch.exp(scores - top[..., None]).to(value.dtype) @ value).to(query.dtype)
    return output if return_aux is None else (output, types.SimpleNamespace(lse=logsumexp))


def scaled_dot_product_attention(query, key, value, *, attn_mask, is_causal, scale, enable_gqa):
    """PyTorch's kernel by its formula: that for CPUs loses NaN where there are few keys."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.mT) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        is_flag = attn_mask.dtype == torch.bool
        scores = torch.where(attn_mask, scores, -math.inf) if is_flag else scores + attn_mask
    is_masked = (scores == -math.inf).all(dim=-1, keepdim=True)
    return torch.where(is_masked, 0.0, torch.softmax(torch.where(is_masked, 0.0, scores), dim=-1)) @ value


def _at_all(function, *arrays):
    for _ in range(arrays[0].dim()):
        function = torch.vmap(function)
    return function(*arrays)


def _listed(counts, indices, size, shape):
    rows, columns = (
        torch.arange(length, device=counts.device) // each for length, each in zip(shape[-2:], size, strict=True)
    )
    kept = torch.arange(indices.shape[-1], device=counts.device) < counts[..., None]
    blocks = torch.zeros((*indices.shape[:-1], indices.shape[-1] + 1), device=counts.device)
    blocks = blocks.scatter(-1, torch.where(kept, indices, indices.shape[-1]).long(), 1.0)
    return (blocks[..., rows, :][..., columns] > 0).expand(shape)


@contextlib.contextmanager
def pretended(*, kernels=True):
    """A context in which there is a GPU; its kernels are formulas, unless the test has its own."""
    with pytest.MonkeyPatch.context() as patch:
        if kernels:
            flex = FlexAttention(function=flex_attention)
            patch.setattr(backend, "kernels", (backend.kernels[0], flex, *backend.kernels[2:]))
        patch.setattr(sdpa, "KERNEL", scaled_dot_product_attention)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        with Pretended():
            yield
