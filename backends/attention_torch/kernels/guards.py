"""When PyTorch's kernel gives the answer of the definition, and when it is faster.

Every refusal names a line of the contract (docs/explanation/contract.md) that the kernel would break, or what it lacks.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch.autograd import forward_ad

from attention_core.backend import (
    Call,
    bounds_of,
    has_few_queries,
    inputs_are_finite,
    is_concrete,
    is_exporting,
    is_top_left_causal,
    key_ranges,
    leaves,
    may_count,
)
from attention_core.masks import Given, Mask, flatten
from attention_torch.modes import is_on_accelerator, is_on_host

HALVES = (torch.float16, torch.bfloat16)
MULTIPLIED = {torch.bfloat16} if torch.cpu._is_avx512_bf16_supported() else set()  # types of 16 bits, by a processor
VECTOR_LANES = 16  # numbers in the longest vectors of a processor
MASK_PER_INPUT = 8  # on an accelerator, numbers of a mask for each of query, key and value
MIN_SCORES = 2**15  # from which on a compiled call gains more by the kernel than reading costs


def records(call: Call) -> bool:
    """Whether autograd records what is computed of query, key and value."""
    query, key, value = call[:3]
    return torch.is_grad_enabled() and any(map(_requires_grad, (query, key, value)))


def _requires_grad(array: torch.Tensor) -> bool:
    """Whether an array is to be differentiated, of which torch.func.grad tells a compiler once something is done."""
    return bool((array.view_as(array) if torch.compiler.is_dynamo_compiling() else array).requires_grad)


def slower(call: Call) -> str | None:
    """Why the kernel is slower than blocks, or than the dense form where a compiler fuses that; else ``None``."""
    query = call.query
    if is_on_host(query) and query.dtype in HALVES and (reason := _slower_in_16_bits(call)):
        return reason
    if decides_at_run_time(call) and may_leak(call):
        is_small = not has_open_sizes(call) and math.prod(query.shape[:-1]) * call.key.shape[-2] < MIN_SCORES
        if is_small and 2 * query.numel() > call.key.numel():
            return "gains less in a compiled program than reading the arguments costs"
    return None


def _slower_in_16_bits(call: Call) -> str | None:
    """Why the kernel for CPUs is slower in 16 bits, whose weights it rounds, or ``None``."""
    if call.query.dtype not in MULTIPLIED:
        return "rounds weights of 16 bits, and this processor does not multiply them"
    if isinstance(call.scale, torch.Tensor):
        return "rounds a query of 16 bits that an array scales"
    if few_queries(call):
        return "reads keys of 16 bits for a few queries as fast as others, and rounds weights"
    if not records(call) or has_open_sizes(call):
        return None
    is_small = call.query.shape[-2] * call.key.shape[-2] <= call.backend.tuning.dense_below
    return "is differentiated slower than the dense form of so few scores in 16 bits" if is_small else None


def few_queries(call: Call) -> bool:
    """Whether this is a step of decoding; not known in a program for many lengths."""
    return not has_open_sizes(call) and has_few_queries(call.query.shape[-2], call.key.shape[-2])


def has_open_sizes(call: Call) -> bool:
    """Whether a program is compiled or exported for many sizes. A choice by one would compile it again for others."""
    if is_exporting(call.query):
        return True
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # noqa: PLC0415 (imports sympy)

    return not all(map(has_static_value, (*call.query.shape, *call.key.shape)))


def refusal(call: Call) -> str | None:
    """Why the kernel would not give the answer, or ``None``."""
    if getattr(forward_ad, "_current_level", -1) >= 0:  # which no public function tells
        return "is not differentiated in forward mode"
    of_mask = _refusal_of_mask(call, decides_at_run_time(call))
    return of_mask or _refusal_of_values(call)


def _refusal_of_mask(call: Call, later: bool) -> str | None:
    is_rule = is_rule_without_flag(call.mask)
    if is_rule and fits_as_array(call):
        return None
    if not counts_from_0(call.starts):
        return "counts positions from 0 (line 3)"
    band, has_bias = bounds_of(call.mask), call.bias is not None
    is_later = later or (is_on_accelerator(call.query) and band.ends == (None, None))
    has_lengths = is_of_lengths(call.mask) and (is_later or _can_read(band.stop))
    is_causal = band.is_exact and band.ends[0] is None and band.ends[1] is not None and not band.has_stop
    has_offset = is_causal and later and is_on_host(call.query)
    if is_rule and (has_bias or not (has_lengths or has_offset)):
        return "would need this mask as an array of all M x N (line 2)"
    return None


def fits_mask(call: Call) -> bool:
    """Whether the kernel takes the mask, whose numbers can be read now."""
    return _refusal_of_mask(call, later=False) is None


def _refusal_of_values(call: Call) -> str | None:
    if not may_leak(call):
        return None
    is_looked_at = attends_later(call) if is_on_host(call.query) else all_finite(call)
    return None if is_looked_at else "lets masked keys leak that are not seen to be finite (line 5)"


def may_leak(call: Call) -> bool:
    """Whether the kernel may compute with something that is masked, or overlook NaN, and somebody looks."""
    if call.assume_finite:
        return False
    if call.mask is None and call.bias is None:
        return is_on_host(call.query) and _has_few_keys(call)
    band = bounds_of(call.mask)
    is_cut = call.bias is None and is_of_lengths(call.mask) and band.ends == (None, None)
    return not (is_cut and _can_read(band.stop))


def with_default_finite(call: Call) -> Call:
    """The call, with the default of its device in `assume_finite`: on an accelerator, nothing is checked."""
    is_left = call.assume_finite is None and is_on_accelerator(call.query)
    return call._replace(assume_finite=True) if is_left else call


def decides_at_run_time(call: Call) -> bool:
    """Whether a compiled program can read, when it runs, what cannot be read now."""
    arrays = call.query, call.key, call.value
    return (
        torch.compiler.is_compiling()
        and not is_exporting(call.query)
        and (call.scale is None or isinstance(call.scale, Real))
        and not any(torch._C._functorch.is_batchedtensor(array) or 0 in array.shape for array in arrays)
    )


def is_of_lengths(mask: Any) -> bool:
    """Whether a mask says how many keys there are, and perhaps is causal: no more."""
    band = bounds_of(mask)
    return band.is_plain and band.has_stop and band.ends in ((None, None), (None, 0))


def _can_read(lengths: Any) -> bool:
    """Whether lengths are numbers, or can be read without waiting for an accelerator."""
    return not isinstance(lengths, torch.Tensor) or (is_on_host(lengths) and is_concrete(lengths))


def fits_as_array(call: Call) -> bool:
    """Whether a rule takes little time as an array, and little memory next to query, key and value."""
    if not isinstance(call.mask, Mask) or is_exporting(call.query):
        return False
    if few_queries(call) or (has_open_sizes(call) and is_on_host(call.query)):
        return True  # a program for many sizes looks at them when it runs
    rows, columns = call.query.shape[-2], call.key.shape[-2]
    inputs = call.query.numel() + 2 * call.key.numel()
    if is_on_accelerator(call.query) and call.bias is not None and call.bias.shape[-2:] == (rows, columns):
        return True  # next to an array of as many numbers
    if is_on_accelerator(call.query) and _is_rule_of_positions(call.mask):
        return bool(math.prod(call.query.shape[:-3]) * rows * columns <= MASK_PER_INPUT * inputs)
    if is_on_host(call.query) and rows * columns <= call.backend.tuning.structured_below:
        return True  # where blocks would not save what the kernel does
    return 2 * rows <= columns and rows * columns <= 2 * inputs and key_ranges(call) is not None


def _is_rule_of_positions(mask: Any) -> bool:
    """Whether a rule is one of samples and positions, alike for all heads."""
    treedef, _ = flatten(mask)
    return not may_count(treedef) and all(leaf.axes < 3 for leaf in leaves(treedef))


def all_finite(call: Call) -> bool:
    """Whether query, key and value are seen to be finite, which waits for the device; not if their sum overflows."""
    return bool(call.assume_finite or (all(map(is_concrete, call[:3])) and inputs_are_finite(call)))


def attends_later(call: Call) -> bool:
    """Whether values can be read now, or by the program that is compiled."""
    return decides_at_run_time(call) or all(map(is_concrete, call[:3]))


def _has_few_keys(call: Call) -> bool:
    """Whether there are fewer than a vector of the processor holds, which is when the kernel overlooks NaN."""
    columns = call.key.shape[-2]
    if has_open_sizes(call):
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # noqa: PLC0415 (imports sympy)

        return bool(statically_known_true(columns < VECTOR_LANES))
    return isinstance(columns, int) and columns < VECTOR_LANES


def norms_are_small(arrays: tuple[torch.Tensor, ...], scale: float) -> bool:
    """Whether norms of query, key and value show that no score overflows, scaled or not, nor a product with values.

    No number is then non-finite. Norms of 16 bits are taken in float32.
    """
    dtype = torch.float32 if arrays[0].dtype in HALVES else arrays[0].dtype
    query, key, value = (torch.linalg.vector_norm(x.detach(), dtype=dtype).item() for x in arrays)
    largest = torch.finfo(dtype).max
    return bool(query * max(1.0, abs(scale)) * key < largest and value < math.sqrt(largest) / 16)


def counts_from_0(starts: tuple[Any, Any]) -> bool:
    """Whether the positions of queries and keys count from 0; those of an array are not looked at."""
    return all(isinstance(start, int) and start == 0 for start in starts)


def is_rule_without_flag(mask: Any) -> bool:
    """Whether a mask is a rule that the kernel has no flag for."""
    return isinstance(mask, Mask) and not isinstance(mask, Given) and not is_top_left_causal(mask)
