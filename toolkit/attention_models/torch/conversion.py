"""Modules of PyTorch and of Hugging Face transformers into layers, and back, with their weights bit for bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from attention_models.layouts import LAYOUTS, LayoutError
from attention_torch.backend import backend
from attention_torch.layers import Layer

__all__ = ["from_module", "to_module"]

BERTS = {"bert": "Bert", "roberta": "Roberta", "xlm_roberta": "XLMRoberta", "camembert": "Camembert"}
MODULES: dict[type[Any], str] = {
    torch.nn.MultiheadAttention: "torch",
    torch.nn.TransformerEncoderLayer: "torch-encoder-layer",
    torch.nn.TransformerDecoderLayer: "torch-decoder-layer",
}
HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
PARTS = {"Layer": "bert-layer", "Embeddings": "bert-embeddings", "Model": "bert"}


def from_module(module: torch.nn.Module, /) -> Any:
    """Make a layer of a module, on its device, with copies of its weights and in its mode, training or evaluation.

    Parameters
    ----------
    module : torch.nn.Module
        A `torch.nn.MultiheadAttention`, `torch.nn.TransformerEncoderLayer` or `torch.nn.TransformerDecoderLayer`, or of
        transformers a ``BertLayer``, ``BertEmbeddings``, or ``BertModel``, whose pooler is left out with a warning.
        Those of ``Roberta``, ``XLMRoberta`` and ``Camembert`` work, too. Their positions begin behind ``padding_idx``,
        and count tokens alone: give ``position_ids`` for texts that are padded on the left.

        The layers of PyTorch have a second dropout, in their feed-forward. It is left out with a warning in evaluation
        mode, and refused in training. The decoder layer is always causal; in PyTorch, ``tgt_mask`` decides.

    Returns
    -------
    Layer
        For a ``BertModel`` a list: the embeddings, and the layers in order. The batch comes first, whatever
        ``batch_first`` of the module is.

    Raises
    ------
    TypeError
        When the module is of another class; classes derived from these may compute something else.
    attention_models.layouts.LayoutError
        When it has a setting, a hook or a method of its own that cannot be carried over; the message names it.

    Examples
    --------
    >>> theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> ours, x = from_module(theirs), torch.ones(1, 3, 8)
    >>> bool(torch.allclose(ours(x), theirs(x, x, x)[0]))
    True
    """
    name = _name(type(module), _hint(module))
    _check_calls(module)
    if name == "bert":
        if module.pooler is not None:
            warnings.warn(f"left out of {type(module).__name__}: pooler, no part of an encoder here", stacklevel=2)
        _check_config(module.config)
        return [from_module(each) for each in (module.embeddings, *module.encoder.layer)]
    tensors = dict(module.state_dict())
    if any(each.is_meta for each in tensors.values()):
        raise LayoutError(f'expected a {type(module).__name__} with values; got one on the device "meta"')
    definition, parameters = LAYOUTS[name].read(backend.to_numpy(tensors), **_SETTINGS[name](module))
    layer = Layer.from_numpy(definition, parameters, device=next(module.parameters()).device)
    layer.requires_grad_(any(each.requires_grad for each in module.parameters()))
    return layer.train(module.training)


def to_module(layer: Any, kind: type[torch.nn.Module], /) -> torch.nn.Module:
    """Make a module of a layer, on its device, with copies of its weights and in its mode: undoes `from_module`.

    Parameters
    ----------
    layer : Layer
        For a ``BertModel`` a sequence: the embeddings, and the layers in order.
    kind : type
        One of the classes that `from_module` takes. For a relative of BERT, write the class of BERT, which computes
        the same. Modules of PyTorch are made with ``batch_first=True``.

    Raises
    ------
    TypeError
        When the class is another one.
    attention_models.layouts.LayoutError
        When the layer has a setting that the class has not; the message names it.

    Examples
    --------
    >>> from attention_torch import MultiHeadAttention
    >>> to_module(MultiHeadAttention(8, 2, bias=False), torch.nn.MultiheadAttention).in_proj_weight.shape
    torch.Size([24, 8])
    """
    name = _name(kind)
    if name.startswith("bert") and not kind.__name__.startswith("Bert"):
        raise TypeError(f"expected a class of BERT, which computes the same; got {kind.__name__}")
    several = isinstance(layer, Sequence | torch.nn.ModuleList)
    layers = list(layer) if several else [layer]
    for each in layers:
        if not isinstance(each, Layer):
            raise TypeError(f"expected a layer of attention_torch; got {type(each).__name__}")
    if name == "bert":
        definition: Any = [each.definition for each in layers]
        parameters: Any = [each.to_numpy()[0] for each in layers]
    elif several:
        raise TypeError(f"expected one layer for {LAYOUTS[name].module}; got {len(layers)}")
    else:
        definition, parameters = layer.definition, layer.to_numpy()[0]
    arrays = LAYOUTS[name].write(definition, parameters)
    arguments = LAYOUTS[name].arguments(definition)
    module = _bert(kind, arguments) if name.startswith("bert") else kind(**arguments, batch_first=True)
    device = next(layers[0].parameters()).device
    module.to(device).load_state_dict(
        {name: tensor.to(device) for name, tensor in backend.from_numpy(arrays).items()}, assign=True
    )
    return module.train(layers[0].training)


def _name(kind: type[Any], hint: str = "") -> str:
    """The layout of a class."""
    name = _layout_of(kind)
    if name is None:
        known = [LAYOUTS[each].module for each in (*MODULES.values(), *PARTS.values())]
        raise TypeError(f"expected a module out of {', '.join(known)}; got {getattr(kind, '__name__', kind)}{hint}")
    return name


def _hint(module: Any) -> str:
    """What to write instead of a module that is known only in parts, or as a file."""
    if isinstance(module, type):
        return f", the class {module.__name__}: from_module takes a module of it"
    if isinstance(module, Layer):
        return ", which is a layer already"
    if hasattr(module, "generate"):
        return ": attention_models.checkpoints.load_causal_lm reads what its save_pretrained writes, of some families"
    parts = [name for name, each in getattr(module, "named_modules", list)() if _layout_of(type(each)) is not None]
    return f": from_module takes parts of it, such as its {parts[0]}" if parts else ""


def _layout_of(kind: type[Any]) -> str | None:
    """The layout of a class, if there is one."""
    for family, start in BERTS.items():
        part = getattr(kind, "__name__", "").removeprefix(start)
        if getattr(kind, "__module__", "") == f"transformers.models.{family}.modeling_{family}" and part in PARTS:
            return PARTS[part]
    return MODULES.get(kind)


def _torch(module: Any) -> dict[str, Any]:
    return {"num_heads": module.num_heads, "zero_attention": module.add_zero_attn, "dropout": module.dropout}


def _torch_layer(module: Any) -> dict[str, Any]:
    activation, layout = module.activation, LAYOUTS[MODULES[type(module)]].module
    exact = isinstance(activation, torch.nn.GELU) and activation.approximate == "none"
    known = {torch.nn.functional.gelu: "gelu", torch.nn.functional.relu: "relu"}
    name = "gelu" if exact else "relu" if isinstance(activation, torch.nn.ReLU) else known.get(activation)
    if name is None:
        raise LayoutError(f"expected activation gelu or relu of {layout}; got {activation}")
    if module.dropout.p:
        inside = f"dropout inside the feed-forward of {layout}"
        if module.training:
            raise LayoutError(f"expected no {inside} in training; got {module.dropout.p}: set p of its dropout to 0")
        warnings.warn(f"left out: {inside}, {module.dropout.p}, which is nothing in evaluation", stacklevel=3)
    parts = dict(module.named_children())
    attentions = [parts[each] for each in ("self_attn", "multihead_attn") if each in parts]
    if any(each.add_zero_attn for each in attentions):
        raise LayoutError(f"expected add_zero_attn False of {layout}; got True")
    norms, drops = ([parts[f"{each}{n}"] for n in (1, 2, 3) if f"{each}{n}" in parts] for each in ("norm", "dropout"))
    return {
        "num_heads": _one("num_heads", *(each.num_heads for each in attentions)),
        "norm_first": module.norm_first,
        "activation": name,
        "epsilon": _one("layer_norm_eps", *(each.eps for each in norms)),
        "dropout": _one("dropout", *(each.dropout for each in attentions), *(each.p for each in drops)),
    }


def _bert_layer(module: Any) -> dict[str, Any]:
    attention = module.attention
    _check_config(attention.self.config)
    scale = 1 / math.sqrt(attention.self.attention_head_size)
    if not math.isclose(getattr(attention.self, "scaling", scale), scale, rel_tol=1e-12):
        raise LayoutError(f"expected scaling {scale} of BertLayer; got {attention.self.scaling}")
    return {
        "num_heads": attention.self.num_attention_heads,
        "epsilon": _one("layer_norm_eps", attention.output.LayerNorm.eps, module.output.LayerNorm.eps),
        "dropout": _one(
            "dropout of weights (attention_probs_dropout_prob) and of branches (hidden_dropout_prob)",
            attention.self.dropout.p,
            attention.output.dropout.p,
            module.output.dropout.p,
        ),
    }


def _bert_embeddings(module: Any) -> dict[str, Any]:
    padding = getattr(module, "padding_idx", -1)  # behind which positions of RoBERTa begin
    return {"epsilon": module.LayerNorm.eps, "dropout": module.dropout.p, "padding_idx": padding}


_SETTINGS = {
    "torch": _torch,
    "torch-encoder-layer": _torch_layer,
    "torch-decoder-layer": _torch_layer,
    "bert-layer": _bert_layer,
    "bert-embeddings": _bert_embeddings,
}


def _one(name: str, *values: float) -> float:
    if len(set(values)) > 1:
        raise LayoutError(f"expected one {name}; got {', '.join(map(str, values))}: make them equal in the module")
    return values[0]


def _check_calls(module: torch.nn.Module) -> None:
    """Raise if a call of a module, or of a part of it, does more than its class says: a layer would not do it."""
    for name, part in module.named_modules():
        called = [hook for kind in HOOKS for hook in getattr(part, kind).values()] + [vars(part).get("forward")]
        for each in called:
            if each is not None and getattr(each, "__module__", "") != "transformers.utils.output_capturing":
                got, where = getattr(each, "__qualname__", type(each).__name__), name or type(module).__name__
                raise LayoutError(f"expected no hook and no method of its own in {where}; got {got}: remove it")


def _check_config(config: Any) -> None:
    for name, wanted in (("hidden_act", "gelu"), ("is_decoder", False), ("position_embedding_type", "absolute")):
        if getattr(config, name, wanted) != wanted:
            raise LayoutError(f"expected {name} {wanted} of a BERT; got {getattr(config, name)}")


def _bert(kind: type[torch.nn.Module], arguments: dict[str, Any]) -> torch.nn.Module:
    from transformers import BertConfig, BertModel  # noqa: PLC0415 (who converts no such layer does without)

    config = BertConfig(**arguments, attn_implementation="sdpa")  # what a model would choose for its parts
    return kind(config, add_pooling_layer=False) if kind is BertModel else kind(config)
