"""Operations with a gradient of their own as operators of PyTorch's, which compilers and exports do not look into.

The name of an operation and the plan of a call are arguments of the operator, as text. The text is a Python literal, in
which classes have the names under which the core registers them. A class or function without such a name is kept in
this process alone, so no exported program can hold it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import operator
import types
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.library import Library, register_fake

from attention_core.backend import DIFFERENTIATED_ONCE, Operation, get_backend, registered, registered_name
from attention_torch.modes import TYPES, has_modes

STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)  # of older versions
BELOW_AUTOGRAD = torch._C._after_autograd_keyset
NOT_OF_EXPORTED = "expected an exported program that is not differentiated; got one that is"
PROCESS = uuid.uuid4().hex
_NAMED = "@named"  # before the class and the fields of a named tuple inside of another
_local: dict[str, Any] = {}  # what is not registered, by a name that holds in this process


def encode(*parts: Any) -> str:
    """The fields of an `Operation`, the class of a plan, and its fields, as text: compilers hand on plain values."""
    return _encode_constants(*map(_constant, parts))


def _constant(part: Any) -> Any:
    """A part with numbers in place of symbols of them: a program is compiled for these."""
    if isinstance(part, tuple):  # torch.compile would hand on an empty one, if it had names
        return (*((_NAMED, type(part)) if hasattr(part, "_fields") else ()), *map(_constant, part))
    if isinstance(part, int) and not isinstance(part, bool):
        return operator.index(part)
    if isinstance(part, float) and -math.inf < part < math.inf:  # torch.compile holds no ratio as a symbol
        numerator, denominator = part.as_integer_ratio()
        return numerator / denominator
    if isinstance(part, functools.partial) and torch.compiler.is_compiling():
        named = {name: _constant(each) for name, each in part.keywords.items()}
        return functools.partial(part.func, *map(_constant, part.args), **named)
    if isinstance(part, types.FunctionType) and _holds_values(part):
        id(part)  # by which torch.compile compares functions, not by their code
    return part


def _holds_values(function: Any) -> bool:
    """Whether functions of the same code may differ, as these do by what they close over, or by defaults."""
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function))


def _encode_constants(*parts: Any) -> str:
    parts, count = _with_names(parts), len(Operation._fields)
    operation, plan = Operation(*parts[:count]), parts[count](*parts[count + 1 :])
    return repr((_encode(operation), _encode(plan)))


_each: Any
for _each in (_holds_values, _encode_constants):
    _each._dynamo_marked_constant = True  # torch.compile runs it and does not trace it


def _with_names(part: Any) -> Any:
    """The inverse of `_constant`, for tuples."""
    if not isinstance(part, tuple):
        return part
    return part[1](*map(_with_names, part[2:])) if part[:1] == (_NAMED,) else tuple(map(_with_names, part))


def _encode(part: Any) -> Any:
    """Names as text after ``@``, named tuples as (name, fields), plain tuples as lists, inf and NaN after ``~``."""
    if isinstance(part, float) and not math.isfinite(part):  # which no literal is
        return f"~{part}"
    if part is None or isinstance(part, bool | int | float):
        return part
    if isinstance(part, str):
        return f"={part}"
    if part is tuple:
        return "@tuple"
    if isinstance(part, tuple) and not isinstance(part, Operation):
        if not hasattr(part, "_fields"):
            return [_encode(each) for each in part]
        return _encode(type(part)), {name: _encode(value) for name, value in zip(part._fields, part, strict=True)}
    name = registered_name(part)
    if name is None:
        importable = isinstance(part, type | types.FunctionType) and "<" not in part.__qualname__
        name = f"{part.__module__}:{part.__qualname__}" if importable else ""
        if not name or _local.setdefault(name, part) is not part:  # of another, older or wrapped one
            name = f"{PROCESS}:{id(part)}"
            _local[name] = part
    return f"@{name}"


@functools.lru_cache(maxsize=256)
def _decode_text(text: str) -> tuple[Operation, Any]:
    operation, plan = map(_decode, ast.literal_eval(text))
    return operation, plan


def _decode(part: Any) -> Any:
    if isinstance(part, list):
        return tuple(map(_decode, part))
    if isinstance(part, tuple):
        kind, fields = part
        return _decode(kind)(**{name: _decode(value) for name, value in fields.items()})
    if not isinstance(part, str):
        return part
    mark, name = part[0], part[1:]
    if mark in "=~":
        return name if mark == "=" else float(name)
    if name == "tuple":
        return tuple
    thing = _local.get(name, registered(name))
    if thing is None:  # nothing is imported because some file asks for it
        raise ValueError(f"expected masks and score modifications of attention_core in an exported program; got {name}")
    return thing


def _results(arrays: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
    """Compute the results of an operation."""
    operation, plan = _decode_text(text)
    return _in_memory_of_their_own(operation.forward(plan, tuple(arrays), _backend()), arrays)


def _results_abstract(arrays: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
    operation, plan = _decode_text(text)
    return [result.contiguous() for result in operation.abstract(plan, tuple(arrays), _backend())]


def _gradients(arrays: Sequence[torch.Tensor], results: Sequence[torch.Tensor], text: str) -> list[torch.Tensor]:
    """Compute the gradients of the arrays of floating point, of results and their cotangents; NaN of one without."""
    operation, plan = _decode_text(text)
    middle = len(results) // 2
    ends = tuple(results[:middle]), tuple(results[middle:])
    with _backend().autocast.off(arrays[0]):  # it may be on again where one goes backward
        gradients = operation.backward(plan, tuple(arrays), *ends, _backend())
    pairs = [pair for pair in zip(arrays, gradients, strict=True) if pair[0].is_floating_point()]
    found = iter(_in_memory_of_their_own([each for _, each in pairs if each is not None], [*arrays, *results]))
    return [array.new_full((), math.nan).expand(array.shape) if each is None else next(found) for array, each in pairs]


def _gradients_abstract(
    arrays: Sequence[torch.Tensor], results: Sequence[torch.Tensor], text: str
) -> list[torch.Tensor]:
    return [
        torch.empty_like(array, memory_format=torch.contiguous_format) for array in arrays if array.is_floating_point()
    ]


def _in_memory_of_their_own(results: Sequence[torch.Tensor], arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, contiguous; one that shares memory with an array or an earlier result is cloned, as operators must.

    A part of an array is contiguous already where the array has a single row.
    """
    contiguous, taken = [], {array.untyped_storage().data_ptr() for array in arrays}
    for result in results:
        result = result.contiguous()
        if result.untyped_storage().data_ptr() in taken:
            result = result.clone()
        taken.add(result.untyped_storage().data_ptr())
        contiguous.append(result)
    return contiguous


def one_by_one(function: Callable[..., Sequence[Any]], info: Any, in_dims: Any, *arguments: Any) -> Any:
    """The results of a function under `torch.vmap`, which is called for one sample after the other, and their axes.

    The plan of a call is one for its lengths, so that a mapped axis joins no other.
    """

    def at(index: int, argument: Any, axis: Any) -> Any:
        if isinstance(argument, list):
            return [at(index, *pair) for pair in zip(argument, axis, strict=True)]
        return argument.select(axis, index) if isinstance(axis, int) else argument

    rounds = [function(*at(index, list(arguments), in_dims)) for index in range(info.batch_size)]
    results = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*rounds, strict=True))
    return results, tuple(None if result is None else 0 for result in results)


def _backend() -> Any:
    return get_backend("torch")


class Undifferentiated(torch.autograd.Function):  # type: ignore[misc]
    """Results of an operator where autograd records them: backward, an error of this text is raised."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., list[torch.Tensor]], error: str, *tensors: torch.Tensor) -> Any:
        ctx.error = error
        return tuple(compute(*tensors))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError(ctx.error)


def _with_autograd(
    operator: Any, compute: Callable[..., list[torch.Tensor]], error: str, keyset: Any, *arguments: Any
) -> list[torch.Tensor]:
    """Compute at once where nobody looks; else record that there is no gradient, and let others than autograd look."""
    *lists, text = arguments
    tensors = list(itertools.chain(*lists))
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if not (is_recorded or has_modes()) and all(type(tensor) in TYPES for tensor in tensors):
        return compute(*arguments)
    is_forward_mode = getattr(forward_ad, "_current_level", -1) >= 0
    if is_forward_mode and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(error)

    def below(*tensors: torch.Tensor) -> list[torch.Tensor]:
        remaining = iter(tensors)
        lists_of_tensors = [list(itertools.islice(remaining, len(each))) for each in lists]
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & BELOW_AUTOGRAD, *lists_of_tensors, text)  # type: ignore[no-any-return]

    return list(Undifferentiated.apply(below, error, *tensors)) if is_recorded else below(*tensors)


def _operator(name: str, schema: str, compute: Callable[..., Any], abstract: Callable[..., Any]) -> Any:
    """An operator of PyTorch, which takes less time to be called than one of `torch.library.custom_op`."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, STRIDES))
    _library.impl(name, compute, "CompositeExplicitAutograd")
    register_fake(f"attention_core::{name}", abstract, lib=_library)
    return getattr(torch.ops.attention_core, name).default


_library = Library("attention_core", "FRAGMENT")
attend = _operator("attend", "(Tensor[] arrays, str text) -> Tensor[]", _results, _results_abstract)
attend_backward = _operator(
    "attend_backward",
    "(Tensor[] arrays, Tensor[] results, str text) -> Tensor[]",
    _gradients,
    _gradients_abstract,
)
for _each, _compute, _error in (
    (attend, _results, NOT_OF_EXPORTED),
    (attend_backward, _gradients, DIFFERENTIATED_ONCE),
):
    _kernel = functools.partial(_with_autograd, _each, _compute, _error)
    _library.impl(_each, _kernel, "Autograd", with_keyset=True)
    torch.library.register_vmap(_each, functools.partial(one_by_one, _each), lib=_library)
# Clones what is written over before the backward pass: compilers would clone once more, and too late.
clone_for_backward = _operator("clone_for_backward", "(Tensor x) -> Tensor", torch.clone, torch.empty_like)
