"""PyTorch's FlexAttention as a `Kernel`: rules as block masks, and functions of scores.

A rule and a function of the core are called with single positions, which FlexAttention traces into its kernel. The
blocks that a rule leaves empty are known from `Mask.blocks`, so that no array of M x N is made.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from attention_core.backend import Call, Kernel, Takes, Verdict, default_scale, is_concrete, is_exporting, remember
from attention_core.masks import And, Given, Mask, MaskFunction, Not, Or, Segments, Spans, flatten
from attention_torch.kernels.flex_functions import (
    KEPT,
    looks_up,
    mask_function,
    modified,
    score_function,
)
from attention_torch.kernels.guards import all_finite, records, with_default_finite
from attention_torch.kernels.hidden import with_hidden_cleared
from attention_torch.kernels.sdpa import differentiated_again
from attention_torch.programs import compiled_apart

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries, and keys, of a block of FlexAttention
MIN_WIDTH = 16  # of a product on tensor cores
MIN_ROWS = 128  # from which on a kernel that is compiled for the call is worth it
RULES = (And, Given, MaskFunction, Not, Or, Segments)  # and those that their bounds say


def _library() -> Any:
    """PyTorch's module. It imports the compiler, which takes a second, and no call on a CPU asks for it."""
    from torch.nn.attention import flex_attention  # noqa: PLC0415

    return flex_attention


class FlexAttention(Kernel):
    """`torch.nn.attention.flex_attention`, compiled once for each kind of call."""

    name = "torch.nn.attention.flex_attention"
    takes = Takes(("float16", "bfloat16", "float32"), options=("softcap", "score_mod"), masks=("any",))

    def __init__(self, devices: tuple[str, ...] = ("cuda",), function: Callable[..., Any] | None = None) -> None:
        self.devices = devices  # the kinds of them on which it is a kernel that is differentiated
        self.function = function  # as it is called; by default compiled
        self._programs: dict[Any, Callable[..., Any]] = {}

    def judge(self, call: Call) -> Verdict:
        """Say why the kernel would not give the answer, and whether it is faster. Values are read if a call asks."""
        if call.query.device.type not in self.devices:
            return Verdict("needs a GPU: on a CPU it is dense unless compiled, and has no gradient")
        slower = "gains less for few queries than compiling costs" if call.query.shape[-2] < MIN_ROWS else None
        return Verdict(self.takes.refusal(call) or self.refusal(call), slower)

    def refusal(self, call: Call) -> str | None:
        """Why the kernel does not give the answer to a call that it takes."""
        arrays = call.query, call.key, call.value
        if not all(map(_can_be_given, arrays)):
            return "takes no arrays of torch.func, of an export, or without values"
        if any(0 in array.shape for array in arrays):
            return "takes no empty arrays"
        if min(call.query.shape[-1], call.value.shape[-1]) < MIN_WIDTH:
            return f"takes heads of a width of at least {MIN_WIDTH}"
        if call.mask is not None and not all_finite(with_default_finite(call)):
            return "lets masked keys leak that are not seen to be finite (line 5)"
        return _refusal_of_mask(call) or _refusal_of_scores(call)

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output of the kernel."""
        call = prepared(call)
        output = self._kernel(call)
        return differentiated_again(output).reshape(*call.query.shape[:-3], *output.shape[1:])

    def has_logsumexp(self, call: Call) -> bool:
        """Whether it returns the logsumexp, which it always does."""
        return True

    def attend_with_logsumexp(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and logsumexp of one run of the kernel."""
        call = prepared(call)
        output, found = self._kernel(call, return_aux=_library().AuxRequest(lse=True))
        output, logsumexp, leading = differentiated_again(output), found.lse, call.query.shape[:-3]
        return output.reshape(*leading, *output.shape[1:]), logsumexp.reshape(*leading, *logsumexp.shape[1:])

    def _kernel(self, call: Call, **options: Any) -> Any:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in call[:3])
        scale: Any = default_scale(query, call.xp) if call.scale is None else call.scale
        if isinstance(scale, torch.Tensor):
            query, scale = query * scale.to(query.dtype), 1.0
        options |= {"score_mod": score_function(call), "block_mask": block_mask(call), "scale": float(scale)}
        return self.program(call)(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **options)

    def program(self, call: Call) -> Callable[..., Any]:
        """FlexAttention, compiled for calls with the same kind of rule and function; lengths may differ."""
        if self.function is not None:
            return self.function
        if torch.compiler.is_compiling():  # the program around it compiles it
            return _library().flex_attention  # type: ignore[no-any-return]
        function = getattr(call.score_mod, "function", None)
        shapes = tuple((x.dtype, x.shape[-3], x.shape[-1]) for x in (call.query, call.key, call.value))
        options = (
            call.softcap is None,
            function if isinstance(function, Hashable) else id(function),
            call.scale if isinstance(call.scale, float) else None,
        )
        signature = (_kind(flatten(call.mask)[0]), *shapes, *options)
        if signature not in self._programs:
            remember(self._programs, signature, compiled_apart(_library().flex_attention), most=KEPT)
        return self._programs[signature]


def prepared(call: Call) -> Call:
    """The call with what is hidden from all queries cleared, unless somebody looked, or nobody has to."""
    return with_hidden_cleared(call) if call.assume_finite is None else call


def _kind(treedef: Any) -> Any:
    """A tree definition without its numbers, which do not change the program."""
    if isinstance(treedef, tuple):
        return tuple(map(_kind, treedef))
    return int if isinstance(treedef, int) else treedef


# The guard


def _can_be_given(array: torch.Tensor) -> bool:
    """Whether an array has values, now or when a compiled program or a CUDA graph runs."""
    if torch.compiler.is_compiling():
        return not is_exporting(array) and not torch._C._functorch.is_batchedtensor(array)
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(array)
    return (is_concrete(array) or _is_captured(array)) and not is_wrapped


def _refusal_of_mask(call: Call) -> str | None:
    for rule in _rules(call.mask):
        if type(rule) not in RULES and not rule.bounds().is_exact:
            return f"is not known to follow the rule {type(rule).__name__} (line 2)"
        if isinstance(rule, MaskFunction) and not _takes_positions(mask_function(call._replace(mask=rule)), 4, call):
            return "calls a mask function with single positions, which this one does not take (line 2)"
    return None


def _refusal_of_scores(call: Call) -> str | None:
    arrays = [call.softcap, *getattr(call.score_mod, "arrays", ())]
    if any(isinstance(array, torch.Tensor) and array.requires_grad for array in arrays):
        return "is not known to differentiate by arrays of functions of scores"
    if torch.compiler.is_compiling() and looks_up(call.score_mod):
        return "is given tables of a score_mod outside of a compiled program only"
    if call.score_mod is not None and not _takes_positions(modified(call), 5, call):
        return "calls a score_mod with single positions, which this one does not take"
    return None


def _rules(mask: Any) -> list[Any]:
    """The rules that a mask is combined of, and the combinations."""
    if isinstance(mask, And | Or):
        return [mask, *_rules(mask.first), *_rules(mask.second)]
    if isinstance(mask, Not):
        return [mask, *_rules(mask.mask)]
    return [mask] if isinstance(mask, Mask) else []


def _takes_positions(function: Callable[..., torch.Tensor], count: int, call: Call) -> bool:
    """Whether a function takes positions without axes, and gives one result for each."""
    expected = torch.float32 if count > 4 else torch.bool
    probe = torch.zeros(1, dtype=torch.int32, device=call.query.device)
    numbers = [probe.to(torch.float32)] * (count - 4) + [probe] * 4
    with torch.no_grad():
        try:
            result = torch.vmap(function)(*numbers)
        except Exception:  # of a function of users
            return False
    return isinstance(result, torch.Tensor) and (result.shape, result.dtype) == ((1,), expected)


# Block masks


_KEPT: dict[Any, BlockMask] = {}  # without their functions


def block_mask(call: Call) -> BlockMask | None:
    """The rule of a call as a block mask. Its blocks are kept for the next call, unless they depend on an array.

    Values of an array may change uncounted: by a CUDA graph that is replayed, another library, or `Tensor.data`.
    """
    if call.mask is None:
        return None
    treedef, arrays = flatten(call.mask)
    is_known = len(arrays) == 0 and all(isinstance(start, int) for start in call.starts)
    if not is_known or torch.compiler.is_compiling() or _is_captured(call.query):  # of a program, or of the graph
        return _blocks(call, mask_function(call), with_queries=records(call))
    key = treedef, call.query.shape[:-1], call.key.shape[-2], call.query.device, call.starts
    kept = _KEPT.get(key)
    if kept is None:
        kept = _blocks(call, None)
        remember(_KEPT, key, kept, most=KEPT)
    blocks = copy.copy(kept)
    blocks.mask_mod = mask_function(call)
    return blocks


def _is_captured(array: torch.Tensor) -> bool:
    """Whether a CUDA graph records what is computed."""
    return bool(array.is_cuda and torch.cuda.is_current_stream_capturing())


def _blocks(call: Call, function: Callable[..., torch.Tensor] | None, *, with_queries: bool = True) -> BlockMask:
    """The blocks that a rule leaves empty, full or mixed, from the positions at their ends.

    The blocks of queries by those of keys serve the backward pass.
    """
    xp, device = call.xp, call.query.device
    *leading, heads, rows, _ = call.query.shape
    columns = call.key.shape[-2]
    mask = call.mask if isinstance(call.mask, Mask) else Given(call.mask)
    query, key = (_spans(*each, device) for each in zip((rows, columns), call.starts, strict=True))
    some, every = mask.blocks(Spans(query[0][:, None], query[1][:, None], BLOCK), Spans(*key, BLOCK), xp=xp)
    whole = ((query[1] - query[0]) == BLOCK - 1)[:, None] & ((key[1] - key[0]) == BLOCK - 1)
    dims = (*leading, heads, *whole.shape)
    full = some & every & whole
    full, mixed = (_four_axes(flags, dims) for flags in (full, some & ~full))
    counted = [x for flags in (mixed, full) for x in _indices(flags)]
    return _library().BlockMask.from_kv_blocks(*counted, BLOCK, function, (rows, columns), with_queries)


def _spans(length: int, start: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last position of each block, counted from a start."""
    first = torch.arange(0, length, BLOCK, dtype=torch.int32, device=device)
    return first + start, (first + BLOCK - 1).clamp(max=length - 1) + start


def _four_axes(flags: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Flags of blocks with one axis for the batch and one for heads, both of size 1 where all are the same."""
    flags = flags.reshape((1,) * (len(dims) - flags.dim()) + flags.shape)
    flags = flags.expand(*flags.shape[:-2], *dims[-2:])
    if math.prod(flags.shape[:-3]) > 1:
        flags = flags.expand(*dims[:-3], *flags.shape[-3:])
    return flags.reshape(-1, *flags.shape[-3:])


def _indices(flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many keys' blocks a block of queries has, and which, those first."""
    order = torch.argsort(flags.to(torch.int32), dim=-1, descending=True, stable=True)
    return flags.sum(dim=-1).to(torch.int32), order.to(torch.int32)
