"""Any model of Hugging Face transformers on this attention, by the name of an implementation.

``attn_implementation=`` takes the names that `register` gave: `NAMES`. Two functions stand behind each: one makes the
mask of a model once for all its layers, and the other computes attention. They are registered together, as a model
whose implementation has no mask function gets no mask at all, and so attends to padding.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from attention_core import Dropout, scaled_dot_product_attention

__all__ = ["NAMES", "register"]

LEAST_VERSION = (4, 53)  # the first with an interface for masks
NAMES = {"attention_core": "fast", "attention_core:reproducible": "reproducible"}
UNSUPPORTED = ("cache", "indices", "block_indices")  # of pages, and of sparse attention


def register() -> None:
    """Make ``attn_implementation="attention_core"`` and ``"attention_core:reproducible"`` work in transformers.

    Models take either name where they are made, or later by ``model.set_attn_implementation(name)``. To register twice
    changes nothing.

    Raises
    ------
    ImportError
        When transformers is not installed, or is older than 4.53.

    Notes
    -----
    Padding, windows, softcaps, sinks, biases, dropout and caches are those of the model. Dropout draws a seed from
    PyTorch's generator in each call. ``output_attentions=True`` returns the weights before dropout. A fully masked row
    gives 0.
    """
    package = _transformers()
    masks = importlib.import_module("transformers.masking_utils")
    recorder = getattr(package.utils.output_capturing, "_active_collector", None)
    for name, arithmetic in NAMES.items():
        function = partial(attend, arithmetic=arithmetic, recorder=recorder)
        package.AttentionInterface.register(name, function)
        package.AttentionMaskInterface.register(name, masks.sdpa_mask)


def _transformers() -> Any:
    """The package, in a version that has both interfaces."""
    try:
        package = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ImportError('expected transformers; got none installed: pip install "attention-core[hf]"') from error
    if tuple(int(part) for part in package.__version__.split(".")[:2]) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
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
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention for a module of transformers: the output (B, M, H, E), and the weights if they are recorded."""
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"expected no {name}, of attention that is paged or sparse; got one")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, bias = _mask_and_bias(attention_mask, position_bias, query.dtype)
    weights = _records_weights(options, recorder)
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        # without a mask, a single query is the last one
        is_causal=bool(query.shape[-2] > 1 and attention_mask is None and is_causal),
        scale=scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.to(query.dtype),
        dropout=_dropout(dropout, query) if dropout and module.training else None,
        return_weights=weights,
        arithmetic=arithmetic,
    )
    output, p = (result.output, result.weights) if weights else (result, None)
    return output.transpose(1, 2).contiguous(), p


def _mask_and_bias(
    attention_mask: torch.Tensor | None, position_bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The keys that may be attended to, and what is added to the scores: masks of floats are both."""
    bias = position_bias
    if attention_mask is None or attention_mask.dtype == torch.bool:
        mask = attention_mask
    else:
        # What hides keys is the lowest number, or a sum with it: a fully masked row of these would give the average.
        mask = attention_mask > torch.finfo(attention_mask.dtype).min / 2
        added = torch.where(mask, attention_mask, 0)
        bias = added if bias is None else bias + added
    return mask, None if bias is None else bias.to(dtype)


def _dropout(rate: float, query: torch.Tensor) -> Dropout:
    """Dropout with a seed of PyTorch's generator for the device, which checkpoints restore."""
    return Dropout(rate, torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=query.device))


def _records_weights(options: dict[str, Any], recorder: Any) -> bool:
    """Whether a model returns weights: some of its modules are told so, and the others have a hook that records them."""
    recorded = None if recorder is None else recorder.get()
    return bool(options.get("output_attentions")) or any(name.endswith("attentions") for name in recorded or ())
