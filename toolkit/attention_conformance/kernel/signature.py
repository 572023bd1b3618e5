"""What the signature of an attention tells: names of keywords, the order of its arrays, and its library."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from attention_conformance.launch.subject import Subject

Parameters: TypeAlias = dict[str, inspect.Parameter]

KEYWORDS = {
    "mask_name": ("attn_mask", "mask", "attention_mask"),
    "bias_name": ("bias", "attn_bias", "attention_bias"),
    "causal_name": ("is_causal", "causal", "use_causal_mask", "causal_flag", "causality"),
    "scale_name": ("scale", "sm_scale", "softmax_scale", "scaling"),
    "softcap_name": ("softcap", "soft_cap", "logits_soft_cap", "attn_logits_soft_cap"),
    "sinks_name": ("sinks", "sink", "s_aux"),
    "grouped_name": ("enable_gqa",),
    "window_name": ("window_size", "local_window_size"),
    "alibi_name": ("alibi_slopes",),
    "dropout_name": ("dropout_p", "dropout_rate", "dropout", "p_dropout", "attn_dropout", "attention_dropout"),
}
"""Keywords by their usual names."""

ASKS = {
    "logsumexp": ("return_logsumexp", "return_lse", "return_residual", "return_softmax_lse"),
    "weights": ("return_weights", "need_weights", "return_attention_scores"),
}
LIBRARIES = ("torch", "jax", "tensorflow")
NATIVE = {"score_mod", "softcap", "sinks", "return_logsumexp", "dropout", "is_causal"}


INNER = (
    "__wrapped__",
    "_orig_mod",
    "_torchdynamo_orig_callable",
    "_opoverload",
    "default",
    "call",
    "forward",
    "py_func",
)
"""Where wrappers keep what they call: decorators, compiled modules, operators, layers of Keras, modules, Numba."""

DEEPEST = 16
"""Layers that are looked into: an object may have every attribute."""

ONLY = inspect.Parameter.POSITIONAL_ONLY
OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(function: Callable[..., Any]) -> tuple[Parameters, bool]:
    """The parameters that a callable tells, itself or by what it wraps; and whether it may take others."""
    if isinstance(function, functools.partial):
        inner, is_open = parameters_of(function.func)
        free = list(inner)[len(function.args) :]
        return {name: inner[name] for name in free if name not in function.keywords}, is_open
    parameters: Parameters = {}
    for layer in _layers(function):
        if isinstance(layer, functools.partial):
            signature, is_open = parameters_of(layer)
        else:
            signature = _signature(layer) or {"args": inspect.Parameter("args", OPEN[0])}
            is_open = any(each.kind in OPEN for each in signature.values())
        named = [each for each in signature.values() if each.kind not in OPEN]
        passed = sum(each.kind is not each.KEYWORD_ONLY for each in parameters.values())
        parameters |= {each.name: each for each in named[passed:] if each.name not in parameters}
        if not is_open:
            return parameters, False
    return parameters, True


def _layers(function: Any) -> Iterator[Any]:
    """A callable, and what it wraps, from the outside to the inside."""
    seen: list[Any] = []
    while function is not None and len(seen) < DEEPEST and not any(function is each for each in seen):
        yield function
        seen.append(function)
        inner = (getattr(function, name, None) for name in INNER)
        function = next((each for each in inner if callable(each) and not isinstance(each, type)), None)


def _signature(function: Any) -> Parameters | None:
    """The parameters of one layer: of an operator by its schema, of PyTorch's ``Function.apply`` by its forward."""
    schema: Any = getattr(function, "_schema", None) or getattr(function, "schema", None)
    if hasattr(schema, "arguments"):
        kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
        return {
            each.name: inspect.Parameter(
                each.name, kinds[each.kwarg_only],
                default=each.default_value if each.has_default_value() else inspect.Parameter.empty,
            )
            for each in schema.arguments if each.name != "self"
        }  # fmt: skip
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "apply" and isinstance(owner, type) and hasattr(owner, "setup_context"):
        base = sys.modules["torch"].autograd.Function
        names = list(inspect.signature(owner.forward).parameters.values())  # type: ignore[attr-defined]
        names = names[owner.setup_context == base.setup_context :]
        return {each.name: each if each.kind in OPEN else each.replace(kind=ONLY) for each in names}
    try:
        return dict(inspect.signature(function, follow_wrapped=False).parameters)
    except (TypeError, ValueError):  # a built-in that does not tell
        return None


def read_signature(kernel: Subject) -> dict[str, Any]:
    """The facts that a signature tells about a kernel; none about keywords that it may have and does not tell."""
    facts: dict[str, Any] = {"backend": _library(kernel.function)}
    parameters, is_open = parameters_of(kernel.function)
    if not parameters:  # PyTorch's built-in has its names in the documentation
        text = (getattr(inspect.unwrap(kernel.function), "__doc__", None) or "").partition("->")[0]
        words = {word: None for words in KEYWORDS.values() for word in words if f"{word}=" in text}
        words_of = {**_keywords(words, not words, kernel), "unknown": () if words else ("*args", "**kwargs")}
        return facts | words_of | {"native": False, "order": ("query", "key", "value")}
    if set(parameters) >= NATIVE and kernel.native is not False:
        asks = {name: {f"return_{name}": True} for name in ("weights", "logsumexp")}
        return facts | {"native": True, "asks": asks, "mask": "keep", "causal": "top-left", "grouped": True}
    positional = [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
    arrays = positional[:3] if positional else _arrays(parameters)
    first = [name.lower() for name in arrays]
    if not positional and len(arrays) == 3:
        facts["array_names"] = tuple(arrays)
    order = ("query", "value", "key") if len(first) > 2 and first[1][0] == "v" and first[2][0] == "k" else None
    asks = {
        result: {word: True for word in words if word in parameters}
        for result, words in ASKS.items()
        if any(word in parameters for word in words)
    }
    others = {name: each for name, each in parameters.items() if name not in arrays}
    required = [name for name, each in others.items() if each.default is each.empty]
    of_masks = {*KEYWORDS["mask_name"], *KEYWORDS["bias_name"]}
    options: dict[str, Any] = {name: None for name in required if name in of_masks}
    options |= {name: 0.0 for name in KEYWORDS["dropout_name"] if name in parameters and _drops(parameters[name])}
    flags = (*KEYWORDS["causal_name"], kernel.causal_name or "")
    options |= {name: False for name in flags if name in others and _drops(others[name])}
    if set(required) & set(KEYWORDS["scale_name"]):
        facts["default_scale"] = "one"  # there is none: it is always stated
    order = order or ("query", "key", "value")
    words_of = _keywords(others, is_open, kernel)
    if not _takes_two(parameters, words_of.get("window_name", "")):
        words_of["window_name"] = ""
    declared = {each for name, each in kernel.declared.items() if name.endswith("_name")}
    known = {*words_of.values(), *declared, *options, *(word for asked in asks.values() for word in asked)}
    unknown = [name for name in others if name not in known] + ["**kwargs"] * is_open
    places = [name for name, each in others.items() if each.kind is ONLY]
    by_place = {name: None if name in required else others[name].default for name in places}
    facts |= {"asks": asks, "options": options, "unknown": tuple(unknown), "positional": by_place}
    return facts | words_of | {"native": False, "order": order}


def _arrays(parameters: dict[str, Any]) -> list[str]:
    """The names of query, key and value among keywords."""
    short = {name.lower().removesuffix("s").removesuffix("_state")[:1]: name for name in reversed(parameters)}
    return [short[letter] for letter in "qkv"] if set("qkv") <= set(short) else []


def _drops(parameter: inspect.Parameter) -> bool:
    """Whether a call has to state that it is without dropout, or without causality."""
    return parameter.default is parameter.empty or bool(parameter.default)


def _takes_two(parameters: dict[str, Any], name: str) -> bool:
    """Whether a window is given by its keys to the left and to the right: one number means several things."""
    return name == "local_window_size" or (name in parameters and isinstance(parameters[name].default, tuple | list))


def _keywords(parameters: Mapping[str, Any], is_open: bool, kernel: Subject) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        fact: getattr(kernel, fact)
        or next((word for word in words if word in parameters), None if fact == "bias_name" else "")
        for fact, words in KEYWORDS.items()
    }
    if is_open:  # what it does not tell, calls have to
        return {fact: word for fact, word in keywords.items() if word}
    if not keywords["mask_name"] and not keywords["bias_name"]:
        keywords["mask"] = "none"
    return keywords


def _library(function: Callable[..., Any]) -> str:
    """The library whose arrays a function takes: that of its module, or one that its module imported."""
    if isinstance(function, functools.partial):
        return _library(function.func)
    seen = set()
    for layer in _layers(function):
        if isinstance(layer, functools.partial):
            return _library(layer)
        module = getattr(layer, "__module__", None) or ""
        names = getattr(layer, "__globals__", None) or vars(sys.modules.get(module, sys))
        seen |= {module.partition(".")[0]}
        seen |= {getattr(each, "__name__", "").partition(".")[0] for each in names.values() if inspect.ismodule(each)}
        seen |= {str(getattr(each, "__module__", "")).partition(".")[0] for each in names.values() if callable(each)}
    return next((library for library in LIBRARIES if library in seen), "numpy")
