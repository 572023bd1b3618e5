"""Layouts of the language models of transformers: Llama, Mistral, Qwen 2 and 3, Gemma 2, and SmolLM (a Llama)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attention_core import layers
from attention_core._arrays import Array, Namespace, shape_text, type_text, upcast
from attention_core._backend import common_namespace
from attention_core._checks import check_number, check_positive
from attention_core.layouts._layout import Layout, LayoutError, check_kind, checked_arrays
from attention_core.parameters import Decoder

CAUSAL_LM = "transformers.AutoModelForCausalLM"
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
TIED = {"llama": False, "mistral": False, "qwen2": False, "qwen3": False, "gemma2": True}  # unless the config says
MODEL_TYPES = tuple(TIED)
MAX_LAYERS = 10_000
"""No model has as many: a tree of more would fill the memory before it is compared with the arrays."""
MAPS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.expand": "mlp.up_proj",
    "feed_forward.contract": "mlp.down_proj",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "attention_norm": "input_layernorm.weight",
    "feed_forward_norm": "post_attention_layernorm.weight",
}
POST_NORM = {
    "feed_forward_norm": "pre_feedforward_layernorm.weight",
    "attention_post_norm": "post_attention_layernorm.weight",
    "feed_forward_post_norm": "post_feedforward_layernorm.weight",
}


def decoder_from_config(config: Mapping[str, Any], /) -> layers.Decoder:
    """Read the settings of a language model from its ``config.json``.

    Parameters
    ----------
    config : mapping
        Of a model of type llama (SmolLM, too), mistral, qwen2, qwen3 or gemma2.

    Returns
    -------
    attention_core.layers.Decoder

    Raises
    ------
    LayoutError, TypeError, ValueError
        When the type of model is another, or a setting is missing or has no counterpart here.

    Examples
    --------
    >>> sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    >>> decoder_from_config({"model_type": "llama", **sizes, "num_attention_heads": 2}).head_dim
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"expected the config of {CAUSAL_LM} as a mapping; got {type_text(config)}")
    family = config.get("model_type")
    if family not in MODEL_TYPES:
        raise LayoutError(f"expected a model_type out of {', '.join(MODEL_TYPES)}; got {family!r}")
    gemma, num_heads = family == "gemma2", _size(config, "num_attention_heads")
    channels, num_layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers", most=MAX_LAYERS)
    head_dim = _size(config, "head_dim") if config.get("head_dim") else (256 if gemma else None)
    activation = config.get("hidden_activation" if gemma else "hidden_act") or (
        "gelu_pytorch_tanh" if gemma else "silu"
    )
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise LayoutError(f"expected an activation of {CAUSAL_LM} out of {', '.join(ACTIVATIONS)}; got {activation!r}")
    window, full_every = _windows(config, family, num_layers)
    num_kv_heads = config.get("num_key_value_heads", 8 if family == "mistral" else 4 if gemma else num_heads)
    biased = bool(config.get("attention_bias", False)) or family == "qwen2"
    over_scale = config.get("query_pre_attn_scalar", 256)
    check_number(f"query_pre_attn_scalar in the config of {CAUSAL_LM}", over_scale, positive=True)
    return layers.Decoder(
        _size(config, "vocab_size"),
        channels,
        num_heads,
        _size(config, "intermediate_size"),
        num_layers,
        tied=config.get("tie_word_embeddings", TIED[family]),
        embedding_scale=math.sqrt(channels) if gemma else None,
        logit_softcap=config.get("final_logit_softcapping", 30.0) if gemma else None,
        full_every=full_every,
        num_key_value_heads=None if num_kv_heads == num_heads else num_kv_heads,
        head_dim=None if head_dim is None or head_dim * num_heads == channels else head_dim,
        attention_bias=biased,
        output_bias=False if family == "qwen2" else None,
        feed_forward_bias=bool(config.get("mlp_bias", False)),
        query_key_norm=family == "qwen3",
        post_norm=gemma,
        activation=ACTIVATIONS[activation],
        epsilon=config.get("rms_norm_eps", 1e-6),
        rotary_base=_rotary_base(config),
        window=window,
        scale=over_scale**-0.5 if gemma else None,
        softcap=config.get("attn_logit_softcapping", 50.0) if gemma else None,
    )


def _size(config: Mapping[str, Any], name: str, **most: int) -> int:
    if name not in config:
        raise LayoutError(f"expected {name} in the config of {CAUSAL_LM}; got {', '.join(sorted(config)) or 'nothing'}")
    check_positive(f"{name} in the config of {CAUSAL_LM}", config[name], **most)
    return int(config[name])


def _rotary_base(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise LayoutError(f"expected rotary positions of {CAUSAL_LM} as a mapping; got {type_text(rope)}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise LayoutError(f"expected rotary positions of type default for {CAUSAL_LM}; got {kind!r}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) not in (1, None):
        raise LayoutError(f"expected rotary positions of whole heads for {CAUSAL_LM}; got a partial_rotary_factor")
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    check_number(f"rope_theta in the config of {CAUSAL_LM}", base, positive=True)
    return float(base)


def _windows(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, int | None]:
    """The window, and which layers are without."""
    window, types = (
        config.get("sliding_window", 4096 if family in ("mistral", "gemma2") else None),
        config.get("layer_types"),
    )
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if window is None or family == "llama":
        return None, None
    if types is not None:
        if not isinstance(types, list | tuple):
            raise LayoutError(f"expected layer_types of {CAUSAL_LM} as a list; got {type_text(types)}")
        sliding = [each == "sliding_attention" for each in types]
    elif family in ("qwen2", "qwen3"):
        sliding = [index >= config.get("max_window_layers", 28) for index in range(num_layers)]
    else:
        sliding = [family == "mistral" or bool((index + 1) % 2) for index in range(num_layers)]
    if all(sliding):
        return window, None
    every = sliding.index(False) + 1
    if len(sliding) != num_layers or sliding != [bool(index % every) for index in range(1, num_layers + 1)]:
        raise LayoutError(
            f"expected layers without a window at every n-th place of {CAUSAL_LM}; got layer_types {types}"
        )
    return (None, None) if every == 1 else (window, every)


def names_of_decoder(definition: layers.Decoder) -> dict[str, str]:
    """The names of all arrays in transformers, by those here."""
    layer = MAPS | (POST_NORM if definition.post_norm else {})
    names = {"token": "model.embed_tokens.weight", "norm": "model.norm.weight", "output.weight": "lm_head.weight"}
    found = {}
    for name in layers.named_arrays(definition.parameters):
        if name in names:
            found[name] = names[name]
            continue
        _, index, path = name.split(".", 2)
        part, _, field = path.rpartition(".") if path.endswith((".weight", ".bias")) else (path, "", "")
        found[name] = f"model.layers.{index}.{layer[part]}{f'.{field}' if field else ''}"
    return found


def check_causal_lm(definition: layers.Decoder, shapes: Mapping[str, Sequence[int]], /) -> None:
    """Raise unless arrays of these names and shapes are those of a model, as `from_causal_lm` takes them.

    A reader of files can call it with what stands in their headers, before it reads any array.

    Parameters
    ----------
    definition : attention_core.layers.Decoder
    shapes : mapping of str to sequence of int

    Raises
    ------
    LayoutError
        When an array is missing, superfluous or of another shape.

    Examples
    --------
    >>> from attention_core.layers import Decoder
    >>> check_causal_lm(Decoder(50, 8, 2, 16, num_layers=1), {})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    attention_core.layouts.LayoutError: expected model.embed_tokens.weight of transformers...; got no such array
    """
    names, specs = names_of_decoder(definition), layers.named_arrays(definition.parameters)
    wanted = {
        names[name]: spec.dims[::-1] if _is_transposed(name, spec.dims) else spec.dims for name, spec in specs.items()
    }
    if definition.tied and "lm_head.weight" in shapes:  # the embedding again
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    for name, dims in wanted.items():
        if name not in shapes:
            raise LayoutError(f"expected {name} of {CAUSAL_LM}; got no such array")
        if tuple(shapes[name]) != tuple(dims):
            raise LayoutError(f"expected {name} {tuple(dims)} of {CAUSAL_LM}; got {tuple(shapes[name])}")
    left = sorted(set(shapes) - set(wanted))
    if left:
        more = f" ({len(left)} in all)" if len(left) > 3 else ""
        raise LayoutError(f"expected nothing else of {CAUSAL_LM}; got {', '.join(left[:3])}{more}")


def _is_transposed(name: str, dims: Sequence[int]) -> bool:
    return len(dims) == 2 and name != "token"


def from_causal_lm(
    arrays: Mapping[str, Array], /, *, config: Mapping[str, Any], xp: Namespace | None = None
) -> tuple[layers.Decoder, Decoder]:
    """Read the weights of a language model, as Hugging Face transformers names them.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``model.embed_tokens.weight`` (V, C), ``model.layers.0.self_attn.q_proj.weight`` and so on. A tied
        ``lm_head.weight`` may be there, too.
    config : mapping
        As in `decoder_from_config`.
    xp : array namespace, optional

    Returns
    -------
    definition : attention_core.layers.Decoder
    parameters : attention_core.parameters.Decoder
        Of the dtype of the arrays; those of Gemma 2 in 16 bits become float32, as their scales are stored less 1.

    Raises
    ------
    LayoutError, TypeError, ValueError
        When an array is missing, superfluous or of another shape, or as in `decoder_from_config`.
    """
    definition = decoder_from_config(config)
    found = {name: array for name, array in checked_arrays(CAUSAL_LM, arrays).items() if array is not None}
    if not found:
        raise LayoutError(f"expected the arrays of {CAUSAL_LM}; got none")
    check_causal_lm(definition, {name: tuple(array.shape) for name, array in found.items()})
    xp, token, head = common_namespace(xp, found), found["model.embed_tokens.weight"], found.get("lm_head.weight")
    if definition.tied and head is not None and not bool(xp.all(xp.equal(head, token))):
        raise LayoutError(f"expected lm_head.weight equal to the tied embedding; got another {shape_text(head)}")
    plus_one = definition.post_norm
    named = {}
    for name, foreign in names_of_decoder(definition).items():
        array = upcast(found[foreign], xp=xp) if plus_one else found[foreign]
        if len(array.shape) == 1 and plus_one and "norm" in name:
            array = xp.add(array, 1.0)
        named[name] = xp.matrix_transpose(array) if _is_transposed(name, array.shape) else array
    return definition, layers.tree_from_names(definition.parameters, named)


def to_causal_lm(
    definition: layers.Decoder, parameters: Decoder, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights of a language model, as Hugging Face transformers names them: the inverse of `from_causal_lm`.

    Parameters
    ----------
    definition : attention_core.layers.Decoder
    parameters : attention_core.parameters.Decoder
    xp : array namespace, optional

    Returns
    -------
    dict of str to Array

    Raises
    ------
    LayoutError
        When the model has a setting without a counterpart there.
    """
    causal_lm_arguments(definition)
    layers.check_fit(definition, parameters)
    arrays = layers.named_arrays(parameters)
    xp, names, written = common_namespace(xp, arrays), names_of_decoder(definition), {}
    for name, array in arrays.items():
        if len(array.shape) == 1 and definition.post_norm and "norm" in name:
            array = xp.subtract(array, 1.0)
        written[names[name]] = xp.matrix_transpose(array) if _is_transposed(name, array.shape) else array
    return written


def causal_lm_arguments(definition: layers.Decoder) -> dict[str, Any]:
    """The config of a model of transformers with the same settings."""
    check_kind(CAUSAL_LM, definition, layers.Decoder)
    d = definition
    family = (
        "gemma2" if d.post_norm else "qwen3" if d.query_key_norm else "mistral" if d.window is not None else "llama"
    )
    if d.attention_bias and d.output_bias is False:
        family = "qwen2"
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items() if theirs != "swish"}[d.activation]
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": d.num_tokens,
        "hidden_size": d.channels,
        "intermediate_size": d.inner,
        "num_hidden_layers": d.num_layers,
        "num_attention_heads": d.num_heads,
        "num_key_value_heads": d.num_key_value_heads or d.num_heads,
        "head_dim": d.head_dim or d.channels // d.num_heads,
        "rms_norm_eps": d.epsilon,
        "tie_word_embeddings": d.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": d.rotary_base},
        "hidden_activation" if family == "gemma2" else "hidden_act": activation,
    }
    if family == "llama":
        config |= {"mlp_bias": d.feed_forward_bias}
    if family in ("llama", "qwen3", "gemma2"):
        config |= {"attention_bias": d.attention_bias}
    if d.window is not None:
        every = d.full_every
        config |= {"sliding_window": d.window}
        config |= {"use_sliding_window": True} if family.startswith("qwen") else {}
        if family != "mistral":
            kinds = ["full_attention" if each is None else "sliding_attention" for each in d.windows]
            config |= (
                {"layer_types": kinds, "max_window_layers": 0}
                if every is None or family != "gemma2"
                else {"layer_types": kinds}
            )
    elif family == "mistral" or family == "gemma2":
        config |= {"sliding_window": None}
    if family == "gemma2":
        config |= {"attn_logit_softcapping": d.softcap, "final_logit_softcapping": d.logit_softcap}
        config |= {"query_pre_attn_scalar": round((d.scale or 1 / math.sqrt(config["head_dim"])) ** -2)}
    again = decoder_from_config(config)
    if again != d.with_settings(dropout=0.0, implementation="auto", arithmetic="fast"):
        fields = [name for name in d.settings() if d.settings()[name] != again.settings()[name]]
        raise LayoutError(f"expected a decoder that {CAUSAL_LM} has a type for; got another {', '.join(fields)}")
    return config


LAYOUTS = {"causal-lm": Layout(CAUSAL_LM, from_causal_lm, to_causal_lm, causal_lm_arguments)}
