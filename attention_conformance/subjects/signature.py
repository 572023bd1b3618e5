"""What the signature of an attention tells: names of keywords, the order of its arrays, and its library."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from attention_conformance.subjects.subject import Subject

__all__ = ["read_signature"]

KEYWORDS = {
    "mask_name": ("attn_mask", "mask", "attention_mask"),
    "bias_name": ("bias", "attn_bias", "attention_bias"),
    "causal_name": ("is_causal", "causal", "use_causal_mask"),
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


def read_signature(subject: Subject) -> dict[str, Any]:
    """The facts that a signature tells about a subject."""
    facts: dict[str, Any] = {"backend": _library(subject.function)}
    try:
        parameters = dict(inspect.signature(subject.function).parameters)
    except (TypeError, ValueError):  # a built-in that does not tell: PyTorch's has its names in the documentation
        text = (getattr(subject.function, "__doc__", None) or "").partition("->")[0]
        parameters = {word: None for words in KEYWORDS.values() for word in words if f"{word}=" in text}  # type: ignore[misc]
        return facts | _keywords(parameters) | {"native": False, "order": ("query", "key", "value")}
    if set(parameters) >= NATIVE and subject.native is not False:
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
    required = [name for name, each in parameters.items() if each.default is each.empty and name not in arrays]
    words = {*KEYWORDS["mask_name"], *KEYWORDS["bias_name"]}
    options: dict[str, Any] = {name: None for name in required if name in words}
    options |= {name: 0.0 for name in KEYWORDS["dropout_name"] if name in parameters and _drops(parameters[name])}
    if set(required) & set(KEYWORDS["scale_name"]):
        facts["default_scale"] = "one"  # there is none: it is always stated
    order = order or ("query", "key", "value")
    words_of = _keywords(parameters)
    if not _takes_two(parameters, words_of["window_name"]):
        words_of["window_name"] = ""
    return facts | words_of | {"native": False, "order": order, "asks": asks, "options": options}


def _arrays(parameters: dict[str, Any]) -> list[str]:
    """The names of query, key and value among keywords."""
    short = {name.lower().removesuffix("s").removesuffix("_state")[:1]: name for name in reversed(parameters)}
    return [short[letter] for letter in "qkv"] if set("qkv") <= set(short) else []


def _drops(parameter: inspect.Parameter) -> bool:
    """Whether a call has to state that nothing is left out."""
    return parameter.default is parameter.empty or bool(parameter.default)


def _takes_two(parameters: dict[str, Any], name: str) -> bool:
    """Whether a window is told by its keys to the left and to the right: one number means several things."""
    return name == "local_window_size" or (bool(name) and isinstance(parameters[name].default, tuple | list))


def _keywords(parameters: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        fact: next((word for word in words if word in parameters), None if fact == "bias_name" else "")
        for fact, words in KEYWORDS.items()
    }
    if not found["causal_name"]:
        found["causal"] = "none"
    if not found["mask_name"] and not found["bias_name"]:
        found["mask"] = "none"
    return found


def _library(function: Callable[..., Any]) -> str:
    """The library whose arrays a function takes: that of its module, or one that its module imported."""
    module = (getattr(function, "__module__", None) or "").partition(".")[0]
    if module in LIBRARIES:
        return module
    names = getattr(inspect.unwrap(function), "__globals__", None) or {}
    if not names and module in sys.modules:
        names = vars(sys.modules[module])
    seen = {getattr(each, "__name__", "").partition(".")[0] for each in names.values() if inspect.ismodule(each)}
    seen |= {(getattr(each, "__module__", None) or "").partition(".")[0] for each in names.values() if callable(each)}
    return next((library for library in LIBRARIES if library in seen), "numpy")
