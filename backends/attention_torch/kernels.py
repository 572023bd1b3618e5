"""PyTorch's fused attention, and when it gives the answer of the definition.

Every refusal names a line of the contract (docs/explanation/contract.md) that the kernel would break, or what it lacks.
"""

from __future__ import annotations

import contextlib
import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_core.backend import (
    Backend,
    Call,
    Operation,
    Verdict,
    blockwise,
    blockwise_unless,
    cast_to,
    default_scale,
    group_size,
    is_concrete,
    is_top_left_causal,
    known_finite_products,
    known_finite_scores,
    products_are_finite,
    register,
    repeat_kv,
    score_positions,
)
from attention_core.masks import And, Causal, Given, KeyLengths, Mask

__all__ = ["ScaledDotProduct"]

HALVES = (torch.float16, torch.bfloat16)
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LEAST_SEEN = 2**16  # elements of the query, from which on a look at the arguments takes less time than a product
COMPUTE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
DIFFERENTIATE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
LANES = 16  # numbers in the longest vectors of a processor
LEAST_ROWS, LEAST_SCORES = 64, 2**15  # from which on a compiled call gains more from the kernel than looking costs


class ScaledDotProduct:
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "torch.nn.functional.scaled_dot_product_attention"

    def judge(self, call: Call) -> Verdict:
        """Say why the kernel would not give the answer, and whether it is faster.

        Query, key and value are read where something is masked, and where there are few keys.
        """
        return Verdict(self._refusal(call), self._is_faster(call))

    def _is_faster(self, call: Call) -> bool:
        """Whether the kernel is faster than blocks, or than the dense form where a compiler fuses that.

        On a CPU, the kernel for 16 bits rounds weights that blocks do not, and is no faster; and with values of another
        width than keys, PyTorch has the dense form only. Where there are few keys, it takes scores that are all nan for
        masked ones.
        """
        query, value = call.query, call.value
        if (query.device.type == "cpu" and query.dtype in HALVES) or query.shape[-1] != value.shape[-1]:
            return False
        if _is_asked_later(call) and _may_leak(call):
            *leading, rows, _ = query.shape
            if rows < LEAST_ROWS or math.prod(leading) * rows * call.key.shape[-2] < LEAST_SCORES:
                return False
        return call.mask is not None or not _has_few_keys(call) or _are_seen_finite(query, call.key)

    def _refusal(self, call: Call) -> str | None:
        for name in ("softcap", "score_mod"):
            if getattr(call, name) is not None:
                return f"has no {name}"
        if call.dropout is not None and call.dropout.rate:
            return "drops weights by a generator of its own (line 11)"
        if call.starts != (0, 0):
            return "counts positions from 0 (line 3)"
        later = _is_asked_later(call)
        of_later = later and call.bias is None and isinstance(call.mask, KeyLengths)
        if not (_is_plain(call.mask) or of_later or _is_padding(call)):
            return "would need this mask as an array of all M x N (line 2)"
        if call.bias is not None and (call.bias.requires_grad or call.bias.dtype != call.query.dtype):
            return "takes no bias of another dtype than query, nor one that is to be differentiated"
        if later and call.bias is not None:
            return "takes no bias in a compiled program, which does not tell whether it is to be differentiated"
        if not _may_leak(call):
            return None
        if call.bias is not None and call.query.is_cuda and _is_extreme(call.bias):
            return "takes a bias near the least number for a mask (line 4)"
        with torch.no_grad():
            if not (later or _are_bounded(call, call.query, call.key, call.value) or known_finite_products(call)):
                return "lets masked keys leak that are not seen to be finite, with finite scores and gradients (line 5)"
        return None

    def attend(self, call: Call) -> torch.Tensor:
        """The output of the kernel, or that of blocks if a compiled program finds that something masked could leak."""
        if not (_is_asked_later(call) and _may_leak(call)):
            return self._attend(call)
        if is_top_left_causal(call.mask) and call.bias is None and _has_operator(call):
            return _attend_later(call)
        if isinstance(call.mask, KeyLengths) and call.query.device.type == "cpu":
            inputs = call.query, call.key, call.value, call.mask.lengths
            return call.backend.custom_gradient(
                PADDED, Padded(None if call.scale is None else float(call.scale)), inputs
            )[0]
        with torch.no_grad():
            tame = products_are_finite(call)
        # What torch.func.grad is asked about says that it is differentiated only once something is done with it.
        arrays = [array.view_as(array) for array in (call.query, call.key, call.value)]
        if not (torch.is_grad_enabled() and any(array.requires_grad for array in arrays)):
            return torch.where(tame, self._attend(call), blockwise_unless(tame, call))
        pairs = [Parted.apply(tame, array) for array in arrays]
        one, other = (call._replace(query=x[0], key=x[1], value=x[2]) for x in zip(*pairs, strict=True))
        return Joined.apply(tame, self._attend(one), blockwise_unless(tame, other))

    def _attend(self, call: Call) -> torch.Tensor:
        """The scale multiplies the query where scores that fit might overflow on the way, else scores.

        The kernel multiplies what it has masked with -inf already, so that it gets no scale but a positive one.
        """
        padding = _padding(call)
        if padding is not None:
            return _attend_apart(self, call, *padding)
        xp = call.xp
        scale = default_scale(call.query, xp) if call.scale is None else call.scale
        query, factor = call.query, 1.0
        if isinstance(scale, torch.Tensor):
            query = query * scale.to(query.dtype)
        elif scale > 0 and (_may_leak(call) or _seen_to_fit(call)):  # what may leak is wanted only if all is tame
            factor = float(scale)
        else:
            query = query * scale
        times = group_size(query, call.key, xp)
        key, value = (repeat_kv(x, times, xp=xp) for x in (call.key, call.value))
        causal, mask = _mask(call, query)
        *leading, heads, rows, _ = query.shape
        flat = len(leading) != 1
        if flat:
            entries = math.prod(leading)
            query, key, value = (x.reshape(entries, *x.shape[-3:]) for x in (query, key, value))
            if mask is not None:
                mask = mask.expand(*leading, *(mask.shape[-3:] if mask.dim() > 2 else (1, *mask.shape)))
                mask = mask.reshape(entries, *mask.shape[-3:])
        # cuDNN gives nan gradients with a mask and some lengths (pytorch#196678).
        choice = sdpa_kernel(WITHOUT_CUDNN) if mask is not None and query.is_cuda else contextlib.nullcontext()
        with choice:
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, scale=factor
            )
        return output.reshape(*leading, heads, rows, value.shape[-1]) if flat else output


class Parted(torch.autograd.Function):  # type: ignore[misc]
    """An array for each of two ways to go on; its gradient comes by the way that `Joined` takes."""

    @staticmethod
    def forward(condition: torch.Tensor, array: torch.Tensor) -> Any:
        """Return the array twice."""
        return array.view_as(array), array.view_as(array)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the condition."""
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Choose, as the other one may be nan."""
        return None, torch.where(*ctx.saved_tensors, *gradients)


class Joined(torch.autograd.Function):  # type: ignore[misc]
    """The result of the first way if a condition is true, else that of the second."""

    @staticmethod
    def forward(condition: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Any:
        """Choose."""
        return torch.where(condition, first, second)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Hand on the gradient both ways, at the other end of which one is chosen."""
        return None, gradient, gradient


def _may_leak(call: Call) -> bool:
    """Whether the kernel computes with something that is masked."""
    mask: Any = call.mask
    if call.bias is not None or not isinstance(mask, KeyLengths):
        return call.bias is not None or mask is not None
    return isinstance(mask.lengths, torch.Tensor) and not is_concrete(mask.lengths)


def _has_few_keys(call: Call) -> bool:
    """Whether there are fewer than a vector of the processor holds, which is when the kernel overlooks nan."""
    columns = call.key.shape[-2]
    return call.query.device.type == "cpu" and isinstance(columns, int) and columns < LANES


def _are_seen_finite(*arrays: torch.Tensor) -> bool:
    return all(map(is_concrete, arrays)) and all(math.isfinite(array.detach().sum().item()) for array in arrays)


def _seen_to_fit(call: Call) -> bool:
    """Whether no score overflows before it is scaled, where looking takes less time than another query."""
    if call.query.device.type != "cpu" or not is_concrete(call.query) or call.query.numel() < LEAST_SEEN:
        return False
    with torch.no_grad():
        return _are_bounded(call, call.query, call.key) or known_finite_scores(call)


def _are_bounded(call: Call, *arrays: torch.Tensor) -> bool:
    """Whether norms of whole arrays, which no products are above, are so small that all is finite.

    That is one look at each, where `known_tame` takes two.
    """
    if call.query.dtype in HALVES or not (call.scale is None or isinstance(call.scale, Real)):
        return False
    if not all(map(is_concrete, arrays)) or any(0 in array.shape for array in arrays):
        return False
    in_order = (x.transpose(-3, -2) if x.stride(-3) < x.stride(-2) else x for x in arrays)  # of memory: not copied
    flat = [array.reshape(-1) for array in in_order]
    norms = [math.sqrt(square) for square in torch.stack([torch.dot(each, each) for each in flat]).tolist()]
    scale = 1.0 if call.scale is None else max(1.0, abs(float(call.scale)))
    return all(map(math.isfinite, norms)) and norms[0] * norms[1] * scale < torch.finfo(call.query.dtype).max


def _is_asked_later(call: Call) -> bool:
    """Whether an operator of ours can read, when a compiled program runs, what cannot be read now."""
    arrays = call.query, call.key, call.value
    return (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and (call.scale is None or isinstance(call.scale, Real))
        and not any(torch._C._functorch.is_batchedtensor(array) or 0 in array.shape for array in arrays)
    )


def _is_padding(call: Call) -> bool:
    """Whether the mask says how many keys there are, in numbers that can be read, and whether it is causal: no more."""
    _, mask = _causal_part(call.mask)
    if not isinstance(mask, KeyLengths) or call.bias is not None:
        return False
    return not isinstance(mask.lengths, torch.Tensor) or is_concrete(mask.lengths)


def _causal_part(mask: Any) -> tuple[Mask | None, Any]:
    """A mask as its causal half, if it has one, and the other half."""
    if not isinstance(mask, And) or not (is_top_left_causal(mask.first) or is_top_left_causal(mask.second)):
        return None, mask
    return (mask.first, mask.second) if is_top_left_causal(mask.first) else (mask.second, mask.first)


def _padding(call: Call) -> tuple[list[int], Mask | None] | None:
    """How many keys each entry has, and the causal mask among them, where that is all that the mask says.

    The kernel is then called for one entry after the other, with these keys alone.
    """
    if not _is_padding(call):
        return None
    causal, mask = _causal_part(call.mask)
    lengths = mask.lengths
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.expand(call.query.shape[:-3]).reshape(-1).tolist()
    else:
        lengths = [lengths] * math.prod(call.query.shape[:-3])
    return [min(length, call.key.shape[-2]) for length in lengths], causal


def _attend_apart(kernel: ScaledDotProduct, call: Call, lengths: list[int], causal: Mask | None) -> torch.Tensor:
    """The output of the kernel for each entry with so many of its keys."""
    query, key, value = (array.reshape(-1, *array.shape[-3:]) for array in (call.query, call.key, call.value))
    outputs = [
        kernel.attend(
            call._replace(
                query=query[entry : entry + 1],
                key=key[entry : entry + 1, :, :length],
                value=value[entry : entry + 1, :, :length],
                mask=causal,
            )
        )
        for entry, length in enumerate(lengths)
    ]
    return torch.cat(outputs).reshape(*call.query.shape[:-1], call.value.shape[-1])


class Causally(NamedTuple):
    """What is known of a causal call while it is compiled.

    Its arrays are query, key and value (B, M or N, H, D), which is how the kernel lays out their gradients. Its output
    lies in memory as the query does: with heads before rows (B, H, M, D), or behind them.
    """

    scale: float | None
    heads_first: bool


def _has_operator(call: Call) -> bool:
    """Whether the kernel for CPUs takes the call without another mask."""
    positive = call.scale is None or float(call.scale) > 0
    return positive and call.query.device.type == "cpu" and call.query.shape[-1] == call.value.shape[-1]


def _attend_later(call: Call) -> torch.Tensor:
    """The output of the kernel under a causal mask, if nothing leaks once the program runs, or that of blocks."""
    xp = call.xp
    *leading, heads, rows, width = call.query.shape
    times = group_size(call.query, call.key, xp)
    key, value = (repeat_kv(array, times, xp=xp) for array in (call.key, call.value))
    arrays = tuple(_exchanged(array.reshape(-1, *array.shape[-3:])) for array in (call.query, key, value))
    scale = None if call.scale is None else float(call.scale)  # what is None may depend on a width that is a symbol
    heads_first = True if call.query.stride(-3) >= call.query.stride(-2) else False  # noqa: SIM210 (not a symbol)
    output, _ = call.backend.custom_gradient(CAUSAL, Causally(scale, heads_first), arrays)
    return (output if heads_first else _exchanged(output)).reshape(*leading, heads, rows, width)


def _causal_forward(
    plan: Causally, arrays: tuple[torch.Tensor, ...], backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the logarithm of the normalizer (B, M, H), nan if the output is of blocks."""
    query, key, value = inputs = tuple(map(_exchanged, arrays))
    call = _causal_call(plan, backend, *inputs)
    if _are_bounded(call, query, key, value) or known_finite_products(call):
        output, logsumexp = COMPUTE(*map(_with_unit_stride, inputs), 0.0, True, scale=plan.scale)
    else:
        output = cast_to(blockwise(call)[0], query.dtype, xp=backend.namespace)
        logsumexp = _exchanged(_causal_empty(plan, arrays, backend)[1]).fill_(math.nan)
    return output if plan.heads_first else _exchanged(output), _exchanged(logsumexp)


def _causal_backward(
    plan: Causally, arrays: tuple[torch.Tensor, ...], results: Any, cotangents: Any, backend: Backend
) -> tuple[torch.Tensor, ...]:
    inputs = tuple(map(_exchanged, arrays))
    output, cotangent = (x if plan.heads_first else _exchanged(x) for x in (results[0], cotangents[0]))
    if not results[1][0, 0, 0].isnan():
        given = map(_with_unit_stride, (cotangent, *inputs, output))
        gradients = DIFFERENTIATE(*given, _exchanged(results[1]), 0.0, True, scale=plan.scale)
    else:
        _, pull = backend.vjp(lambda *each: blockwise(_causal_call(plan, backend, *each))[0], *inputs)
        gradients = pull(cotangent.to(results[1].dtype))
    return tuple(map(_exchanged, gradients))


def _causal_call(plan: Causally, backend: Backend, *inputs: torch.Tensor) -> Call:
    query, key, value = inputs
    return Call(query, key, value, backend.namespace, backend, mask=Causal(), scale=plan.scale)


def _causal_empty(
    plan: Causally, arrays: tuple[torch.Tensor, ...], backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    query = arrays[0]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    output = _exchanged(query) if plan.heads_first else query
    return query.new_empty(output.shape), query.new_empty(query.shape[:-1], dtype=wide)


CAUSAL = register("torch.causal", Operation(_causal_forward, _causal_backward, _causal_empty))


def _exchanged(array: torch.Tensor) -> torch.Tensor:
    """Heads before rows as rows before heads, and back."""
    return array.transpose(1, 2)


def _with_unit_stride(array: torch.Tensor) -> torch.Tensor:
    """What the kernel can read: vectors in one piece."""
    return array if array.stride(-1) == 1 else array.contiguous()


class Padded(NamedTuple):
    """What is known of a call with lengths of the keys while it is compiled."""

    scale: float | None


def _padded(plan: Padded, lengths: torch.Tensor, backend: Backend) -> Any:
    """Attention to as many keys as lengths that can be read by now say, as a function of query, key and value."""
    mask = KeyLengths(torch.clamp(lengths, min=0))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return ScaledDotProduct().attend(
            Call(query, key, value, backend.namespace, backend, mask=mask, scale=plan.scale)
        )

    return attend


def _padded_forward(plan: Padded, arrays: tuple[torch.Tensor, ...], backend: Backend) -> tuple[torch.Tensor]:
    *inputs, lengths = arrays
    return (_padded(plan, lengths, backend)(*inputs),)


def _padded_backward(
    plan: Padded, arrays: tuple[torch.Tensor, ...], results: Any, cotangents: tuple[torch.Tensor], backend: Backend
) -> tuple[torch.Tensor | None, ...]:
    *inputs, lengths = arrays
    _, pull = backend.vjp(_padded(plan, lengths, backend), *inputs)
    return *pull(cotangents[0]), None


def _padded_empty(plan: Padded, arrays: tuple[torch.Tensor, ...], backend: Backend) -> tuple[torch.Tensor]:
    query, _, value, _ = arrays
    return (query.new_empty((*query.shape[:-1], value.shape[-1])),)


PADDED = register("torch.padded", Operation(_padded_forward, _padded_backward, _padded_empty))


def _is_extreme(bias: torch.Tensor) -> bool:
    """Whether a bias holds numbers, -inf excepted, that kernels for GPUs were seen to take for a mask of theirs."""
    return not is_concrete(bias) or bool(((bias < -1e30) & (bias > -math.inf)).any().item())


def _is_plain(mask: Any) -> bool:
    return not isinstance(mask, Mask) or isinstance(mask, Given) or is_top_left_causal(mask)


def _mask(call: Call, query: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """Whether the kernel is to be causal, and its mask: boolean, or a bias."""
    mask: Any = call.mask
    bias = call.bias
    causal = is_top_left_causal(mask)
    if causal and bias is None:
        return True, None
    if causal:
        rows, columns = query.shape[-2], call.key.shape[-2]
        mask = torch.ones((rows, columns), dtype=torch.bool, device=query.device).tril()
    elif isinstance(mask, Given):
        mask = mask.mask
    elif isinstance(mask, KeyLengths):
        mask = mask.allowed(score_positions(call.query, call.key, call.starts, call.xp), xp=call.xp)
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -math.inf)
    return False, mask if mask is None or mask.dim() > 1 else mask.reshape(1, -1)
