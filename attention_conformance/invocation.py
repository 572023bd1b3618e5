"""From a problem to a call: of the core, or of any function with the signature of its attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attention_core
from attention_conformance.problem import Problem, Rule, Seed

__all__ = ["AttentionFunction", "gradient_function", "output_function", "unsupported"]

AttentionFunction: TypeAlias = Callable[..., Any]
Arrays: TypeAlias = Mapping[str, Any]


def output_function(function: AttentionFunction, problem: Problem) -> Callable[[Arrays], dict[str, Any]]:
    """A function of the problem's arrays alone to what the call returns: the output, and what else was asked for."""

    def called(arrays: Arrays) -> dict[str, Any]:
        result = _call(function, problem, arrays)
        if not isinstance(result, tuple):
            return {"output": result}
        named = zip(("output", "weights", "logsumexp"), result, strict=True)
        return {name: array for name, array in named if array is not None}

    return called


def gradient_function(
    function: AttentionFunction, problem: Problem, backend: attention_core.Backend
) -> Callable[..., Any]:
    """A function of the arrays to differentiate, and of the others, to the gradients of ``sum(output * cotangent)``."""
    xp = backend.namespace

    def loss(variables: Arrays, others: Arrays) -> Any:
        output = _call(function, problem, {**variables, **others})
        return xp.sum(xp.multiply(output, others["cotangent"]))

    def gradients(variables: Arrays, others: Arrays) -> Any:
        _, (found, _) = backend.value_and_grad(loss)(variables, others)
        return found

    return gradients


def unsupported(function: AttentionFunction, problem: Problem) -> list[str]:
    """The options of a problem that a function has no parameter for."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a built-in that does not tell
        return []
    given = [*problem.options, *(["mask"] if problem.mask else []), *(["bias"] if "bias" in problem.arrays else [])]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in given if name not in parameters]


def _call(function: AttentionFunction, problem: Problem, arrays: Arrays) -> Any:
    return function(arrays["query"], arrays["key"], arrays["value"], **_options(problem, arrays))


def _options(problem: Problem, arrays: Arrays) -> dict[str, Any]:
    options = dict(problem.options)
    if isinstance(options.get("dropout"), Seed):
        options["dropout"] = attention_core.Dropout(options["dropout"].rate, options["dropout"].seed)
    if problem.mask is not None:
        options["mask"] = _mask(problem.mask, arrays)
    if "bias" in arrays:
        options["bias"] = arrays["bias"]
    return options


def _mask(rule: Rule, arrays: Arrays) -> Any:
    """A rule as a mask of the core."""
    if rule.kind == "array":
        return arrays[rule.arguments["name"]]
    if rule.kind in _COMBINATIONS:
        first, *rest = (_mask(part, arrays) for part in rule.arguments.values())
        return getattr(first, _COMBINATIONS[rule.kind])(*rest)
    arguments = {name: arrays[each] if isinstance(each, str) else each for name, each in rule.arguments.items()}
    return getattr(attention_core, rule.kind)(**arguments)


# By their methods: torch.compile does not trace the operators & | ~ on objects beside tensors.
_COMBINATIONS = {"and": "__and__", "or": "__or__", "not": "__invert__"}
