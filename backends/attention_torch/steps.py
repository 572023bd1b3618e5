"""Public functions as steps of a compiled program: `torch.compile` calls them, and does not read their bytecode.

To read that of one attention takes a third of a second, and ends in the same program. Tensors and numbers of a call are
arguments of its step; the structure around them is kept by a name. Read as before are calls that hold a function, and
those on an accelerator, where FlexAttention has to be a part of the program.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch

import attention_core
from attention_core import functions
from attention_core.backend import CONTEXTS, assumes_finite
from attention_numpy.trees import ARRAYS
from attention_torch import guards

STEPS: dict[str, Any] = {
    function.__name__: function
    for function in (
        attention_core.scaled_dot_product_attention,
        attention_core.multi_head_attention,
        functions.encoder_layer,
        functions.decoder_layer,
    )
}
_structures: dict[str, Any] = {}


def become_steps() -> None:
    """Let `torch.compile` read, instead of each function, what makes a step of it."""
    for name, function in STEPS.items():
        function._torchdynamo_inline = _as_step(name, function)  # no import of Dynamo


def _as_step(name: str, function: Any) -> Callable[..., Any]:
    takes_setting = "assume_finite" in inspect.signature(function).parameters
    read = types.FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )

    def step(*arguments: Any, **options: Any) -> Any:
        if takes_setting and options.get("assume_finite") is None:
            options = {**options, "assume_finite": assumes_finite(*CONTEXTS.settings)}
        leaves: list[Any] = []
        others: list[Any] = []
        structure = _taken_apart((arguments, options), leaves, others)
        are_on_host = all(guards.is_on_host(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        if others or not are_on_host or CONTEXTS.recorders or _must_be_read():
            return read(*arguments, **options)
        return _run(_kept(name, structure), *leaves)

    return step


def _taken_apart(part: Any, leaves: list[Any], others: list[Any]) -> Any:
    """The structure of an argument, with an index for each leaf; what is no pytree of leaves goes to the others."""
    if part is None or isinstance(part, bool | str | types.ModuleType):
        return part
    if isinstance(part, torch.Tensor | int | float):
        leaves.append(part)
        return len(leaves) - 1
    if isinstance(part, dict):
        return dict, tuple(part), *[_taken_apart(each, leaves, others) for each in part.values()]
    if isinstance(part, tuple | list):
        return type(part), *[_taken_apart(each, leaves, others) for each in part]
    if not isinstance(part, ARRAYS) and is_dataclass(part):
        values = [getattr(part, field.name) for field in fields(part)]
        return type(part), *[_taken_apart(each, leaves, others) for each in values]
    others.append(part)
    return None


def _put_together(structure: Any, leaves: tuple[Any, ...]) -> Any:
    if not isinstance(structure, tuple):
        return leaves[structure] if type(structure) is int else structure  # True is no index
    kind, *branches = structure
    if kind is dict:
        names, *branches = branches
        return dict(zip(names, [_put_together(branch, leaves) for branch in branches], strict=True))
    values = [_put_together(branch, leaves) for branch in branches]
    if issubclass(kind, tuple | list):
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    made = object.__new__(kind)  # what was checked when it was made
    for field, value in zip(fields(kind), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made


def _must_be_read() -> bool:
    """Whether a transform of `torch.func` is open here, or some length or number is a symbol.

    Only where it reads bytecode does Dynamo differentiate our operations for the first, and give ranges to the second.
    """
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    fake_mode = torch._guards.TracingContext.get().fake_mode
    return is_transformed or bool(fake_mode.shape_env.var_to_sources)


def _kept(name: str, structure: Any) -> str:
    """Keep a structure, and return its name."""
    torch.compiler.allow_in_graph(_run)
    text = f"{name} {structure}"
    _structures[text] = structure
    return text


_each: Any
for _each in (_must_be_read, _kept):
    _each._dynamo_marked_constant = True  # torch.compile runs it and does not trace it


def _run(text: str, *leaves: Any) -> Any:
    """The results of a function; what is wrong with its arguments ends the graph before it, so that it says so."""
    arguments, options = _put_together(_structures[text], leaves)
    try:
        return STEPS[text.partition(" ")[0]](*arguments, **options)
    except (TypeError, ValueError) as error:
        if torch._guards.TracingContext.try_get() is None:
            raise
        raise NotImplementedError(str(error)) from error
