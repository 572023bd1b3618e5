"""PyTorch's kernel for sequences of several lengths as a `Kernel`: windows, offsets, key lengths and grouped heads.

It has not run on a GPU here, so that it is taken by its name alone. Its window counts from the last key of a sequence:
query i may attend to keys from i + N - M - left to i + N - M + right. No value is read on the host.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from attention_core.backend import Call, Verdict, default_scale, is_concrete
from attention_core.masks import Causal, KeyLengths, SlidingWindow
from attention_torch import repaired
from attention_torch.guards import HALVES, may_leak, records
from attention_torch.sdpa import differentiated_once

try:
    from torch.nn.attention import varlen
except ImportError:  # before PyTorch 2.10
    varlen = None

__all__ = ["VariableLengths"]

MAX_WIDTH = 256
ALL = -1  # the size of a window without an end
TAKES_LENGTHS = varlen is not None and "seqused_k" in inspect.signature(varlen.varlen_attn).parameters


class Structure(NamedTuple):
    """A mask in the words of the kernel: how far a window reaches, and how many keys each of the batch has."""

    left: int = ALL
    right: int = ALL
    lengths: Any = None


class VariableLengths:
    """`torch.nn.attention.varlen.varlen_attn`.

    Attributes
    ----------
    devices : tuple of str
        The kinds of devices on which it is a kernel.
    function : callable or None
        The function of PyTorch, or another in its place.
    """

    name = "torch.nn.attention.varlen"

    def __init__(self, devices: tuple[str, ...] = ("cuda",), function: Callable[..., Any] | None = None) -> None:
        self.devices = devices
        self.function = function if varlen is None or function is not None else varlen.varlen_attn

    def judge(self, call: Call) -> Verdict:
        """Say why the kernel would not give the answer; it is preferred nowhere, as its time is not measured."""
        return Verdict(self._refusal(call), False, "is not measured on a GPU yet")

    def _refusal(self, call: Call) -> str | None:
        arrays = call.query, call.key, call.value
        if not TAKES_LENGTHS or self.function is None:
            return "is not in this version of PyTorch"
        if call.query.device.type not in self.devices:
            return "needs a GPU"
        if call.query.dtype not in HALVES:
            return "computes in 16 bits only (line 8)"
        for name in ("softcap", "score_mod", "bias"):
            if getattr(call, name) is not None:
                return f"has no {name} (line 7)"
        if call.dropout is not None and call.dropout.rate:
            return "drops weights by a generator of its own (line 11)"
        if getattr(forward_ad, "_current_level", -1) >= 0:
            return "is not differentiated in forward mode"
        if not all(map(_is_plain, arrays)) or any(0 in array.shape for array in arrays):
            return "takes no arrays of torch.func, of an export, without values, or that are empty"
        width = call.query.shape[-1]
        if width != call.value.shape[-1] or width % 8 or width > MAX_WIDTH:
            return f"takes keys and values of one width, a multiple of 8 up to {MAX_WIDTH}"
        if not all(isinstance(start, int) for start in call.starts):
            return "counts positions from numbers that are known before it runs (line 3)"
        structure = _structure(call)
        if isinstance(structure, str):
            return structure
        if structure.lengths is not None and records(call):
            return "has no gradient with key lengths"
        return None

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output of the kernel, repaired where something is masked."""
        return self.attend_with_logsumexp(call)[0]

    def has_logsumexp(self, call: Call) -> bool:
        """Whether it returns the logsumexp, which has no gradient."""
        return not records(call)

    def attend_with_logsumexp(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and logsumexp of one run of the kernel."""
        leading = call.query.shape[:-3]
        call = repaired.with_number_as_scale(call)
        structure = _structure(call)
        assert isinstance(structure, Structure)
        arrays = [x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value)]
        call = call._replace(query=arrays[0], key=arrays[1], value=arrays[2])
        if structure.lengths is not None:
            lengths = structure.lengths.clamp(0, call.key.shape[-2]).to(torch.int32)
            lengths = lengths.expand(leading).reshape(-1) if lengths.dim() else lengths.expand(len(call.query))
            structure = structure._replace(lengths=lengths)

        def kernel(*arrays: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._run(call, structure, *arrays)

        if may_leak(call):
            output, logsumexp = repaired.results(call, AttendedInWindow(call, structure), kernel)
            assert logsumexp is not None
        else:
            output, logsumexp = kernel(*arrays)
        return output.reshape(*leading, *output.shape[1:]), logsumexp.reshape(*leading, *logsumexp.shape[1:])

    def _run(self, call: Call, structure: Structure, *arrays: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (B, H, M, E) and logsumexp (B, H, M): rows without keys give 0 and -inf, whatever the kernel says."""
        assert self.function is not None
        assert varlen is not None
        (batch, heads, rows, _), columns = arrays[0].shape, arrays[1].shape[-2]
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in arrays)  # all positions below each other
        scale: Any = default_scale(query, call.xp) if call.scale is None else call.scale
        counts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        output, logsumexp = self.function(
            query,
            key,
            value,
            counts * rows,
            counts * columns,
            rows,
            columns,
            return_aux=varlen.AuxRequest(lse=True),
            scale=float(scale),
            window_size=(structure.left, structure.right),
            enable_gqa=heads != arrays[1].shape[1],
            **({} if structure.lengths is None else {"seqused_k": structure.lengths}),
        )
        output = differentiated_once(output).unflatten(0, (batch, rows)).transpose(1, 2)
        logsumexp = logsumexp.unflatten(1, (batch, rows)).transpose(0, 1)
        if structure.lengths is None:
            return output, logsumexp
        is_masked = (structure.lengths == 0)[:, None, None]
        return torch.where(is_masked[..., None], 0.0, output), torch.where(is_masked, -math.inf, logsumexp)


def _is_plain(array: torch.Tensor) -> bool:
    """Whether an array has values, now or when a compiled program runs."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting() and not torch._C._functorch.is_batchedtensor(array)
    return is_concrete(array) and not torch._C._functorch.is_functorch_wrapped_tensor(array)


def _structure(call: Call) -> Structure | str:
    """The mask of a call in the words of the kernel, or why it has none."""
    mask: Any = call.mask
    rows, columns = call.query.shape[-2], call.key.shape[-2]
    first = call.starts[0] - call.starts[1]  # the position of the first query among the keys
    if mask is None:
        return Structure()
    if type(mask) is KeyLengths:
        if call.starts[1]:
            return "counts keys from 0 (line 3)"
        lengths = mask.lengths
        return Structure(
            lengths=torch.full((), lengths, device=call.key.device) if isinstance(lengths, int) else lengths
        )
    if type(mask) not in (Causal, SlidingWindow):
        return f"has no {type(mask).__name__} (line 2)"
    if not isinstance(mask.offset, int):
        if type(mask) is Causal and rows == 1:  # the last query has all keys before it
            return Structure(lengths=mask.offset + (first + 1))
        return "takes no offset of an array for more than one query (line 3)"
    further = first + mask.offset - (columns - rows)
    left = None if type(mask) is Causal else mask.left
    right = 0 if type(mask) is Causal else mask.right
    if columns < rows or (right is not None and right + further < 0) or (left is not None and left - further < 0):
        return "takes only windows that reach the key of each query, counted from the last ones (line 3)"
    return Structure(ALL if left is None else left - further, ALL if right is None else right + further)


class AttendedInWindow:
    """Who attends to whom within a window and the lengths of keys: by counts of what is indicated before each place."""

    scores_tell = False

    def __init__(self, call: Call, structure: Structure) -> None:
        self.group = call.query.shape[1] // call.key.shape[1]
        self.sizes = call.query.shape[-2], call.key.shape[-2]
        self.structure = structure

    def rows(self, indicators: torch.Tensor, is_any: torch.Tensor) -> torch.Tensor:
        """Which rows (B, H, M, C) attend to a key that is indicated (B, G, N, C)."""
        rows, columns = self.sizes
        left, right, lengths = self.structure
        if lengths is not None:
            keys = torch.arange(columns, dtype=torch.int32, device=indicators.device)
            indicators = indicators & (keys < lengths[:, None])[:, None, :, None]
        found = _any_between(indicators, rows, columns - rows, left=left, right=right)
        return found.repeat_interleave(self.group, dim=1)

    def keys(self, marked: torch.Tensor, is_any: torch.Tensor) -> torch.Tensor:
        """Which keys (B, H, N, C) are attended to by a row that is marked (B, H, M, C); lengths have no gradient."""
        rows, columns = self.sizes
        return _any_between(marked, columns, rows - columns, left=self.structure.right, right=self.structure.left)


def _any_between(indicators: torch.Tensor, count: int, offset: int, *, left: int, right: int) -> torch.Tensor:
    """Whether any is indicated (..., L, C) from i + offset - left to i + offset + right, for so many i."""
    length = indicators.shape[-2]
    before = torch.nn.functional.pad(indicators.to(torch.int32).cumsum(dim=-2, dtype=torch.int32), (0, 0, 1, 0))
    at = torch.arange(count, device=indicators.device) + offset
    first = at * 0 if left == ALL else (at - left).clamp(0, length)
    stop = at * 0 + length if right == ALL else (at + right + 1).clamp(0, length)
    return before.index_select(-2, stop) > before.index_select(-2, first)
