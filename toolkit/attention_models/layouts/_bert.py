"""Layouts of BERT, and of RoBERTa, which has the same arrays: the whole encoder, its layers and its embeddings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from attention_core import layers
from attention_core._arrays import Array, Namespace, type_text
from attention_core._backend import can_be_read
from attention_core._checks import check_number
from attention_core.parameters import Embeddings, EncoderLayer, FeedForward, Linear, MultiHeadAttention
from attention_models.layouts._layout import (
    ACTIVATIONS,
    Arrays,
    Layout,
    LayoutError,
    all_pairs,
    check_kind,
    check_settings,
    checked_arrays,
    checked_kind,
    config_size,
    encoder_of,
    linear_arrays,
    namespace_of,
    norm_arrays,
)

BERT_LAYER = "transformers.BertLayer"
BERT_EMBEDDINGS = "transformers.BertEmbeddings"
BERT = "transformers.BertModel"
HEADS = ("pooler.", "cls.", "lm_head.", "classifier.", "qa_outputs.")
SIZES = (
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
)
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert")
"""The ``model_type`` of each encoder that `encoder_from_config` knows."""
FIXED = {"position_embedding_type": "absolute", "is_decoder": False}
FORMER = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def from_bert_layer(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int,
    epsilon: float = 1e-12,
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.EncoderLayer, EncoderLayer]:
    """Read the weights of one layer of the encoder of BERT, as Hugging Face transformers names them.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``attention.self.query.weight`` (C, C) and ``.bias``, so for ``key`` and ``value``; ``attention.output.dense``,
        ``intermediate.dense`` (inner, C) and ``output.dense`` (C, inner); ``attention.output.LayerNorm`` and
        ``output.LayerNorm``. Weight and bias of these may have their former names, gamma and beta.
    num_heads : int
    epsilon : float
        ``layer_norm_eps``.
    dropout : float
        ``hidden_dropout_prob`` and ``attention_probs_dropout_prob``, which must be equal.
    xp : array namespace, optional
    """
    reader = Arrays(BERT_LAYER, _renamed(BERT_LAYER, arrays), xp)
    layer = _bert_layer(reader, "", None, num_heads=num_heads, epsilon=epsilon, dropout=dropout)
    reader.close()
    return layer


def to_bert_layer(
    definition: layers.EncoderLayer, parameters: EncoderLayer, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for a layer of the encoder of BERT: the inverse of `from_bert_layer`.

    Raises
    ------
    LayoutError
        When the layer normalizes first, or has no biases.
    """
    _check_bert_layer(definition)
    layers.check_fit(definition, parameters)
    xp, attention, feed = namespace_of(parameters, xp), parameters.attention, parameters.feed_forward
    return {
        **linear_arrays("attention.self.query", attention.query, xp),
        **linear_arrays("attention.self.key", attention.key, xp),
        **linear_arrays("attention.self.value", attention.value, xp),
        **linear_arrays("attention.output.dense", attention.output, xp),
        **norm_arrays("attention.output.LayerNorm", parameters.attention_norm),
        **linear_arrays("intermediate.dense", feed.expand, xp),
        **linear_arrays("output.dense", feed.contract, xp),
        **norm_arrays("output.LayerNorm", parameters.feed_forward_norm),
    }


def from_bert_embeddings(
    arrays: Mapping[str, Array],
    /,
    *,
    epsilon: float = 1e-12,
    dropout: float = 0.0,
    padding_idx: int | None = None,
    xp: Namespace | None = None,
) -> tuple[layers.Embeddings, Embeddings]:
    """Read the weights of the embeddings of BERT, as Hugging Face transformers names them.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``word_embeddings.weight``, ``position_embeddings.weight``, ``token_type_embeddings.weight``, each (rows, C),
        ``LayerNorm.weight``, ``LayerNorm.bias``. Optionally ``position_ids``, which are ignored.
    epsilon : float
        ``layer_norm_eps``.
    dropout : float
        ``hidden_dropout_prob``.
    padding_idx : int, optional
        Of the positions of RoBERTa, which begin behind it, and -1 of BERT, whose positions begin at 0. Rows of the
        table before the first position are left out. By default a row of zeros tells: no training changes that of
        padding.
    xp : array namespace, optional
    """
    reader = Arrays(BERT_EMBEDDINGS, _renamed(BERT_EMBEDDINGS, arrays), xp)
    embeddings = _bert_embeddings(reader, "", epsilon, dropout, padding_idx=padding_idx)
    reader.close()
    return embeddings


def to_bert_embeddings(
    definition: layers.Embeddings, parameters: Embeddings, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for the embeddings of BERT: the inverse of `from_bert_embeddings`.

    Raises
    ------
    LayoutError
        When there are no segments, or no normalization.
    """
    _check_bert_embeddings(definition)
    layers.check_fit(definition, parameters)
    return {
        "word_embeddings.weight": parameters.token,
        "position_embeddings.weight": parameters.position,
        "token_type_embeddings.weight": parameters.segment,
        **norm_arrays("LayerNorm", parameters.norm),
    }


def from_bert(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int,
    epsilon: float = 1e-12,
    dropout: float = 0.0,
    padding_idx: int | None = None,
    xp: Namespace | None = None,
) -> tuple[tuple[layers.Layer, ...], tuple[Any, ...]]:
    """Read the weights of the embeddings and all layers of a BERT model, as Hugging Face transformers names them.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``embeddings.`` and the names of `from_bert_embeddings`; ``encoder.layer.0.`` and the names of
        `from_bert_layer`, and so on. A prefix of all these, such as ``bert.`` or ``roberta.``, is removed. A pooler and
        the head of a task are left out, with a warning that names them.
    num_heads, epsilon, dropout, xp
        As in `from_bert_layer`.
    padding_idx : int, optional
        As in `from_bert_embeddings`.

    Returns
    -------
    definitions : tuple of attention_core.layers.Layer
        The embeddings, and the layers in order.
    parameters : tuple
        The parameters of each.
    """
    arrays = _encoder_of(_renamed(BERT, arrays))
    indices = {name.split(".")[2] for name in arrays if name.startswith("encoder.layer.")}
    reader = Arrays(BERT, arrays, xp)
    parts: list[tuple[Any, Any]] = [_bert_embeddings(reader, "embeddings.", epsilon, dropout, padding_idx=padding_idx)]
    channels = parts[0][0].channels
    parts += [
        _bert_layer(reader, f"encoder.layer.{index}.", channels, num_heads=num_heads, epsilon=epsilon, dropout=dropout)
        for index in range(len(indices))
    ]
    reader.close()
    definitions, parameters = zip(*parts, strict=True)
    return definitions, parameters


def to_bert(
    definitions: Sequence[layers.Layer], parameters: Sequence[Any], /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for a BERT: the inverse of `from_bert`.

    Raises
    ------
    LayoutError
        As in `to_bert_embeddings` and `to_bert_layer`, and when the layers differ in their settings.
    """
    bert_arguments(definitions)
    if len(definitions) != len(parameters):
        raise ValueError(f"expected parameters of {len(definitions)} layers; got those of {len(parameters)}")
    parts = [("embeddings.", to_bert_embeddings(definitions[0], parameters[0], xp=xp))]  # type: ignore[arg-type]
    for index, (definition, tree) in enumerate(zip(definitions[1:], parameters[1:], strict=True)):
        parts.append((f"encoder.layer.{index}.", to_bert_layer(definition, tree, xp=xp)))  # type: ignore[arg-type]
    return {f"{prefix}{name}": array for prefix, arrays in parts for name, array in arrays.items()}


def encoder_from_config(config: Mapping[str, Any], /) -> tuple[layers.Layer, ...]:
    """Read the settings of an encoder from its ``config.json``.

    Parameters
    ----------
    config : mapping
        Of a model of type bert, roberta, xlm-roberta or camembert.

    Returns
    -------
    tuple of attention_core.layers.Layer
        The embeddings, and the layers in order.

    Raises
    ------
    LayoutError, TypeError, ValueError
        When the type of model is another, or a setting is missing or has no counterpart here.

    Examples
    --------
    >>> sizes = {"vocab_size": 50, "max_position_embeddings": 9, "hidden_size": 8, "intermediate_size": 16}
    >>> counts = {"num_hidden_layers": 2, "num_attention_heads": 4}
    >>> len(encoder_from_config({"model_type": "bert", **sizes, **counts}))
    3
    """
    checked_kind(BERT, config, ENCODERS)
    activation = config.get("hidden_act", "gelu")
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise LayoutError(f"expected {name} {value!r} of {BERT}; got {config[name]!r}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise LayoutError(f"expected an activation of {BERT} out of {', '.join(ACTIVATIONS)}; got {activation!r}")
    config, epsilon = {"type_vocab_size": 2, **config}, config.get("layer_norm_eps", 1e-12)
    check_number(f"layer_norm_eps in the config of {BERT}", epsilon, positive=True)
    if not epsilon < 1:
        raise LayoutError(f"expected layer_norm_eps below 1 in the config of {BERT}; got {epsilon}")
    channels, num_heads, inner, num_layers, tokens, positions, segments = (
        config_size(BERT, config, name) for name in SIZES
    )
    embeddings = layers.Embeddings(tokens, positions - _begin(config), channels, segments, epsilon=epsilon)
    settings: dict[str, Any] = {"norm_first": False, "activation": ACTIVATIONS[activation], "epsilon": epsilon}
    return embeddings, *[layers.EncoderLayer(channels, num_heads, inner, **settings)] * num_layers


def from_encoder(
    arrays: Mapping[str, Array], /, *, config: Mapping[str, Any], xp: Namespace | None = None
) -> tuple[tuple[layers.Layer, ...], tuple[Any, ...]]:
    """Read the weights of an encoder, whose ``config.json`` tells its settings.

    Parameters
    ----------
    arrays : mapping of str to Array
        As in `from_bert`.
    config : mapping
        As in `encoder_from_config`.
    xp : array namespace, optional

    Returns
    -------
    definitions : tuple of attention_core.layers.Layer
    parameters : tuple
        As in `from_bert`.

    Raises
    ------
    LayoutError, TypeError, ValueError
        As in `from_bert` and `encoder_from_config`, and when the arrays have other sizes than the config says.
    """
    definitions: tuple[Any, ...] = encoder_from_config(config)
    settings = {"num_heads": definitions[1].num_heads, "epsilon": definitions[1].epsilon}
    found, parameters = from_bert(arrays, **settings, padding_idx=_begin(config) - 1, xp=xp)
    sizes = bert_arguments(found)
    for name, size in bert_arguments(
        [definitions[0], *(each.with_settings(activation="gelu") for each in definitions[1:])]
    ).items():
        if sizes[name] != size:
            raise LayoutError(f"expected arrays of {name} {size}, as the config of {BERT} has it; got {sizes[name]}")
    return definitions, parameters


def _begin(config: Mapping[str, Any]) -> int:
    """The row of the first position: behind that of padding in RoBERTa."""
    return 0 if config["model_type"] == "bert" else config.get("pad_token_id", 1) + 1


def _renamed(layout: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays with the names of today."""
    found: dict[str, Array] = {}
    for name, array in checked_arrays(layout, arrays).items():
        end = ".".join(name.split(".")[-2:])
        new = name.removesuffix(end) + FORMER.get(end, end)
        if new in found:
            raise LayoutError(f"expected {new} of {layout} once; got it under two names")
        found[new] = array
    return found


def _encoder_of(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays without their prefix; a pooler and the head of a task are left out, with a warning."""
    first = "embeddings.word_embeddings.weight"
    prefix = next((name.removesuffix(first) for name in arrays if name.endswith(first)), "")
    kept = {name: each for name, each in arrays.items() if name.startswith(prefix)}
    kept = {name.removeprefix(prefix): each for name, each in kept.items()}
    kept = {name: each for name, each in kept.items() if not name.startswith(HEADS)}
    if left := sorted(name for name in arrays if name.removeprefix(prefix) not in kept):
        more = f" ({len(left)} in all)" if len(left) > 3 else ""
        warnings.warn(f"left out of {BERT}: {', '.join(left[:3])}{more}, no part of an encoder here", stacklevel=4)
    return kept


def _bert_layer(
    reader: Arrays, prefix: str, channels: int | None, /, **settings: Any
) -> tuple[layers.EncoderLayer, EncoderLayer]:
    def linear(name: str, inputs: int, outputs: int | None) -> Linear:
        weight = reader.take(f"{prefix}{name}.weight", outputs, inputs)
        return Linear(reader.xp.matrix_transpose(weight), reader.take(f"{prefix}{name}.bias", weight.shape[0]))

    attention_norm = reader.norm(f"{prefix}attention.output.LayerNorm", channels)
    (channels,) = attention_norm.scale.shape
    names = ("self.query", "self.key", "self.value", "output.dense")
    attention = MultiHeadAttention(*(linear(f"attention.{name}", channels, channels) for name in names))
    expand = linear("intermediate.dense", channels, None)
    contract = linear("output.dense", expand.weight.shape[1], channels)
    norm = reader.norm(f"{prefix}output.LayerNorm", channels)
    tree = EncoderLayer(attention, attention_norm, FeedForward(expand, contract), norm)
    return encoder_of(reader.layout, tree, norm_first=False, **settings)


def _bert_embeddings(
    reader: Arrays, prefix: str, epsilon: float, dropout: float, *, padding_idx: int | None
) -> tuple[layers.Embeddings, Embeddings]:
    reader.find(f"{prefix}position_ids", 1, None)
    token = reader.take(f"{prefix}word_embeddings.weight", None, None)
    channels = token.shape[1]
    position, segment = (
        reader.take(f"{prefix}{name}_embeddings.weight", None, channels) for name in ("position", "token_type")
    )
    begin = _first_position(reader, position, segment, padding_idx)
    position = position[begin:, ...] if begin else position
    tree = Embeddings(token, position, segment, reader.norm(f"{prefix}LayerNorm", channels))
    tokens, positions, segments = (table.shape[0] for table in (token, position, segment))
    definition = layers.Embeddings(tokens, positions, channels, segments, epsilon=epsilon, dropout=dropout)
    layers.check_fit(definition, tree)
    return definition, tree


def _first_position(reader: Arrays, position: Array, segment: Array, padding_idx: int | None) -> int:
    """The row of the first position: behind that of padding, which stays 0 in RoBERTa; BERT has no such row."""
    xp, rows = reader.xp, position.shape[0]
    if padding_idx is not None:
        if isinstance(padding_idx, bool) or not isinstance(padding_idx, int) or not -1 <= padding_idx < rows - 1:
            raise ValueError(f"expected padding_idx in -1..{rows - 2} of {reader.layout}; got {padding_idx!r}")
        return padding_idx + 1
    is_zero = xp.all(xp.equal(position, 0.0), axis=-1)
    zeros = [row for row in range(min(rows, 4)) if can_be_read(position) and bool(is_zero[row])]
    if len(zeros) == 1 and zeros[0] < rows - 1:
        return zeros[0] + 1
    if segment.shape[0] == 1 or rows % 8 == 2:
        raise LayoutError(
            f"expected padding_idx of {reader.layout} besides tables of {rows} positions and {segment.shape[0]}"
            " segments: 1 if they are those of RoBERTa, -1 of BERT; got none"
        )
    return 0


def _check_bert_layer(definition: Any) -> None:
    check_kind(BERT_LAYER, definition, layers.EncoderLayer)
    check_settings(BERT_LAYER, ("norm_first", definition.norm_first, False), ("bias", definition.bias, True))
    check_settings(BERT_LAYER, ("activation", definition.activation, "gelu"), *all_pairs(definition))


def _check_bert_embeddings(definition: Any) -> None:
    check_kind(BERT_EMBEDDINGS, definition, layers.Embeddings)
    check_settings(BERT_EMBEDDINGS, ("norm", definition.norm, True))
    if definition.num_segments is None:
        raise LayoutError(f"expected num_segments for {BERT_EMBEDDINGS}; got None")


def bert_layer_arguments(definition: layers.EncoderLayer) -> dict[str, Any]:
    _check_bert_layer(definition)
    return {
        "hidden_size": definition.channels,
        "num_attention_heads": definition.num_heads,
        "intermediate_size": definition.inner,
        "hidden_act": "gelu",
        "layer_norm_eps": definition.epsilon,
        "hidden_dropout_prob": definition.dropout,
        "attention_probs_dropout_prob": definition.dropout,
    }


def bert_embeddings_arguments(definition: layers.Embeddings) -> dict[str, Any]:
    _check_bert_embeddings(definition)
    return {
        "vocab_size": definition.num_tokens,
        "max_position_embeddings": definition.num_positions,
        "type_vocab_size": definition.num_segments,
        "hidden_size": definition.channels,
        "layer_norm_eps": definition.epsilon,
        "hidden_dropout_prob": definition.dropout,
    }


def bert_arguments(definitions: Sequence[Any]) -> dict[str, Any]:
    if not isinstance(definitions, list | tuple) or len(definitions) < 2:
        got = f"{len(definitions)} of them" if isinstance(definitions, list | tuple) else type_text(definitions)
        raise LayoutError(f"expected embeddings and at least one layer for {BERT}; got {got}")
    arguments = bert_embeddings_arguments(definitions[0])
    for definition in definitions[1:]:
        for name, value in bert_layer_arguments(definition).items():
            if arguments.setdefault(name, value) != value:
                raise LayoutError(f"expected one {name} for {BERT}; got {arguments[name]} and {value}")
    return {**arguments, "num_hidden_layers": len(definitions) - 1}


LAYOUTS = {
    "bert": Layout(BERT, from_bert, to_bert, bert_arguments),
    "bert-layer": Layout(BERT_LAYER, from_bert_layer, to_bert_layer, bert_layer_arguments),
    "bert-embeddings": Layout(BERT_EMBEDDINGS, from_bert_embeddings, to_bert_embeddings, bert_embeddings_arguments),
}
