"""Rules and functions of scores as FlexAttention calls them: at single positions."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attention_core.backend import Call
from attention_core.masks import And, Band, Given, Mask, MaskFunction, Not, Or, Segments

FARTHEST = 2**29  # above all positions, as in the core: twice as far is no end
KEPT = 32  # block masks, programs and traced functions


def mask_function(call: Call) -> Callable[..., torch.Tensor]:
    """The rule of a call as FlexAttention calls it: a function of batch, head, query and key, each one number.

    The rules of the core are functions of blocks of positions, which PyTorch's compiler does not trace as scalars.
    """
    mask = call.mask if isinstance(call.mask, Mask) else Given(call.mask)
    return _counted(_rule(mask, call), call, (0, 0, *call.starts))


def _counted(function: Callable[..., torch.Tensor], call: Call, starts: tuple[Any, ...]) -> Callable[..., torch.Tensor]:
    """A function of positions, its last four arguments, which are counted from where a call starts."""
    if all(isinstance(start, int) and start == 0 for start in starts):
        return function
    numbers = [_numbers(start, call) for start in starts]

    def counted(*at: Any) -> torch.Tensor:
        return function(*at[:-4], *(each + number for each, number in zip(at[-4:], numbers, strict=True)))

    return counted


def _rule(mask: Any, call: Call) -> Any:
    if isinstance(mask, And | Or):
        first, second = _rule(mask.first, call), _rule(mask.second, call)
        joined = operator.and_ if isinstance(mask, And) else operator.or_
        return lambda *at: joined(first(*at), second(*at))
    if isinstance(mask, Not):
        hidden = _rule(mask.mask, call)
        return lambda *at: ~hidden(*at)
    if isinstance(mask, Segments):
        query_ids, key_ids = (_batched(ids, 1, call) for ids in (mask.query_ids, mask.key_ids))
        return lambda batch, head, query, key: _element(query_ids, (batch, query)) == _element(key_ids, (batch, key))
    if isinstance(mask, MaskFunction):
        function, arrays = mask.function, mask.arrays
        return _counted(lambda *at: function(*at, *arrays), call, (*call.whole[:2], 0, 0))
    if not isinstance(mask, Given):
        return _banded(call, mask.bounds())
    allowed = _batched(mask.mask, 3, call)
    return lambda *at: _element(allowed, at)


def _banded(call: Call, band: Band) -> Callable[..., torch.Tensor]:
    """The rule of a band: of a window, which may have no end on a side, of a number of keys, or of both."""
    ends = (far if end is None else end for end, far in zip(band.ends, (-2 * FARTHEST, 2 * FARTHEST), strict=True))
    low, high, stop, offset = (_numbers(x, call) for x in (*ends, band.stop, band.offset))

    def allowed(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        distance = key - query - _of_sample(offset, batch)
        return (distance <= high) & (distance >= low) & (key < _of_sample(stop, batch))

    return allowed


def _numbers(value: Any, call: Call) -> torch.Tensor:
    """A number, or one for each sample, within reach of int32; an array, as a program is compiled anew for a number."""
    if isinstance(value, int):
        value = max(-2 * FARTHEST, min(value, 2 * FARTHEST))
        return torch.full((), value, dtype=torch.int32, device=call.query.device)
    return _batched(value, 0, call).to(torch.int64).clamp(-FARTHEST, FARTHEST).to(torch.int32)


def _of_sample(numbers: torch.Tensor, batch: Any) -> torch.Tensor:
    return numbers[batch] if numbers.dim() else numbers


def _batched(array: torch.Tensor, axes: int, call: Call) -> torch.Tensor:
    """An array of a rule with so many axes, and one more for the batch before them, unless all samples share it."""
    array = array.reshape((1,) * (axes - array.dim()) + array.shape)
    dims = array.shape[array.dim() - axes :]
    if array.numel() == math.prod(dims):
        return array.reshape(dims)
    return array.expand(*call.query.shape[:-3], *dims).reshape(-1, *dims)


def _element(array: torch.Tensor, at: tuple[Any, ...]) -> torch.Tensor:
    """The element for some last axes, of which those of size 1 hold one for all."""
    at = at[len(at) - array.dim() :]
    return array[tuple(index if size > 1 else 0 for index, size in zip(at, array.shape, strict=True))]


def modified(call: Call) -> Callable[..., torch.Tensor]:
    """The function of scores of a call, at single positions."""
    score_mod: Any = call.score_mod
    function, arrays = getattr(score_mod, "function", score_mod), getattr(score_mod, "arrays", ())
    if looks_up(score_mod):
        shapes = tuple((array.dtype, tuple(array.shape)) for array in arrays)
        function, listed = _traced(function, shapes, call.query.device)
        arrays = *arrays, listed
    return _counted(lambda *at: function(*at, *arrays), call, (*call.whole[:2], *call.starts))


def looks_up(score_mod: Any) -> bool:
    """Whether a function of scores is one of the core, with numbers that a compiled kernel has to be given."""
    return hasattr(getattr(score_mod, "function", score_mod), "listed")


@functools.lru_cache(maxsize=KEPT)
def _traced(function: Any, shapes: tuple[Any, ...], device: torch.device) -> tuple[Any, torch.Tensor]:
    """A function of the core as a graph, whose last argument are the numbers that it looks up; and these."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415 (the compiler)

    arrays = [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in shapes]
    score, *at = (torch.zeros((), dtype=dtype, device=device) for dtype in (torch.float32, *[torch.int32] * 4))
    listed = function.listed(score)
    with TransformGetItemToIndex():
        graph = make_fx(lambda *inputs: function(*inputs[:-1], listed=inputs[-1]))(score, *at, *arrays, listed)
    return graph, listed


def score_function(call: Call) -> Callable[..., torch.Tensor] | None:
    """Cap and function of a call as FlexAttention calls them, in the order of the definition."""
    if call.softcap is None and call.score_mod is None:
        return None
    softcap = None if call.softcap is None else _float_of(call.softcap, call.query)
    modify = None if call.score_mod is None else modified(call)

    def scores(score: Any, *at: Any) -> torch.Tensor:
        if softcap is not None:
            score = torch.tanh(score.to(torch.float32) / softcap) * softcap
        return score if modify is None else modify(score.to(torch.float32), *at)

    return scores


def _float_of(number: Any, like: torch.Tensor) -> torch.Tensor:
    """A number in the type of scores, which is written on the device."""
    if isinstance(number, torch.Tensor):
        return number.to(torch.float32)
    return torch.full((), float(number), dtype=torch.float32, device=like.device)
