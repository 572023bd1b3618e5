"""Any model of Hugging Face transformers on this attention, by the name of an implementation.

``attn_implementation=`` takes the names that `register` gave: `NAMES`. Two functions stand behind each: one makes the
mask of a model once for all its layers, and the other computes attention. They are registered together, as a model
whose implementation has no mask function gets no mask at all, and so attends to padding.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from attention_core import Dropout, scaled_dot_product_attention
from attention_core.masks import And, Causal, Mask, Segments, SlidingWindow
from attention_torch.backend import backend

__all__ = ["NAMES", "attention_modules", "register"]

LEAST_VERSION = (5, 5)  # whose masks are made for offsets of the queries
NAMES = {"attention_core": "fast", "attention_core:reproducible": "reproducible"}
WITHOUT_EFFECT = frozenset({
    "cache_position", "deterministic", "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx", "sliding_window",
    "use_cache",
})  # fmt: skip
"""What reaches attention and changes nothing there: words for other parts of a model, or said by its mask, too."""


def register() -> None:
    """Make ``attn_implementation="attention_core"`` and ``"attention_core:reproducible"`` work in transformers.

    Models take either name where they are made, or later by ``model.set_attn_implementation(name)``. To register twice
    changes nothing.

    Raises
    ------
    ImportError
        When transformers is not installed, or is older than 5.5.

    Notes
    -----
    Padding, windows, softcaps, sinks, biases, dropout and caches are those of the model. Dropout draws a seed from
    PyTorch's generator in each call. ``output_attentions=True`` returns the weights before dropout. A fully masked row
    gives 0.
    """
    package = _transformers()
    masks = importlib.import_module("transformers.masking_utils")
    recording = importlib.import_module("transformers.utils.output_capturing")
    recorder = getattr(recording, "_active_collector", None)
    for name, arithmetic in NAMES.items():
        function = partial(attend, arithmetic=arithmetic, recorder=recorder)
        package.AttentionInterface.register(name, function)
        package.AttentionMaskInterface.register(name, partial(make_mask, masks))


def attention_modules(model: torch.nn.Module, /, *inputs: Any, **named: Any) -> list[str]:
    """Call a model once, and name its modules whose attention was computed here, in their order.

    Some families take any ``attn_implementation``, and compute attention themselves.

    Parameters
    ----------
    model : torch.nn.Module
        Not compiled.
    *inputs, **named
        Those of its call, which computes no gradient.

    Returns
    -------
    list of str
        Their names in ``model.named_modules()``; empty where nothing was computed here.

    Raises
    ------
    KeyError
        Before `register` was called.
    """
    interface, called = _transformers().AttentionInterface, set()
    functions = {name: interface()[name] for name in NAMES}

    def noting(function: Callable[..., Any], module: torch.nn.Module, *rest: Any, **options: Any) -> Any:
        called.add(module)
        return function(module, *rest, **options)

    try:
        for name, function in functions.items():
            interface.register(name, partial(noting, function))
        with torch.no_grad():
            model(*inputs, **named)
    finally:
        for name, function in functions.items():
            interface.register(name, function)
    return [name for name, module in model.named_modules() if module in called]


def _transformers() -> Any:
    """The package, in a version that has both interfaces."""
    least = ".".join(map(str, LEAST_VERSION))
    try:
        package = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ImportError(f"expected transformers >= {least}; got none: install attention-toolkit[hf]") from error
    if tuple(map(int, package.__version__.split(".")[:2])) < LEAST_VERSION:
        raise ImportError(f"expected transformers >= {least}; got {package.__version__}")
    return package


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    arithmetic: str = "fast",
    recorder: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention for a module of transformers: the output (B, M, H, E), and the weights if they are recorded.

    Sinks are scores of a head (H,), ``s_aux``, or those of each token (B, H, M, 1), ``sinks``.
    """
    for name, option in options.items():
        if option is not None and option is not False and name not in WITHOUT_EFFECT:
            raise ValueError(f"expected no {name}, an option that attention_core does not compute; got one")
    if sinks is not None:
        _check_sinks(sinks, query, s_aux, arithmetic)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask: Any
    bias: torch.Tensor | None
    mask, bias = _rule_of(attention_mask, (query.shape[-2], key.shape[-2])), position_bias
    if mask is None and attention_mask is not None:
        mask = attention_mask
        if mask.dtype != torch.bool:  # the keys that may be attended to, and what is added to the scores
            # What hides keys is the lowest number, or a sum with it, which would give a fully masked row the average.
            mask = attention_mask > torch.finfo(attention_mask.dtype).min / 2
            added = torch.where(mask, attention_mask, 0)
            bias = added if bias is None else bias + added
    if indices is not None:  # of the keys that an indexer chose for each query (B, M, K), next to the mask
        chosen = torch.zeros((*indices.shape[:2], key.shape[-2]), dtype=torch.bool, device=key.device)
        chosen = chosen.scatter(-1, indices.long(), True)[:, None]
        mask = chosen if mask is None else mask & chosen
    weights = _records_weights(options, recorder)
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        bias=None if bias is None else bias.to(query.dtype),
        # without a mask, a single query is the last one
        is_causal=bool(query.shape[-2] > 1 and attention_mask is None and is_causal),
        scale=scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.to(query.dtype),
        dropout=_dropout(dropout, query) if dropout and module.training else None,
        return_weights=weights,
        return_logsumexp=sinks is not None,
        arithmetic=arithmetic,
    )
    output, p = (result.output, result.weights) if weights or sinks is not None else (result, None)
    if sinks is not None:  # which take their share of each row
        share = torch.sigmoid(result.logsumexp[..., None] - sinks)
        output, p = (each if each is None else (each * share).to(query.dtype) for each in (output, p))
    return output.transpose(1, 2).contiguous(), p


def _check_sinks(sinks: torch.Tensor, query: torch.Tensor, s_aux: torch.Tensor | None, arithmetic: str) -> None:
    if sinks.shape != (*query.shape[:-1], 1):
        raise ValueError(f"expected sinks {(*query.shape[:-1], 1)}, one for each token; got {tuple(sinks.shape)}")
    if s_aux is not None or arithmetic != "fast":
        got = f"arithmetic={arithmetic!r}" if s_aux is None else "s_aux, too"
        raise ValueError(f"expected sinks of each token without s_aux, in fast arithmetic; got {got}")


class Carried(NamedTuple):
    """The rule of an array, and the array's version when it was made: models may write over the array."""

    rule: Mask | torch.Tensor
    version: int


def make_mask(masks: Any, /, *, config: Any = None, **options: Any) -> torch.Tensor | None:
    """Make the mask of a model, (B, 1, M, N), or ``None`` where a flag is enough; it carries its rule.

    Models cut and copy their masks, which rules do not stand. So they get an array. What cuts or copies it loses the
    rule, by which blocks and unused keys of a cache are skipped.

    The array is boolean. A model that takes no boolean masks of PyTorch, as it joins its own to them, gets numbers.
    """
    adds = _adds_masks(type(config))
    with torch.inference_mode(False):  # for arrays that count how often they were written over
        mask: torch.Tensor | None = (masks.eager_mask if adds else masks.sdpa_mask)(config=config, **options)
    if mask is None or not backend.is_concrete(mask):  # compiled programs would be made for the numbers of a rule
        return mask
    rule = _known_rule(masks, **options)
    if rule is None and adds:
        rule = mask == 0
    if rule is not None:
        mask.attention_core_rule = Carried(rule, mask._version)
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # looking a model up imports its module
def _adds_masks(config: type) -> bool:
    """Whether the model of a class of configs was written for masks that are added to scores alone.

    Such a model may take an implementation by name, and compute attention itself: that is said.
    """
    kind = importlib.import_module("transformers").MODEL_MAPPING.get(config, None)
    kinds = [each for each in (kind if isinstance(kind, tuple) else (kind,)) if each is not None]
    for each in kinds:
        if not getattr(each, "_can_set_attn_implementation", lambda: True)():
            warnings.warn(f"{each.__name__} computes attention itself: attention_core is not called", stacklevel=2)
    return not all(getattr(each, "_supports_sdpa", True) for each in kinds)


def _rule_of(mask: torch.Tensor | None, dims: tuple[int, ...]) -> Mask | torch.Tensor | None:
    """The rule that a mask of these dimensions carries, if there is one and the mask is as it was made."""
    if mask is None or mask.shape[-2:] != dims or not backend.is_concrete(mask):
        return None
    carried = getattr(mask, "attention_core_rule", None)
    return carried.rule if isinstance(carried, Carried) and carried.version == mask._version else None


def _known_rule(
    masks: Any,
    *,
    mask_function: Any,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Mask | torch.Tensor | None:
    """The rule of a mask where it is known, and faster than its array."""
    offsets = q_offset, kv_offset
    if any(isinstance(offset, torch.Tensor) and offset.device.type != "cpu" for offset in offsets):
        return None  # as reading them would wait for the device
    q_offset, kv_offset = map(int, offsets)
    parts = _parts(masks, mask_function, q_offset - kv_offset)
    if parts is None:
        return None
    padding = masks.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, None, None, kv_offset : kv_offset + kv_length]
    if not parts:
        return padding
    has_unused_keys = q_offset + q_length < kv_offset + kv_length
    if q_length * kv_length <= backend.tuning.structured_below and not has_unused_keys:
        return None
    rule = parts[0]
    for part in parts[1:]:
        rule = And(rule, part)
    return rule if padding is None else rule & padding


def _parts(masks: Any, function: Any, offset: int) -> list[Mask] | None:
    """The rules that a function of masking_utils combines, or ``None`` where it is another function."""
    if function is masks.causal_mask_function:
        return [Causal(offset=offset)]
    if function is masks.bidirectional_mask_function:
        return []
    made_by = MADE_BY.get(getattr(function, "__qualname__", "").partition(".")[0])
    if made_by is None or function.__module__ != masks.__name__:
        return None
    return made_by(masks, inspect.getclosurevars(function).nonlocals, offset)


def _all_parts(masks: Any, inside: Any, offset: int) -> list[Mask] | None:
    found = [_parts(masks, function, offset) for function in inside["mask_functions"]]
    return None if None in found else [part for parts in found for part in parts or ()]


def _window(masks: Any, inside: Any, offset: int) -> list[Mask] | None:
    if inside["sliding_window"] < 1:
        return None  # as no rule hides all keys
    return [SlidingWindow(left=inside["sliding_window"] - 1, offset=offset)]


MADE_BY: dict[str, Callable[[Any, Any, int], list[Mask] | None]] = {
    "and_masks": _all_parts,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": lambda masks, inside, offset: [
        SlidingWindow(left=inside["sliding_window"], right=inside["sliding_window"], offset=offset)
    ],
    "packed_sequence_mask_function": lambda masks, inside, offset: [Segments(*[inside["packed_sequence_mask"]] * 2)],
    # in one packed sequence, positions differ as indices do
    "remap_positions_for_packed_sequence": lambda masks, inside, offset: _parts(masks, inside["mask_function"], offset),
}
"""What the functions of masking_utils return, by their names."""


def _dropout(rate: float, query: torch.Tensor) -> Dropout:
    """Dropout with a seed of PyTorch's generator for the device, which checkpoints restore."""
    return Dropout(rate, torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=query.device))


def _records_weights(options: dict[str, Any], recorder: Any) -> bool:
    """Whether a model returns weights: some modules are told so, and a hook records those of others."""
    recorded = None if recorder is None else recorder.get()
    return bool(options.get("output_attentions")) or any(name.endswith("attentions") for name in recorded or ())
