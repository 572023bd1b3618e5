"""Public functions as steps of a compiled program: `torch.compile` calls them, and does not read their bytecode.

To read that of one attention takes a third of a second, and ends in the same program. Tensors and numbers of a call are
arguments of its step; the structure around them is kept by a name. Read as before are calls that hold a function, and
those on an accelerator, where FlexAttention has to be a part of the program.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from attention_core.backend import CONTEXTS, STEPS, Leaf, assumes_finite, map_leaves
from attention_core.masks import unflatten
from attention_numpy.trees import ARRAYS
from attention_torch import modes

LEAVES = (torch.Tensor, int, float, str, types.NoneType)  # which a graph takes as arguments
_structures: dict[str, Any] = {}


def as_step(name: str, read: Any) -> Callable[..., Any]:
    """What `torch.compile` reads instead of a function, and makes a step of it."""

    def step(*arguments: Any, **options: Any) -> Any:
        if CONTEXTS.recorders or _is_transformed():
            return read(*arguments, **options)
        leaves: list[Any] = []
        others: list[Any] = []
        structure = _taken_apart((*arguments, *options.values()), leaves, others)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):  # the first tells for all
                if leaf.device.type not in modes.HOSTS:
                    others.append(leaf)
                break
        if others or _has_symbols():
            return read(*arguments, **options)
        setting = assumes_finite(*CONTEXTS.settings)  # which is read again where this runs: else for other programs
        return _run(_kept(name, (tuple(options), structure, setting)), *leaves)

    return step


def _taken_apart(part: Any, leaves: list[Any], others: list[Any]) -> Any:
    """The structure of a container, with an index for each leaf.

    What is no pytree of leaves goes to the others. It is a loop of few instructions, and not a function of each leaf:
    Dynamo takes a millisecond to enter a function, and a tenth of it for each instruction.
    """
    if isinstance(part, tuple | list):
        parts = tuple(part)
    elif not isinstance(part, ARRAYS) and is_dataclass(part):
        parts = tuple([getattr(part, field.name) for field in fields(part)])
    else:
        others.append(part)
        return None
    first = len(leaves)
    found: list[Any] = [type(part), *range(first, first + len(parts))]
    leaves.extend(parts)
    for index in range(len(parts)):  # Dynamo reads enumerate as a generator
        if not isinstance(each := parts[index], LEAVES):
            leaves[first + index] = None
            found[1 + index] = each if isinstance(each, types.ModuleType) else _taken_apart(each, leaves, others)
    return tuple(found)


def _is_transformed() -> bool:
    """Whether a transform of `torch.func` is open, for which Dynamo differentiates what it reads."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _has_symbols() -> bool:
    """Whether some length or number is a symbol, which Dynamo gives a range where it reads bytecode."""
    return bool(torch._guards.TracingContext.get().fake_mode.shape_env.var_to_sources)


def _kept(name: str, structure: Any) -> str:
    """Keep a structure as a tree definition, and return its name."""
    torch.compiler.allow_in_graph(_run)
    text = f"{name} {structure}"
    structure = map_leaves(lambda part: Leaf(part, 0) if type(part) is int else part, structure)
    while _structures.setdefault(text, structure) != structure:  # which holds another class of the same name
        text += "'"
    return text


_each: Any
for _each in (_is_transformed, _has_symbols, _kept):
    _each._dynamo_marked_constant = True  # torch.compile runs it and does not trace it


def _run(text: str, *leaves: Any) -> Any:
    """The results of a function; what is wrong with its arguments ends the graph before it, so that it says so."""
    names, structure, _ = _structures[text]
    values = unflatten(structure, leaves)
    count = len(values) - len(names)
    try:
        return STEPS[text.partition(" ")[0]](*values[:count], **dict(zip(names, values[count:], strict=True)))
    except (TypeError, ValueError) as error:
        if torch._guards.TracingContext.try_get() is None:
            raise
        raise NotImplementedError(str(error)) from error
