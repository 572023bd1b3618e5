"""Rules and functions of scores as FlexAttention calls them: at single positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attention_core.backend import Call
from attention_core.masks import And, Band, Given, Mask, MaskFunction, Not, Or, Segments
from attention_core.scores import ScoreMod

FARTHEST = 2**29  # above all positions, as in the core
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
        return _joined(_rule(mask.first, call), _rule(mask.second, call), isinstance(mask, And))
    if isinstance(mask, Not):
        return _inverted(_rule(mask.mask, call))
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


def _inverted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *at: ~function(*at)


def _joined(first: Callable[..., torch.Tensor], second: Callable[..., torch.Tensor], both: bool) -> Any:
    if both:
        return lambda *at: first(*at) & second(*at)
    return lambda *at: first(*at) | second(*at)


def _banded(call: Call, band: Band) -> Callable[..., torch.Tensor]:
    """The rule of a band: of a window, which may have no end on a side, of a number of keys, or of both."""
    low, high, stop, offset = (_numbers(x, call) for x in (band.low, band.high, band.stop, band.offset))

    def of_keys(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return key < _of_sample(stop, batch)

    def of_distance(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        distance = key - query - _of_sample(offset, batch)
        return (distance <= high) & (distance >= low)

    if not band.has_stop:
        return of_distance
    return _joined(of_distance, of_keys, True) if any(end is not None for end in band.ends) else of_keys


def _numbers(value: Any, call: Call) -> torch.Tensor:
    """A number, or one for each sample, within reach of int32; an array, as a program is compiled anew for a number."""
    if isinstance(value, int):
        value = max(-FARTHEST, min(value, FARTHEST))
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
    if makes_tables(score_mod):
        shapes = tuple((array.dtype, tuple(array.shape)) for array in arrays)
        function, tables = _traced(function, shapes, call.query.device)
        arrays = *arrays, *tables
    return _counted(lambda *at: function(*at, *arrays), call, (*call.whole[:2], *call.starts))


def makes_tables(score_mod: Any) -> bool:
    """Whether a function of scores is one of the core, which makes tables that a compiled kernel has to be given."""
    # Functions of users may change, though they stay equal: those are never kept.
    function = getattr(score_mod, "function", score_mod)
    return not isinstance(function, FunctionType) and type(function).__module__ == ScoreMod.__module__


@functools.lru_cache(maxsize=KEPT)
def _traced(function: Any, shapes: tuple[Any, ...], device: torch.device) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A function as a graph, and the tables that it makes, which become further arguments of the graph."""
    arrays = [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in shapes]
    score, *at = (torch.zeros((), dtype=dtype, device=device) for dtype in (torch.float32, *[torch.int32] * 4))
    module = make_fx(function)(score, *at, *arrays)
    last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    tables = []
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        tables.append(getattr(module, node.target))
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"table_{len(tables)}")
        for copy_ in list(node.users):  # of a constant, which the kernel only reads
            copy_.replace_all_uses_with(last)
            module.graph.erase_node(copy_)
        module.graph.erase_node(node)
    _take_single_elements(module.graph)
    module.recompile()
    return module, tuple(tables)


def _take_single_elements(graph: Any) -> None:
    """Let a graph index by one number where it selects by an array of one, of which a kernel makes no reshape."""
    ops = torch.ops.aten
    for node in list(graph.nodes):
        is_number = node.op == "call_function" and node.meta["val"].numel() == 1
        if is_number and node.target is ops.index_select.default:
            with graph.inserting_before(node):
                taken = graph.call_function(ops.index.Tensor, (node.args[0], [node.args[2]]))
            taken.meta = node.meta
            node.replace_all_uses_with(taken)
            graph.erase_node(node)
        elif is_number and node.target is ops.view.default and node.args[0].op != "placeholder":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


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
