"""Settings of the language models of transformers: their `config.json` as definitions, and definitions as configs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import attention_models as models
from attention_core._arrays import type_text
from attention_core._checks import check_flags, check_number, check_positive
from attention_models.layouts._layout import (
    ACTIVATIONS,
    LayoutError,
    check_kind,
    checked_kind,
    config_size,
)
from attention_models.layouts._rotary import rotary_divisors

CAUSAL_LM = "transformers.AutoModelForCausalLM"
_size = partial(config_size, CAUSAL_LM)


class Family(NamedTuple):
    """What a type of model has, and what its config means where it does not tell."""

    num_kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    has_window: Callable[[Mapping[str, Any], int], bool] | None = None  # whether a layer has
    typed: bool = False  # whether layer_types tell the same
    switched: bool = False  # whether none has unless use_sliding_window
    tied: bool = False
    biases: tuple[str, ...] = ()  # the settings that are known
    query_bias: bool = False
    query_key_norm: bool = False
    post_norm: bool = False
    gemma: bool = False  # scaled embeddings, scales of norms less 1
    activation: str = "silu"
    epsilon: float = 1e-6
    partial: bool = False  # whether partial_rotary_factor is known; transformers ignores it elsewhere


QWEN = Family(
    num_kv_heads=32,
    window=4096,
    has_window=lambda config, index: index >= config.get("max_window_layers", 28),
    typed=True,
    switched=True,
)
GEMMA = Family(
    num_kv_heads=16, head_dim=256, tied=True, biases=("attention_bias",), gemma=True, activation="gelu_pytorch_tanh"
)
FAMILIES = {
    "llama": Family(biases=("attention_bias", "mlp_bias")),
    "mistral": Family(num_kv_heads=8, window=4096, has_window=lambda *_: True),
    "qwen2": QWEN._replace(query_bias=True),
    "qwen3": QWEN._replace(head_dim=128, biases=("attention_bias",), query_key_norm=True),
    "gemma": GEMMA,
    "gemma2": GEMMA._replace(
        num_kv_heads=4, window=4096, has_window=lambda _, index: index % 2 == 0, typed=True, post_norm=True
    ),
    "phi3": Family(has_window=lambda *_: True, epsilon=1e-5, partial=True),
}
FIXED = {"use_bidirectional_attention": (None, False), "is_causal": (None, True)}
SOFTCAPS = {"softcap": ("attn_logit_softcapping", 50.0), "logit_softcap": ("final_logit_softcapping", 30.0)}
LAYER_TYPES = ("full_attention", "sliding_attention")


def decoder_from_config(config: Mapping[str, Any], /) -> models.Decoder:
    """Read the settings of a language model from its ``config.json``.

    Parameters
    ----------
    config : mapping
        Of a model of type llama (SmolLM, too), mistral, qwen2, qwen3, gemma, gemma2 or phi3.

    Raises
    ------
    LayoutError, TypeError, ValueError
        When the type of model is another, or a setting is missing or has no counterpart here.

    Examples
    --------
    >>> sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    >>> decoder_from_config({"model_type": "llama", **sizes, "num_attention_heads": 2}).head_dim
    """
    name = checked_kind(CAUSAL_LM, config, FAMILIES)
    for setting, values in FIXED.items():
        if config.get(setting) not in values:
            raise LayoutError(f"expected {setting} {values[-1]} of {CAUSAL_LM}; got {config[setting]!r}")
    family, num_heads, channels = FAMILIES[name], _size(config, "num_attention_heads"), _size(config, "hidden_size")
    num_layers = _size(config, "num_hidden_layers")
    head_dim = _size(config, "head_dim") if config.get("head_dim") else family.head_dim
    num_kv_heads = config.get("num_key_value_heads", family.num_kv_heads)
    caps: dict[str, Any] = {}
    tied = family.tied if config.get("tie_word_embeddings") is None else config["tie_word_embeddings"]
    check_flags(**{f"tie_word_embeddings in the config of {CAUSAL_LM}": tied})
    width = head_dim or channels // num_heads
    scale = width**-0.5
    if name == "gemma2":
        scale = _positive(config, "query_pre_attn_scalar", 256) ** -0.5
        for cap, (theirs, default) in SOFTCAPS.items():
            caps[cap] = None if config.get(theirs, default) is None else _positive(config, theirs, default)
    rotary, amplitude = _rotary(config, family, width)
    biases = {bias: bool(config.get(bias, False)) for bias in family.biases}
    return models.Decoder(
        _size(config, "vocab_size"),
        channels,
        num_heads,
        _size(config, "intermediate_size"),
        num_layers,
        tied=tied,
        embedding_scale=math.sqrt(channels) if family.gemma else None,
        num_key_value_heads=None if num_kv_heads == num_heads else num_kv_heads,
        head_dim=None if head_dim is None or head_dim * num_heads == channels else head_dim,
        attention_bias=family.query_bias or biases.get("attention_bias", False),
        output_bias=False if family.query_bias else None,
        feed_forward_bias=biases.get("mlp_bias", False),
        query_key_norm=family.query_key_norm,
        post_norm=family.post_norm,
        activation=_activation(config, name),
        epsilon=_positive(config, "rms_norm_eps", family.epsilon),
        window=_window(config, family, num_layers),
        scale=scale * amplitude**2 if name == "gemma2" or amplitude != 1 else None,
        **caps,
        **rotary,
    )


def _positive(config: Mapping[str, Any], name: str, default: float) -> float:
    """A positive number of a config, which an error names by the word of the file."""
    number: float = config.get(name, default)
    check_number(f"{name} in the config of {CAUSAL_LM}", number, positive=True)
    return number


def _activation(config: Mapping[str, Any], family: str) -> str:
    setting = "hidden_activation" if family == "gemma2" else "hidden_act"
    activation = config.get(setting) or FAMILIES[family].activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise LayoutError(f"expected an activation of {CAUSAL_LM} out of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if (family, activation) == ("gemma", "gelu"):  # what its files say, and do not mean
        activation = FAMILIES[family].activation
    return ACTIVATIONS[activation]


def _rotary(config: Mapping[str, Any], family: Family, head_dim: int) -> tuple[dict[str, Any], float]:
    """The settings of rotary positions, and what multiplies the heads that they rotate."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(each, Mapping) for each in rope.values()):
        raise LayoutError(f"expected rotary positions of {CAUSAL_LM} as one mapping; got {type_text(rope)}")
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    check_number(f"rope_theta in the config of {CAUSAL_LM}", base, positive=True)
    width = head_dim
    if family.partial:
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        part = 1.0 if part is None else part
        check_number(f"partial_rotary_factor in the config of {CAUSAL_LM}", part, positive=True)
        width = int(head_dim * part)
        if rope.get("type", rope.get("rope_type")) in ("su", "yarn"):  # former names
            rope = {**rope, "rope_type": "longrope"}
    original = config.get("original_max_position_embeddings", 4096 if family.partial else None)
    rope = rope if original is None else {**rope, "original_max_position_embeddings": original}
    options: dict[str, Any] = {
        "base": float(base),
        "width": width,
        "max_positions": config.get("max_position_embeddings"),
    }
    divisors, amplitude = rotary_divisors(CAUSAL_LM, rope, **options)
    if amplitude != 1 and width != head_dim:
        raise LayoutError(
            f"expected partial_rotary_factor 1 of {CAUSAL_LM} besides an attention_factor, which multiplies whole heads"
            f" here; got {part} and {amplitude}"
        )
    settings = {"rotary_base": float(base), "rotary_divisors": divisors}
    return settings | {"rotary_width": None if width == head_dim else width}, amplitude


def _window(config: Mapping[str, Any], family: Family, num_layers: int) -> int | tuple[int | None, ...] | None:
    """The window of all layers, or of each."""
    window, types = config.get("sliding_window", family.window), config.get("layer_types") if family.typed else None
    if window is None or family.has_window is None or (family.switched and not config.get("use_sliding_window")):
        return None
    window = check_positive(f"sliding_window in the config of {CAUSAL_LM}", window)
    if types is None:
        has_window = [family.has_window(config, index) for index in range(num_layers)]
    else:
        if not isinstance(types, list | tuple) or len(types) != num_layers:
            got = len(types) if isinstance(types, list | tuple) else type_text(types)
            raise LayoutError(f"expected layer_types of {CAUSAL_LM} as a list of {num_layers}; got {got}")
        if unknown := [each for each in types if each not in LAYER_TYPES]:
            raise LayoutError(
                f"expected layer_types of {CAUSAL_LM} out of {', '.join(LAYER_TYPES)}; got {unknown[0]!r}"
            )
        has_window = [each == LAYER_TYPES[1] for each in types]
    windows = tuple([window if each else None for each in has_window])
    return windows[0] if len(set(windows)) == 1 else windows


def causal_lm_arguments(definition: models.Decoder) -> dict[str, Any]:
    """The config of a model of transformers with the same settings."""
    check_kind(CAUSAL_LM, definition, models.Decoder)
    d = definition
    name, width = _family_of(d), d.head_dim or d.channels // d.num_heads
    family, windows = FAMILIES[name], set(d.windows)
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[d.activation]
    config: dict[str, Any] = {
        "model_type": name,
        "vocab_size": d.num_tokens,
        "hidden_size": d.channels,
        "intermediate_size": d.inner,
        "num_hidden_layers": d.num_layers,
        "num_attention_heads": d.num_heads,
        "num_key_value_heads": d.num_key_value_heads or d.num_heads,
        "head_dim": width,
        "rms_norm_eps": d.epsilon,
        "tie_word_embeddings": d.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": d.rotary_base},
        "hidden_activation" if name == "gemma2" else "hidden_act": activation,
    }
    if name == "phi3":
        config["rope_parameters"]["partial_rotary_factor"] = (d.rotary_width or width) / width
    if d.rotary_divisors is not None:
        scale = 1.0 if d.scale is None else d.scale if name == "gemma2" else d.scale * math.sqrt(width)
        divisors, positions = list(d.rotary_divisors), {"original_max_position_embeddings": 4096}
        config["rope_parameters"] |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors}
        config["rope_parameters"] |= {"attention_factor": math.sqrt(scale), **positions}
        config |= {"max_position_embeddings": 4096, **positions}
    biases = {"attention_bias": d.attention_bias, "mlp_bias": d.feed_forward_bias}
    config |= {bias: biases[bias] for bias in family.biases}
    if family.has_window is not None:
        config |= {"sliding_window": max((each for each in d.windows if each is not None), default=None)}
    if family.switched:
        config |= {"use_sliding_window": windows != {None}, "max_window_layers": 0}
    if family.typed and windows != {None}:
        config |= {"layer_types": [LAYER_TYPES[each is not None] for each in d.windows]}
    if name == "gemma2":
        config |= {"attn_logit_softcapping": d.softcap, "final_logit_softcapping": d.logit_softcap}
        scalar = 1 if d.rotary_divisors and d.scale else round((d.scale or 1 / math.sqrt(width)) ** -2)
        config |= {"query_pre_attn_scalar": scalar}
    again = decoder_from_config(config)
    if d.rotary_divisors is not None and math.isclose(again.scale or 0, d.scale or 0, rel_tol=1e-15):
        again = again.with_settings(scale=d.scale)  # of which a root was written
    if again != d.with_settings(dropout=0.0, implementation="auto", arithmetic="fast"):
        fields = [name for name in d.settings() if d.settings()[name] != again.settings()[name]]
        raise LayoutError(f"expected a decoder that {CAUSAL_LM} has a type for; got another {', '.join(fields)}")
    return config


def _family_of(d: models.Decoder) -> str:
    """The type of model with most of the settings."""
    if is_gemma(d):
        return "gemma2" if d.post_norm else "gemma"
    if d.rotary_width is not None:
        return "phi3"
    if d.query_key_norm:
        return "qwen3"
    if d.attention_bias and d.output_bias is False:
        return "qwen2"
    return "llama" if set(d.windows) == {None} else "mistral"


def is_gemma(definition: models.Decoder) -> bool:
    return definition.embedding_scale is not None
