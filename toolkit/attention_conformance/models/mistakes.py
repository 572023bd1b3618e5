"""Mistakes of porting: our definition with one of them, and whether it computes what the other model does."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import attention_models as models
from attention_conformance.models.records import Place
from attention_conformance.models.sides import Side
from attention_conformance.problem import NumpyArray
from attention_core import layers, scaled_dot_product_attention
from attention_core.functions import linear
from attention_core.layers import named_arrays, tree_from_names
from attention_core.weights import record_attention

SETTINGS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("kind-of-gelu", "activation", ("gelu", "gelu_tanh", "relu", "silu")),
    ("epsilon", "epsilon", (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)),
    ("norm-first", "norm_first", (True, False)),
    ("mask-sense", "is_causal", (True, False)),
    ("rotary-pairs", "interleaved", (True, False)),
    ("rotary-base", "rotary_base", (None, 1e4, 1e5, 5e5, 1e6)),
    ("window", "window", (None,)),
    ("softcap", "softcap", (None,)),
)
"""Mistakes by the name of a setting, and what it may be instead."""

SCALES = {"1": 0.5, "1/D": -0.5, "1/√D, twice": -0.5}
"""Wrong scales, and the power of D that they are away from 1/√D."""

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.dtype(np.float16)}
EXPLAINED = 0.9
"""The share of the squared difference from which on a mistake is told that leaves more than the bound."""

Inputs = Mapping[str, NumpyArray]


class Cause(NamedTuple):
    """Why two models part, as a name and in words."""

    name: str
    says: str


# --- weights ---


def causes_of_weights(sides: Sequence[Side]) -> tuple[list[tuple[str, str]], int, list[Cause]]:
    """What is told of weights that differ, the number of those with the same bits, and the causes.

    They are compared by name where both sides have the names of this project. Of others, a weight is looked for among
    all of the other side: as it is, transposed, or as a third of a larger one.
    """
    first, second = (each.weights() for each in sides)
    if not all(each.definitions for each in sides):
        held = {_bits(each) for array in second.values() for each in _readings(array)}
        lost = [name for name, array in first.items() if _bits(array) not in held]
        return [(name, "the second has no array of these numbers") for name in lost], len(first) - len(lost), []
    found = {name: _unlike(name, first.get(name), second.get(name), sides[0]) for name in {**first, **second}}
    told = {name: each for name, each in found.items() if each is not None}
    causes = [Cause(each.name, f"{name}: {each.says}") for name, each in told.items() if each.name]
    return [(name, each.says) for name, each in told.items()], len(found) - len(told), causes


def _bits(array: NumpyArray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _readings(array: NumpyArray) -> Iterator[NumpyArray]:
    thirds = [
        part for axis in range(array.ndim) if array.shape[axis] % 3 == 0 for part in np.split(array, 3, axis=axis)
    ]
    for each in (array, *thirds):
        yield from (each, each.reshape(len(each), -1).T, each.reshape(-1, each.shape[-1]).T) if each.ndim else (each,)


def _unlike(name: str, first: NumpyArray | None, second: NumpyArray | None, side: Side) -> Cause | None:
    """How a weight differs; a cause without a name is none of those that are known."""
    if first is None or second is None:
        lacks = "second" if second is None else "first"
        return Cause("missing-bias" if name.endswith("bias") else "", f"the {lacks} has none")
    if (first.shape, first.dtype, _bits(first)) == (second.shape, second.dtype, _bits(second)):
        return None
    wide = [each.astype(np.float64) for each in (first, second)]
    if first.ndim == 2 and first.shape == second.shape[::-1] and np.array_equal(wide[0], wide[1].T):
        return Cause("transposed-weight", "one is the other transposed")
    if first.shape != second.shape:
        return Cause("", f"{first.shape} and {second.shape}")
    if name.endswith("bias") and not (wide[0].any() and wide[1].any()):
        return Cause("missing-bias", "one is 0 everywhere")
    for kind, narrow in NARROW.items():
        if any(np.array_equal(wide[at].astype(narrow).astype(np.float64), wide[1 - at]) for at in (0, 1)):
            return Cause("dtype", f"one is the other rounded to {kind}")
    count = _heads_of(side.definitions[-1], name)
    for axis in [each for each in range(first.ndim) if first.shape[each] % count == 0]:
        if any(np.array_equal(np.take(wide[0], each, axis), wide[1]) for each in _orders(first.shape[axis], count)):
            return Cause("head-order", "one has the channels of its heads in another order")
    return Cause("", f"{first.dtype} and {second.dtype}; the largest difference is {abs(wide[0] - wide[1]).max():.3g}")


def _heads_of(definition: Any, name: str) -> int:
    """The number of heads of the channels of a map."""
    count = getattr(definition, "num_heads", 1)
    return (
        (getattr(definition, "num_key_value_heads", None) or count) if {"key", "value"} & {*name.split(".")} else count
    )


def _orders(width: int, heads: int) -> list[NumpyArray]:
    """Channels (H, D) read as (D, H), and back; halves of heads read as pairs, and back."""
    whole = np.arange(width)
    found: list[NumpyArray] = [whole.reshape(-1, heads).T, whole.reshape(heads, -1).T]
    if width // heads % 2 == 0:
        found += [whole.reshape(heads, *dims).swapaxes(1, 2) for dims in ((2, -1), (-1, 2))]
    return [each.reshape(-1) for each in found]


# --- types ---


def dtype_cause(first: NumpyArray, second: NumpyArray, name: str) -> list[Cause]:
    """Whether one of two results has a narrower type, or numbers of one."""
    kinds = [_kind(each) for each in (first, second)]
    return [] if kinds[0] == kinds[1] else [Cause("dtype", f"{name}: numbers of {kinds[0]} and of {kinds[1]}")]


def _kind(array: NumpyArray) -> str:
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):
        narrow = [name for name, kind in NARROW.items() if np.array_equal(wide.astype(kind).astype(np.float64), wide)]
    return narrow[0] if narrow else str(array.dtype.name)


# --- layers ---


class Stage(NamedTuple):
    """A layer as it is called: its definition, its parameters, its input and its options."""

    definition: Any
    parameters: Any
    x: NumpyArray
    options: dict[str, Any]

    def output(self) -> NumpyArray:
        """What NumPy computes."""
        with np.errstate(all="ignore"):
            return np.asarray(self.definition(self.parameters, self.x, **self.options))

    @property
    def named(self) -> dict[str, NumpyArray]:
        """The parameters by name, without those of cross-attention."""
        return {name: each for name, each in named_arrays(self.parameters).items() if "cross" not in name}

    def with_arrays(self, changed: Mapping[str, NumpyArray]) -> Stage:
        """The stage with other parameters of the same shapes."""
        arrays = named_arrays(self.parameters) | dict(changed)
        return self._replace(parameters=tree_from_names(self.parameters, arrays))


def mistake_of(
    side: Side,
    inputs: Inputs,
    places: Sequence[Place],
    others: Sequence[NumpyArray],
    name: str,
    clear: Callable[[NumpyArray], NumpyArray],
    ulps: Callable[[NumpyArray, NumpyArray], float],
    *,
    bound: float,
) -> list[Cause]:
    """The mistake with which a definition computes results of another model, from the layer on in which the two part.

    The side and the places have the definition and what it computed, and the others are results of the other model. The
    name is that of the place that left the bound. Two callables clear padding from a result, and measure distances.
    """
    found = list[tuple[float, float, Cause]]()
    for stage in _stages(side, inputs, places, name) if side.definitions else ():
        expected = clear(stage.output())
        targets = [each for each in others if each.shape == expected.shape]
        parted = min((distance(each, expected) for each in targets), default=0.0)
        if not parted or min(ulps(each, expected) for each in targets) <= bound:  # they do not part here
            continue
        for cause, changed in _mistakes(stage):
            output = clear(changed.output())
            nearest = min(targets, key=lambda each: distance(each, output))
            off, share = ulps(nearest, output), 1 - (distance(nearest, output) / parted) ** 2
            if off <= bound or share >= EXPLAINED:
                says = "then all numbers are within the bound" if off <= bound else f"this explains {share:.1%}"
                found.append((off, -share, cause._replace(says=f"{cause.says}: {says}")))
        if found:
            return [min(found, key=lambda each: each[:2])[2]]
    return []


def distance(first: NumpyArray, second: NumpyArray) -> float:
    """The norm of a difference."""
    with np.errstate(all="ignore"):
        found = float(np.linalg.norm(first.astype(np.float64) - second.astype(np.float64)))
    return found if math.isfinite(found) else math.inf


def _stages(side: Side, inputs: Inputs, places: Sequence[Place], name: str) -> Iterator[Stage]:
    """The layer in which a place is, called as it was; and the whole, if it is small."""
    arrays, names = {each.name: each.array for each in places}, [each.name for each in places]
    whole, x = side.definitions[0], next(inputs[each] for each in ("token_ids", "x", "query") if each in inputs)

    def stage(definition: Any, parameters: Any, x: NumpyArray) -> Stage:
        known = inspect.signature(type(definition).__call__).parameters
        options = {
            each: inputs[each] for each in ("key_mask", "mask", "position_ids") if each in inputs and each in known
        }
        return Stage(definition, parameters, x, options)

    behind = [each.split(".")[1] for each in names[names.index(name) :] if each.startswith("layers.")]
    index = int(behind[0]) if behind and name != "embeddings" else 0
    before = arrays.get(f"layers.{index - 1}" if index else "embeddings")
    if behind and name != "embeddings" and before is not None:
        if isinstance(whole, models.Decoder):
            definition = replace(whole.layer, window=whole.windows[index])
            yield stage(definition, side.parameters[0].layers[index], before)
        else:
            yield stage(side.definitions[index + 1], side.parameters[index + 1], before)
    elif not isinstance(whole, models.Decoder):
        yield stage(whole, side.parameters[0], x)
    if isinstance(whole, models.Decoder) and x.size * whole.channels <= 2**16:
        yield stage(whole, side.parameters[0], x)


def _mistakes(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """Every stage with one mistake."""
    for cause, name, values in SETTINGS:
        for value in values:
            before = getattr(stage.definition, name, value)
            if before != value:
                changed = replace(stage.definition, **{name: value})
                yield Cause(cause, f"{name} {before} and {value}"), stage._replace(definition=changed)
    for name in ("key_mask", "mask"):
        if name in stage.options:
            others = {each: array for each, array in stage.options.items() if each != name}
            yield Cause("mask-sense", f"{name} inverted"), stage._replace(options=others | {name: ~stage.options[name]})
            yield Cause("mask-dropped", f"{name} left out"), stage._replace(options=others)
    if hasattr(stage.definition, "num_heads"):
        yield from _heads(stage)
    if isinstance(stage.definition, layers.EncoderLayer | layers.DecoderLayer):
        yield from _calls(stage)
    yield from _weights(stage)


def _heads(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """Scales of the scores, and other orders of the channels of heads."""
    named, heads = stage.named, stage.definition.num_heads
    maps = {name: each for name, each in named.items() if name.endswith((".weight", ".bias")) and "norm" not in name}
    queries = {name: each for name, each in maps.items() if "query" in name.split(".")}
    normal = {name: each for name, each in named.items() if name == "query_norm"}
    width = next(iter(queries.values())).shape[-1] // heads
    for says, power in SCALES.items():
        factor = {name: each * each.dtype.type(width**power) for name, each in (normal or queries).items()}
        yield Cause("scale", f"the scale {says}, and not 1/√D"), stage.with_arrays(factor)
    inside = {name: each for name, each in maps.items() if {"query", "key", "value"} & {*name.split(".")}}
    output = {name: each for name, each in maps.items() if name.endswith("output.weight")}
    for turn, says in enumerate(("(D, H), and not (H, D)", "(H, D), and not (D, H)")):
        turned = {
            name: np.take(each, _orders(each.shape[-1], _heads_of(stage.definition, name))[turn], -1)
            for name, each in inside.items()
        }
        back = {name: np.take(each, _orders(len(each), heads)[turn], 0) for name, each in output.items()}
        for part, changed in (("query, key and value", turned), ("output", back), ("all maps", turned | back)):
            if changed:
                yield Cause("head-order", f"channels of heads as {says}, of {part}"), stage.with_arrays(changed)
    groups = _heads_of(stage.definition, "key")
    if 1 < groups < heads:
        order = np.arange(heads * width).reshape(-1, groups, width).swapaxes(0, 1).reshape(-1)
        apart = {name: np.take(each, order, 0 if name in output else -1) for name, each in (queries | output).items()}
        yield Cause("head-order", "heads that share a key are apart, and not neighbours"), stage.with_arrays(apart)


def _calls(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """Attention that is computed or joined in another way, by a hook in its place."""
    scale = getattr(stage.definition, "scale", None)

    def with_heads(output: Callable[[Any], NumpyArray], axes: tuple[int, int]) -> Stage:
        def hook(name: str, function: Callable[[NumpyArray], Any], h: NumpyArray) -> Any:
            with record_attention() as calls:
                y = function(h)
            if name != "attention":
                return y
            found = np.swapaxes(output(calls[0]), *axes)
            return linear(stage.parameters.attention.output, np.ascontiguousarray(found).reshape(*h.shape[:-1], -1))

        return stage._replace(options=stage.options | {"hook": hook})

    def all_keys(call: Any) -> NumpyArray:
        return np.asarray(scaled_dot_product_attention(call.query, call.key, call.value, scale=scale))

    if isinstance(stage.definition, layers.DecoderLayer):
        yield Cause("mask-sense", "no causal mask"), with_heads(all_keys, (-2, -3))
    yield (
        Cause("head-order", "heads joined before the positions, and not behind"),
        with_heads(lambda call: call.output(), (0, 0)),
    )


def _weights(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """Weights transposed, biases left out: one, those of a kind, or all."""
    square = {name: each.T for name, each in stage.named.items() if each.ndim == 2 and len(each) == each.shape[1]}
    zeros = {
        name: np.zeros_like(each)
        for name, each in stage.named.items()
        if name.endswith(("bias", "offset")) and each.any()
    }
    for cause, says, changed in (("transposed-weight", "transposed", square), ("missing-bias", "left out", zeros)):
        for name, array in changed.items():
            yield Cause(cause, f"{name} {says}"), stage.with_arrays({name: array})
        inside = {name: each for name, each in changed.items() if {"query", "key", "value"} & {*name.split(".")}}
        for part, some in (("query, key and value", inside), ("all maps", changed)):
            if len(some) > 1:
                yield Cause(cause, f"those of {part} {says}"), stage.with_arrays(some)
