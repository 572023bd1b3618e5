"""Weights of the language models of transformers: Llama, SmolLM (a Llama), Mistral, Qwen 2 and 3, Gemma, Phi 3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attention_models as models
from attention_core import layers
from attention_core._arrays import Array, Namespace, shape_text, upcast
from attention_core._backend import common_namespace
from attention_core._checks import check_floating
from attention_models.layouts._decoder_config import CAUSAL_LM, causal_lm_arguments, decoder_from_config, is_gemma
from attention_models.layouts._layout import (
    Layout,
    LayoutError,
    checked_arrays,
    widened,
)
from attention_models.parameters import Decoder

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
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Maps of Phi 3 whose rows follow one another in one array, in this order."""
IGNORED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""What files of former versions repeat of the config."""


def names_of_decoder(definition: models.Decoder) -> dict[str, str]:
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


def check_causal_lm(definition: models.Decoder, shapes: Mapping[str, Sequence[int]], /) -> None:
    """Raise unless arrays of these names and shapes are those of a model, as `from_causal_lm` takes them.

    A reader of files can call it with what stands in their headers, before it reads any array.

    Parameters
    ----------
    definition : attention_models.Decoder
    shapes : mapping of str to sequence of int

    Raises
    ------
    LayoutError
        When an array is missing, superfluous or of another shape.

    Examples
    --------
    >>> from attention_models import Decoder
    >>> check_causal_lm(Decoder(50, 8, 2, 16, num_layers=1), {})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    attention_models.layouts.LayoutError: expected model.embed_tokens.weight of transformers...; got no such array
    """
    wanted = _foreign_dims(definition)
    for fused, parts in _fused(wanted).items():
        if fused in shapes:
            rows = [wanted.pop(name) for name in parts]
            wanted[fused] = (sum(dims[0] for dims in rows), *rows[0][1:])
    if definition.tied and "lm_head.weight" in shapes:  # the embedding again
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    for name, dims in wanted.items():
        if name not in shapes:
            raise LayoutError(f"expected {name} of {CAUSAL_LM}; got no such array")
        if tuple(shapes[name]) != tuple(dims):
            raise LayoutError(f"expected {name} {tuple(dims)} of {CAUSAL_LM}; got {tuple(shapes[name])}")
    if left := sorted(name for name in set(shapes) - set(wanted) if not IGNORED.search(name)):
        more = f" ({len(left)} in all)" if len(left) > 3 else ""
        raise LayoutError(f"expected nothing else of {CAUSAL_LM}; got {', '.join(left[:3])}{more}")


def _foreign_dims(definition: models.Decoder) -> dict[str, tuple[int, ...]]:
    """The shapes of all arrays in transformers, by their names there."""
    names, specs = names_of_decoder(definition), layers.named_arrays(definition.parameters)
    return {
        names[name]: spec.dims[::-1] if _is_transposed(name, spec.dims) else spec.dims for name, spec in specs.items()
    }


def _fused(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of arrays that Phi 3 has as one, by the name of that."""
    found: dict[str, list[str]] = {}
    for name in names:
        *path, part, field = ["", *name.split(".")]
        if part in FUSED:
            found.setdefault(".".join((*path[1:], FUSED[part], field)), []).append(name)
    return found


def _is_transposed(name: str, dims: Sequence[int]) -> bool:
    return len(dims) == 2 and name != "token"


def from_causal_lm(
    arrays: Mapping[str, Array], /, *, config: Mapping[str, Any], xp: Namespace | None = None
) -> tuple[models.Decoder, Decoder]:
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
    definition : attention_models.Decoder
    parameters : attention_models.parameters.Decoder
        Of the dtype of the arrays, the widest if they differ. Those of Gemma in 16 bits become float32, as their
        scales are stored less 1.

    Raises
    ------
    LayoutError, TypeError, ValueError
        When an array is missing, superfluous or of another shape, or as in `decoder_from_config`.
    """
    definition = decoder_from_config(config)
    found = {name: array for name, array in checked_arrays(CAUSAL_LM, arrays).items() if array is not None}
    if not found:
        raise LayoutError(f"expected the arrays of {CAUSAL_LM}; got none")
    found = {name: array for name, array in found.items() if not IGNORED.search(name)}
    check_causal_lm(definition, {name: tuple(array.shape) for name, array in found.items()})
    dims = _foreign_dims(definition)
    for fused, parts in _fused(dims).items():
        if fused in found:
            whole, start = found.pop(fused), 0
            for name in parts:
                found[name] = whole[start : start + dims[name][0], ...]
                start += dims[name][0]
    for array in found.values():
        check_floating("the arrays", array)
    xp, token, head = common_namespace(xp, found), found["model.embed_tokens.weight"], found.get("lm_head.weight")
    if definition.tied and head is not None and not bool(xp.all(xp.equal(head, token))):
        raise LayoutError(f"expected lm_head.weight equal to the tied embedding; got another {shape_text(head)}")
    found, plus_one, named = widened(found, xp), is_gemma(definition), {}
    for name, foreign in names_of_decoder(definition).items():
        array = upcast(found[foreign], xp=xp) if plus_one else found[foreign]
        if len(array.shape) == 1 and plus_one and "norm" in name:
            array = xp.add(array, 1.0)
        named[name] = xp.matrix_transpose(array) if _is_transposed(name, array.shape) else array
    return definition, layers.tree_from_names(definition.parameters, named)


def to_causal_lm(
    definition: models.Decoder, parameters: Decoder, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights of a language model, as Hugging Face transformers names them: the inverse of `from_causal_lm`.

    Parameters
    ----------
    definition : attention_models.Decoder
    parameters : attention_models.parameters.Decoder
    xp : array namespace, optional

    Raises
    ------
    LayoutError
        When the model has a setting without a counterpart there.
    """
    config = causal_lm_arguments(definition)
    layers.check_fit(definition, parameters)
    arrays = layers.named_arrays(parameters)
    xp, names, written = common_namespace(xp, arrays), names_of_decoder(definition), {}
    for name, array in arrays.items():
        if len(array.shape) == 1 and is_gemma(definition) and "norm" in name:
            array = xp.subtract(array, 1.0)
        written[names[name]] = xp.matrix_transpose(array) if _is_transposed(name, array.shape) else array
    if config["model_type"] == "phi3":
        for fused, parts in _fused(tuple(written)).items():
            written[fused] = xp.concat([written.pop(name) for name in parts], axis=0)
    return written


LAYOUTS = {"causal-lm": Layout(CAUSAL_LM, from_causal_lm, to_causal_lm, causal_lm_arguments)}
