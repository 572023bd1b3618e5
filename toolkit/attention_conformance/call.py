"""From a problem to a call: of the core, or of any function with the signature of its attention."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attention_core
from attention_conformance import user_functions
from attention_conformance.problem import Problem, Rule, Seed
from attention_core import masks, scaled_dot_product_attention, scores
from attention_core.backend import array_namespace

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


def unsupported(function: AttentionFunction, problem: Problem) -> list[str]:
    """The options of a problem that a function has no parameter for."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a built-in that does not tell
        return []
    used = [*problem.options, *(name for name in ("mask", "score_mod") if getattr(problem, name) is not None)]
    used += [name for name in ("bias", "sinks") if name in problem.arrays]
    pieces = ["attention in pieces"] if problem.pieces and function is not scaled_dot_product_attention else []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return pieces
    return [name for name in used if name not in parameters] + pieces


def one_line(error: BaseException) -> str:
    """An exception of a call as a line of text."""
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").strip()[:500]


def _call(function: AttentionFunction, problem: Problem, arrays: Arrays) -> Any:
    if problem.pieces:
        return _merged(problem, arrays)
    return function(arrays["query"], arrays["key"], arrays["value"], **_options(problem, arrays))


def _merged(problem: Problem, arrays: Arrays) -> Any:
    """Attention to the pieces of the keys, merged, and in the dtype of the query."""
    query, options = arrays["query"], _options(problem, arrays)
    options = {name: option for name, option in options.items() if not name.startswith("return_")}
    bias = options.pop("bias", None)
    partials = []
    for start, stop in problem.pieces:
        part = {} if bias is None else {"bias": bias[..., start:stop] if _has_keys(bias) else bias}
        key, value = (arrays[name][..., start:stop, :] for name in ("key", "value"))
        partial = attention_core.pieces.partial_attention(query, key, value, key_start=start, **part, **options)
        partials.append(partial)
    output, logsumexp, *_ = attention_core.pieces.merge_partials(*partials)
    return attention_core.Attention(array_namespace(query).astype(output, query.dtype), None, logsumexp)


def _has_keys(bias: Any) -> bool:
    """Whether a bias differs from key to key."""
    return bool(bias.shape) and bias.shape[-1] != 1


def _options(problem: Problem, arrays: Arrays) -> dict[str, Any]:
    options = dict(problem.options)
    if isinstance(options.get("dropout"), Seed):
        options["dropout"] = attention_core.Dropout(options["dropout"].rate, options["dropout"].seed)
    if problem.mask is not None:
        options["mask"] = _mask(problem.mask, arrays)
    if problem.score_mod is not None:
        options["score_mod"] = _score_mod(problem.score_mod, arrays)
    return options | {name: arrays[name] for name in ("bias", "sinks") if name in arrays}


def _mask(rule: Rule, arrays: Arrays) -> Any:
    """A rule as a mask of the core."""
    if rule.kind == "array":
        return arrays[rule.arguments["name"]]
    if rule.kind in _COMBINATIONS:
        first, *rest = (_mask(part, arrays) for part in rule.arguments.values())
        return getattr(first, _COMBINATIONS[rule.kind])(*rest)
    arguments = _arguments(rule, arrays)
    if rule.kind == "periodic":
        return attention_core.MaskFunction(user_functions.periodic, tuple(arguments.values()))
    return getattr(masks, rule.kind)(**arguments)


def _score_mod(rule: Rule, arrays: Arrays) -> Any:
    """A rule as a change of the scores."""
    arguments = _arguments(rule, arrays)
    if rule.kind == "steepened":
        return attention_core.scores.ScoreMod(user_functions.steepened, tuple(arguments.values()))
    first, *_ = arguments
    return getattr(scores, rule.kind)(arguments.pop(first), **arguments)


def _arguments(rule: Rule, arrays: Arrays) -> dict[str, Any]:
    return {name: arrays[each] if isinstance(each, str) else each for name, each in rule.arguments.items()}


# By their methods: torch.compile does not trace the operators & | ~ on objects with tensors.
_COMBINATIONS = {"and": "__and__", "or": "__or__", "not": "__invert__"}
