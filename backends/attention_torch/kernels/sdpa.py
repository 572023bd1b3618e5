"""One call of PyTorch's `scaled_dot_product_attention`, from a call that `guards` let through."""

from __future__ import annotations

import contextlib
import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_core.backend import (
    DIFFERENTIATED_ONCE,
    Call,
    default_scale,
    fold_group,
    group_size,
    is_concrete,
    is_top_left_causal,
    repeat_kv,
    score_positions,
)
from attention_core.masks import Given, Mask
from attention_torch.kernels.guards import HALVES, counts_from_0, few_queries, records
from attention_torch.modes import is_on_accelerator, is_on_host

TAKES_GROUPS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # the kernel for CPUs, forward and backward
# Bound here: who replaces the function of torch.nn.functional by one that calls ours must not be called back.
KERNEL = torch._C._nn.scaled_dot_product_attention
ANY_KERNEL = contextlib.nullcontext()
DENSE = torch.ops.aten._scaled_dot_product_attention_math
MAX_SCORES_AGAIN = 512 * 512  # of a head, up to which second derivatives take the dense form
MAX_PLAIN_BIAS = 1024.0  # up to which a logsumexp loses no more of a row's sum than rounding scores does
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def differentiated_again(output: torch.Tensor) -> torch.Tensor:
    """The output of a kernel, whose gradients are then differentiated by the dense form, or refuse to be."""
    if output.requires_grad and not torch.compiler.is_compiling():
        output.grad_fn.register_hook(_recorded_again)
    return output


def _recorded_again(
    gradients: tuple[torch.Tensor | None, ...], d_output: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...] | None:
    """Gradients by PyTorch's dense form in place of those of a kernel, where somebody records how they are computed.

    Kernels of PyTorch do not know how. That for CPUs tells its arguments, unless a transform of functions asks, or
    `torch.utils.checkpoint`, which tells them once.
    """
    if not torch.is_grad_enabled():
        return None
    node: Any = torch._C._current_autograd_node()
    is_seen = torch._C._functorch.peek_interpreter_stack() is not None
    if node.name().startswith("ScaledDotProductFlashAttentionForCpu") and not is_seen:
        with contextlib.suppress(torch.utils.checkpoint.CheckpointError):
            arrays = [x.view_as(x) for x in (node._saved_query, node._saved_key, node._saved_value)]
            if arrays[0].shape[-2] * arrays[1].shape[-2] <= MAX_SCORES_AGAIN:
                options = {name: getattr(node, f"_saved_{name}") for name in ("attn_mask", "is_causal", "scale")}
                inputs = [x for x, gradient in zip(arrays, gradients, strict=False) if gradient is not None]
                with torch.autocast("cpu", enabled=False):  # it may be on where one goes backward
                    output = DENSE(*arrays, **options, enable_gqa=arrays[0].shape[-3] != arrays[1].shape[-3])[0]
                    found = iter(torch.autograd.grad(output, inputs, d_output[0], create_graph=True))
                return tuple(None if gradient is None else next(found) for gradient in gradients)
    for gradient in gradients:
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.register_prehook(_refuse)
    return None


def _refuse(cotangents: Any) -> None:
    raise NotImplementedError(DIFFERENTIATED_ONCE)


def kernel_output(call: Call) -> torch.Tensor:
    """The output of the kernel (..., H, M, E)."""
    if call.query.is_cuda and call.mask is not None and call.bias is None:
        output = _cudnn_output(call)
        if output is not None:
            return output
    call = scaled(call)
    (query, key, value), mask, is_causal = inputs_of(call)
    if mask is not None and mask.dtype != torch.bool and (records(call) or not is_on_host(mask)):
        mask = shifted(mask, call)
    is_on_gpu, options = query.is_cuda, {"is_causal": is_causal, "scale": call.scale}
    if query.shape[-3] != key.shape[-3]:  # which a compiler of symbols tells by a branch alone
        options["enable_gqa"] = True
    if is_on_gpu:
        query, key, value, mask = _as_gpus_read(query, key, value, mask)
    # cuDNN gives nan gradients with a mask and some lengths (pytorch#196678).
    with sdpa_kernel(WITHOUT_CUDNN) if mask is not None and is_on_gpu else ANY_KERNEL:
        output = KERNEL(query, key, value, attn_mask=mask, **options)
    if is_on_gpu and output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(_as_gpus_read_gradients)
    return with_batch_of(call, differentiated_again(output))


def _cudnn_output(call: Call) -> torch.Tensor | None:
    """The output of cuDNN under an array, of 16 bits and without a gradient; ``None`` where it takes none.

    It shares key heads, and splits keys of few queries. It averages all values where a mask leaves nothing.
    """
    if torch.compiler.is_compiling() or call.query.dtype not in HALVES or records(call):
        return None
    is_causal, mask = kernel_mask(call)
    if is_causal or mask is None:
        return None
    call = scaled(call)
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in call[:3])
    inputs = _as_gpus_read(query, key, value, with_axes_of(query, call, mask))
    has_groups = query.shape[1] != key.shape[1]
    if not torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(*inputs, 0.0, False, has_groups)):
        return None
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = KERNEL(*inputs[:3], attn_mask=inputs[3], scale=call.scale, enable_gqa=has_groups)
    return with_batch_of(call, torch.where(inputs[3].any(dim=-1, keepdim=True), output, 0.0))


def _as_gpus_read(query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """Arrays as kernels of a GPU take them."""
    if mask is not None and (mask.shape[-1] != key.shape[-2] or mask.stride(-1) != 1):
        mask = mask.expand(*mask.shape[:-1], key.shape[-2]).contiguous()
    return _aligned(query), _aligned(key), _aligned(value), None if mask is None else _aligned(mask)


def _as_gpus_read_gradients(d_output: torch.Tensor) -> torch.Tensor:
    """The gradient of the output, which kernels misread where it is expanded."""
    is_expanded = any(stride == 0 for stride, size in zip(d_output.stride(), d_output.shape, strict=True) if size > 1)
    return d_output.contiguous() if is_expanded or d_output.stride(-1) != 1 else _aligned(d_output)


def _aligned(array: torch.Tensor) -> torch.Tensor:
    """An array, copied where it starts within the 16 bytes that a GPU reads at once: its kernels end all of CUDA."""
    is_aligned = torch.compiler.is_compiling() or array.storage_offset() * array.element_size() % 16 == 0
    return array if is_aligned else array.clone()


def shifted(bias: torch.Tensor, call: Call) -> torch.Tensor:
    """A bias less `row_shift`, by which no weight changes, unless it is seen that there is nothing to shift."""
    shift = row_shift(bias)
    is_looked_at = is_on_host(bias) and not call.assume_finite and is_concrete(shift)
    return bias if is_looked_at and not bool(shift.any().item()) else bias - shift


def row_shift(bias: torch.Tensor) -> torch.Tensor:
    """The greatest number of each row (..., M, 1) of a bias, or 0 where that is small or no finite number.

    Kernels compute weights once more from the logsumexp, which a large bias rounds so far that the sum is lost. Then
    gradients are too large by as much as the number of keys. Kernels for GPUs take a number near the least one for a
    mask.
    """
    top = bias.detach().amax(dim=-1, keepdim=True)
    return torch.where((top.abs() > MAX_PLAIN_BIAS) & top.isfinite(), top, 0.0)


class Inputs(NamedTuple):
    """What the kernel is given, with one axis for the batch."""

    arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value
    mask: torch.Tensor | None  # boolean, or added to scores
    is_causal: bool


def inputs_of(call: Call) -> Inputs:
    """What the kernel is given of a call that has a key."""
    is_causal, mask = kernel_mask(call)
    query, key, value = map(with_unit_stride, call[:3]) if is_on_host(call.query) else call[:3]
    if query.dim() != 4:
        batch = math.prod(query.shape[:-3])
        query, key, value = (x.reshape(batch, *x.shape[-3:]) for x in (query, key, value))
    group = group_size(query, key, call.xp)
    shares_heads = group == 1 or (query.is_cuda and query.dtype in HALVES and mask is None)
    if few_queries(call) and not (shares_heads or is_causal):
        query = fold_group(query, group, xp=call.xp)
    elif not shares_heads and (query.device.type != "cpu" or not TAKES_GROUPS):  # of some types and masks on GPUs
        key, value = (repeat_kv(x, group, xp=call.xp) for x in (key, value))
    return Inputs((query, key, value), None if mask is None else with_axes_of(query, call, mask), is_causal)


def with_unit_stride(array: torch.Tensor) -> torch.Tensor:
    """What the kernel for CPUs can read: vectors in one piece."""
    return array if array.stride(-1) == 1 else array.contiguous()


def with_axes_of(query: torch.Tensor, call: Call, mask: torch.Tensor) -> torch.Tensor:
    """A mask of the scores of a call as one of those of `inputs_of`, which have one axis for the batch."""
    *leading, heads, rows, _ = call.query.shape
    if len(leading) != 1:
        mask = mask.expand(*leading, *(mask.shape[-3:] if mask.dim() > 2 else (1, *mask.shape)))
        mask = mask.reshape(math.prod(leading), *mask.shape[-3:])
    elif mask.dim() == 3:  # for which PyTorch has the dense form only
        mask = mask.unsqueeze(0)
    group = heads // query.shape[1]
    return mask if group == 1 else _fold_mask(mask, group, rows)


def _fold_mask(mask: torch.Tensor, group: int, rows: int) -> torch.Tensor:
    """A mask of scores (B, H, M, N) as one of scores (B, G, R M, N)."""
    if mask.shape[-2] == 1 and (mask.dim() == 2 or mask.shape[-3] == 1):
        return mask
    mask = mask if mask.dim() == 4 else mask.reshape(1, 1, *mask.shape)
    apart = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (-1, group))
    return apart.expand(-1, -1, group, rows, -1).flatten(-3, -2)


def with_batch_of(call: Call, array: torch.Tensor) -> torch.Tensor:
    """An array (B, H, M, ...) or (B, G, R M, ...) with the axes of the call, (..., H, M, ...)."""
    dims = (*call.query.shape[:-1], *array.shape[3:])
    return array if array.shape == dims else array.reshape(dims)


def scaled(call: Call) -> Call:
    """The call with its query multiplied by as much of the scale as is not left to the kernel."""
    factor, left, _ = scale_of(call)
    return call._replace(query=call.query if factor is None else call.query * factor, scale=left)


class Scale(NamedTuple):
    """The scale of a call for a kernel."""

    factor: Any  # of the query, None for 1
    left: float  # what is left to the kernel
    number: Any  # both, if they are numbers


def scale_of(call: Call) -> Scale:
    """The scale as a factor of the query, and what is left of it to the kernel.

    The query is multiplied, as scores that fit might overflow on the way; by a power of two, which rounds nothing.
    Products of float16 are far from the largest float32. The kernel multiplies what it has masked with -inf already, so
    that it gets no scale but a positive one.
    """
    scale: Any = default_scale(call.query, call.xp) if call.scale is None else call.scale
    if isinstance(scale, torch.Tensor):
        return Scale(scale.to(call.query.dtype), 1.0, math.nan)
    scale = scale if call.scale is None else float(scale)  # of a Fraction, too
    if not isinstance(scale, Real) or scale == 0.0:  # a symbol
        return Scale(scale, 1.0, scale)
    is_left = call.query.dtype == torch.float16 or (call.assume_finite and is_on_accelerator(call.query))
    exponent = 0 if is_left else math.frexp(scale)[1] - 1
    factor = math.copysign(2.0**exponent, scale)
    return Scale(None if factor == 1.0 else factor, math.ldexp(abs(scale), -exponent), scale)


def _is_of_all(mask: torch.Tensor, call: Call) -> bool:
    """Whether a mask has no more rows or columns than a call, of which a rank may have the first queries alone."""
    dims = zip(reversed(mask.shape), (call.key.shape[-2], call.query.shape[-2]), strict=False)
    return all(size == 1 or size == count for size, count in dims)


def kernel_mask(call: Call) -> tuple[bool, torch.Tensor | None]:
    """Whether the kernel is to be causal, and its mask: boolean, or a bias."""
    mask: Any = call.mask
    bias = call.bias
    if bias is None and is_top_left_causal(mask) and counts_from_0(call.starts):
        return True, None
    if isinstance(mask, Given) and _is_of_all(mask.mask, call):
        mask = mask.mask
    elif isinstance(mask, Mask):
        mask = mask.allowed(score_positions(call), xp=call.xp)
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -math.inf)
    return False, mask if mask is None or mask.dim() > 1 else mask.reshape(1, -1)
