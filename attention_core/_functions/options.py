"""The options of attention, of which `scaled_dot_product_attention` says what they mean.

Public functions take them as ``**options``, and so hold what a call gives, and nothing else. A new one is a line here,
and a check. If it says how attention is computed, it is a field of `Call`, and each way takes or refuses it:

* one that changes scores is in `modify_scores`, and in `Takes`, by which kernels refuse it;
* blocks hold it in `Plan`; reproducible arithmetic refuses it in its checks;
* FlexAttention names the options that it takes, and dask those that it does not.

Layers have it as a setting, by which functions of layers know its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, Required, TypedDict, TypeVar

from .._arrays import Array, Namespace, arrays_within
from .._attention.shards.splits import Shards
from .._backend import constant, holds_numpy, is_compiling, is_of_numpy
from .._checks import check_added_dtype
from .._keywords import with_options
from ..masks import Mask
from ..random import Dropout

Call = TypeVar("Call", bound=Callable[..., Any])


class OfOutput(TypedDict, total=False):
    """Options that decide what is computed."""

    mask: Mask | Array | None
    bias: Array | None
    is_causal: bool
    scale: float | Array | None
    softcap: float | Array | None
    score_mod: Callable[..., Array] | None
    sinks: Array | None
    dropout: Dropout | None


class OfResult(TypedDict, total=False):
    """Options that decide what is returned, and so the type of the result."""

    return_weights: bool
    return_logsumexp: bool


class OfComputation(TypedDict, total=False):
    """Options that decide how it is computed."""

    implementation: str
    arithmetic: str
    assume_finite: bool | None
    shards: Shards | None
    xp: Namespace | None


class PlainOptions(OfOutput, OfComputation):
    """The options under which the result has one type."""


class WithoutFlags(PlainOptions, total=False):
    """The options under which the result is the output alone."""

    return_weights: Literal[False]
    return_logsumexp: Literal[False]


class WithWeights(PlainOptions, total=False):
    """The options under which the result is `Attention`, with weights."""

    return_weights: Required[Literal[True]]
    return_logsumexp: bool


class WithLogsumexp(PlainOptions, total=False):
    """The options under which the result is `Attention`, with the logsumexp."""

    return_weights: bool
    return_logsumexp: Required[Literal[True]]


class Options(OfOutput, OfResult, OfComputation):
    """All options, in the order in which signatures show them."""


class DecoderOptions(TypedDict, total=False):
    """Options of a decoder, and those that it shares with its layers."""

    num_key_value_heads: int | None
    cache: Any
    num_new: Array | None
    position_ids: Array | None
    rotary_base: float | None
    rotary_width: int | None
    rotary_divisors: tuple[float, ...] | None
    interleaved: bool
    norm_first: bool
    window: int | tuple[int | None, ...] | None
    mask: Mask | Array | None
    scale: float | None
    softcap: float | None
    memory: Array | None
    memory_mask: Mask | Array | None
    activation: str
    epsilon: float
    dropout: Dropout | None
    donate: bool
    hook: Callable[[str, Callable[[Array], Any], Array], Any] | None
    implementation: str
    arithmetic: str
    shards: Shards | None
    xp: Namespace | None


FLAGS = ("is_causal", "return_weights", "return_logsumexp")
NUMBERS = ("scale", "softcap")
_OF_OUTPUT = tuple(name for name in OfOutput.__annotations__ if name not in FLAGS)
ARRAYS = (*_OF_OUTPUT, "starts", "num_new", "position_ids", "memory_mask")  # options that are some, or hold some
WORDS = {"implementation": "auto", "arithmetic": "fast"}
DEFAULTS: dict[str, Any] = dict.fromkeys(Options.__annotations__) | dict.fromkeys(FLAGS, False) | WORDS
DECODER_DEFAULTS: dict[str, Any] = dict.fromkeys(DecoderOptions.__annotations__) | WORDS
DECODER_DEFAULTS |= {
    "rotary_base": 10000.0,
    "interleaved": False,
    "norm_first": True,
    "activation": "silu",
    "epsilon": 1e-6,
    "donate": False,
}


def arrays_of(options: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays that options are, or hold, by name: they have to be of one library with the others."""
    return {path: array for name in ARRAYS for path, array in arrays_within(options.get(name), name).items()}


def options_but(*names: str, kind: Any = Options, defaults: dict[str, Any] = DEFAULTS) -> list[inspect.Parameter]:
    """All options but these, as parameters of a function."""
    keyword, hints = inspect.Parameter.KEYWORD_ONLY, kind.__annotations__
    return [
        inspect.Parameter(name, keyword, default=default, annotation=hints[name].__forward_arg__)
        for name, default in defaults.items()
        if name not in names
    ]


def takes(*names: str, kind: Any = Options, defaults: dict[str, Any] = DEFAULTS) -> Callable[[Call], Call]:
    """Let a call of a layer show these options, which it takes as ``**options``."""
    return with_options([each for each in options_but(kind=kind, defaults=defaults) if each.name in names])


def with_constants(like: Array, options: dict[str, Any], /) -> dict[str, Any]:
    """Turn NumPy arrays among options into constants of another array's library, on its device.

    Masks, score modifications and tuples may hold some. Where nothing is turned, the options are returned themselves.
    """
    names = [name for name in ARRAYS if options.get(name) is not None]
    if is_of_numpy(like) or not hasattr(like, "dtype") or not any(holds_numpy(options[name]) for name in names):
        return options
    for name in () if is_compiling(like) else ("bias", "sinks"):  # before the library narrows their dtype
        if is_of_numpy(options.get(name)):
            check_added_dtype(name, options[name], like)
    return options | {name: constant(options[name], like, wraps=name == "dropout") for name in names}
