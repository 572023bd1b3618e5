"""Mistakes of porting: our definition with one of them, and whether it computes what the other model does."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from attention_conformance.models.records import Place
from attention_conformance.models.sides import Side
from attention_conformance.problem import NumpyArray
from attention_core import layers, scaled_dot_product_attention
from attention_core.functions import linear
from attention_core.layers import named_arrays, tree_from_names
from attention_core.layouts import LayoutError
from attention_core.weights import record_attention

__all__ = ["Cause", "causes_of_weights", "dtype_cause", "mistake_of"]

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
EPSILONS = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.dtype(np.float16)}
EXPLAINED = 0.9
"""The share of the squared difference from which on a mistake is told that leaves more than the bound."""

Inputs = Mapping[str, NumpyArray]


class Cause(NamedTuple):
    """Why two models part, as a name and in words."""

    name: str
    says: str


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

    def with_arrays(self, **arrays: Any) -> Stage:
        """The stage with other parameters, by name, of the same shapes."""
        named = named_arrays(self.parameters)
        return self._replace(parameters=tree_from_names(self.parameters, named | arrays))


# --- weights ---


def causes_of_weights(
    first: Mapping[str, NumpyArray], second: Mapping[str, NumpyArray], sides: Sequence[Side]
) -> tuple[list[tuple[str, str]], int, list[Cause]]:
    """What is told of weights that differ, the number of those with the same bits, and the causes.

    They are compared by name where both sides have the names of this project. Of others, a weight is looked for among
    all of the other side, as it is or transposed.
    """
    if not (sides[0].definitions and sides[1].definitions):
        held = {_content(each) for array in second.values() for each in _readings(array)}
        lost = [name for name, array in first.items() if _content(array) not in held]
        return [(name, "the second has no array of these numbers") for name in lost], len(first) - len(lost), []
    told, same, causes = list[tuple[str, str]](), 0, list[Cause]()
    for name in dict.fromkeys((*first, *second)):
        pair = first.get(name), second.get(name)
        found = _unlike_weights(name, *pair, _heads_of(sides[0], name))
        same += found is None
        if found is not None:
            told.append((name, found.says))
            causes += [Cause(found.name, f"{name}: {found.says}")] if found.name else []
    return told, same, causes


def _content(array: NumpyArray) -> tuple[int, bytes]:
    return array.size, np.ascontiguousarray(array.reshape(-1)).tobytes()


def _readings(array: NumpyArray) -> Iterator[NumpyArray]:
    """An array as it is, transposed, and its thirds along the first and the last axis, as of a fused projection."""
    parts = [array, *(part for axis in {0, array.ndim - 1} if array.ndim and array.shape[axis] % 3 == 0
                      for part in np.split(array, 3, axis=axis))]  # fmt: skip
    for each in parts:
        yield each
        if each.ndim > 1:
            yield each.reshape(each.shape[0], -1).T
            yield each.reshape(-1, each.shape[-1]).T


def _heads_of(side: Side, name: str) -> int:
    definition = side.definitions[-1]
    is_key = name.rpartition(".")[0].endswith(("attention.key", "attention.value", "key", "value"))
    count = getattr(definition, "num_key_value_heads", None) if is_key else None
    return count or getattr(definition, "num_heads", 1)


def _unlike_weights(name: str, first: NumpyArray | None, second: NumpyArray | None, heads: int) -> Cause | None:
    """How a weight differs; a cause without a name is none of those that are known."""
    if first is None or second is None:
        lacks = "second" if second is None else "first"
        return Cause("missing-bias" if name.endswith("bias") else "", f"the {lacks} has none")
    if first.shape != second.shape:
        turned = first.shape == second.shape[::-1]
        return Cause("transposed-weight" if turned else "", f"{first.shape} and {second.shape}")
    if first.dtype == second.dtype and first.tobytes() == second.tobytes():
        return None
    wide = [each.astype(np.float64) for each in (first, second)]
    if first.ndim == 2 and np.array_equal(wide[0], wide[1].T):
        return Cause("transposed-weight", "one is the other transposed")
    if not wide[1].any() or not wide[0].any():
        return Cause("missing-bias" if first.ndim == 1 else "", "one is 0 everywhere")
    for kind, narrow in NARROW.items():
        rounded = [each.astype(narrow).astype(np.float64) for each in wide]
        if np.array_equal(rounded[0], wide[1]) or np.array_equal(rounded[1], wide[0]):
            return Cause("dtype", f"one is the other rounded to {kind}")
    if first.dtype != second.dtype and np.array_equal(*wide):
        return Cause("", f"the same numbers in {first.dtype} and {second.dtype}")
    for axis in range(first.ndim):
        if first.shape[axis] % heads == 0 and any(
            np.array_equal(np.take(wide[0], order, axis=axis), wide[1]) for order in _orders(first.shape[axis], heads)
        ):
            return Cause("head-order", "one has the channels of its heads in another order")
    return Cause("", f"the largest difference is {np.abs(wide[0] - wide[1]).max():.3g}")


def _orders(width: int, heads: int) -> list[NumpyArray]:
    """Channels (heads, width) read as (width, heads), and back; halves of heads read as pairs, and back."""
    whole = np.arange(width)
    dim = width // heads
    found = [whole.reshape(heads, dim).T.reshape(-1), whole.reshape(dim, heads).T.reshape(-1)]
    if dim % 2 == 0:
        split = whole.reshape(heads, 2, dim // 2)
        found += [split.swapaxes(1, 2).reshape(-1), whole.reshape(heads, dim // 2, 2).swapaxes(1, 2).reshape(-1)]
    return found


# --- types ---


def dtype_cause(places: Sequence[Place], others: Mapping[str, NumpyArray], row: Any) -> list[Cause]:
    """Whether one of two results has a narrower type, or numbers of one."""
    if not row.other:
        return []
    first = next(each.array for each in places if each.name == row.name)
    second = others[row.other.removeprefix("≈ ")]
    kinds = [_kind(each) for each in (first, second)]
    return [] if kinds[0] == kinds[1] else [Cause("dtype", f"{row.name}: numbers of {kinds[0]} and of {kinds[1]}")]


def _kind(array: NumpyArray) -> str:
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):
        narrow = [name for name, kind in NARROW.items() if np.array_equal(wide.astype(kind).astype(np.float64), wide)]
    return narrow[0] if narrow else str(array.dtype.name)


# --- layers ---


def mistake_of(
    sides: Sequence[Side],
    inputs: Inputs,
    places: Sequence[list[Place]],
    name: str,
    real: Callable[[NumpyArray], NumpyArray],
    ulps: Callable[[NumpyArray, NumpyArray], float],
    bound: float,
) -> list[Cause]:
    """The mistake with which the definition of one side computes what the other side did, in the layer that parts.

    ``real`` clears the padding of a result, and ``ulps`` is the distance of two results.
    """
    order = (0, 1) if sides[0].definitions else (1, 0)
    side, (ours, theirs) = sides[order[0]], (places[each] for each in order)
    if not side.definitions:
        return []
    best: tuple[float, float, Cause] | None = None
    for stage in _stages(side, inputs, ours, name):
        expected = real(stage.output())
        targets = [real(each.array) for each in theirs if each.array.shape == expected.shape and not each.is_heads]
        if not targets:
            continue
        target = min(targets, key=lambda each: _norm(each - expected))
        whole = _norm(target - expected)
        if ulps(target, expected) <= bound:  # here they do not part
            continue
        for cause, changed in mistakes(stage):
            try:
                found = real(changed.output())
            except (TypeError, ValueError, LayoutError):
                continue
            nearest = min(targets, key=lambda each: _norm(each - found))
            share = 1 - (_norm(nearest - found) / whole) ** 2 if whole else 0.0
            distance = ulps(nearest, found)
            if (distance <= bound or share >= EXPLAINED) and (best is None or (distance, -share) < best[:2]):
                says = "then all numbers are within the bound" if distance <= bound else f"this explains {share:.1%}"
                best = distance, -share, cause._replace(says=f"{cause.says}: {says}")
        if best is not None:
            break
    return [] if best is None else [best[2]]


def _norm(array: NumpyArray) -> float:
    with np.errstate(all="ignore"):
        found = float(np.linalg.norm(array.astype(np.float64)))
    return found if math.isfinite(found) else math.inf


def _stages(side: Side, inputs: Inputs, places: Sequence[Place], name: str) -> Iterator[Stage]:
    """The layer in which a place is, called as it was; then the whole, if it is one layer or small."""
    arrays = {each.name: each.array for each in places}
    options: dict[str, Any] = {each: inputs[each] for each in ("key_mask", "mask", "position_ids") if each in inputs}
    x = next(inputs[each] for each in ("token_ids", "x", "query") if each in inputs)
    index = _layer_of(name, places)
    if len(side.definitions) == 1 and not isinstance(side.definitions[0], layers.Decoder):
        yield Stage(side.definitions[0], side.parameters[0], x, _taken(side.definitions[0], options))
    elif index is not None and f"layers.{index}" in arrays:
        before = arrays.get(f"layers.{index - 1}" if index else "embeddings")
        if before is not None:
            definition, parameters = _layer(side, index)
            yield Stage(definition, parameters, before, _taken(definition, options))
    if isinstance(side.definitions[0], layers.Decoder) and x.size * side.definitions[0].channels <= 2**16:
        yield Stage(side.definitions[0], side.parameters[0], x, _taken(side.definitions[0], options))
    if isinstance(side.definitions[0], layers.Embeddings) and name == "embeddings":
        yield Stage(side.definitions[0], side.parameters[0], x, {})


def _taken(definition: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(type(definition).__call__).parameters
    return {name: each for name, each in options.items() if name in known}


def _layer_of(name: str, places: Sequence[Place]) -> int | None:
    """The layer of a place, or of the place of a layer behind it."""
    names = [each.name for each in places]
    behind = [each for each in names[names.index(name) :] if each.startswith("layers.")]
    return int(behind[0].split(".")[1]) if behind else None


def _layer(side: Side, index: int) -> tuple[Any, Any]:
    whole = side.definitions[0]
    if not isinstance(whole, layers.Decoder):
        return side.definitions[index + 1], side.parameters[index + 1]
    return replace(whole.layer, window=whole.windows[index]), side.parameters[0].layers[index]


def mistakes(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """Every stage with one mistake."""
    yield from _settings(stage)
    yield from _masks(stage)
    if hasattr(stage.definition, "num_heads"):
        yield from _scales(stage)
        yield from _heads(stage)
    if isinstance(stage.definition, layers.EncoderLayer | layers.DecoderLayer):
        yield from _calls(stage)
    yield from _weights(stage)


def _calls(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """The heads of attention computed or joined in another way, by a hook in the place of attention."""
    heads, attention = stage.definition.num_heads, stage.parameters.attention
    scale = {} if getattr(stage.definition, "scale", None) is None else {"scale": stage.definition.scale}

    def with_output(output: Callable[[Any], NumpyArray]) -> Stage:
        def hook(name: str, function: Callable[[NumpyArray], Any], h: NumpyArray) -> Any:
            if name != "attention":
                return function(h)
            with record_attention() as calls:
                function(h)
            found = output(calls[0])
            return linear(attention.output, found)

        return stage._replace(options=stage.options | {"hook": hook})

    def joined(output: NumpyArray) -> NumpyArray:
        found = np.swapaxes(output, -2, -3)
        return np.ascontiguousarray(found).reshape(*found.shape[:-2], -1)

    def all_keys(call: Any) -> NumpyArray:
        return joined(scaled_dot_product_attention(call.query, call.key, call.value, **scale))

    def scrambled(call: Any) -> NumpyArray:
        output = call.output()
        return np.ascontiguousarray(output).reshape(*output.shape[:-3], output.shape[-2], -1)

    if isinstance(stage.definition, layers.DecoderLayer):
        yield Cause("mask-sense", "no causal mask"), with_output(all_keys)
    if heads > 1:
        yield Cause("head-order", "heads joined without their axis behind the positions"), with_output(scrambled)


def _settings(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    definition = stage.definition
    changes: list[tuple[str, str, Any]] = []
    changes += [("activation", "kind of activation", each) for each in ACTIVATIONS]
    changes += [("epsilon", "epsilon", each) for each in EPSILONS]
    changes += [("norm_first", "normalization first", each) for each in (True, False)]
    changes += [("is_causal", "causal mask", each) for each in (True, False)]
    changes += [("interleaved", "rotary pairs of neighbours, and not halves", each) for each in (True, False)]
    changes += [("rotary_base", "base of rotary positions", each) for each in (None, 1e4, 1e5, 5e5, 1e6)]
    changes += [("window", "window", None), ("softcap", "softcap", None)]
    names = {"activation": "kind-of-gelu", "interleaved": "rotary-pairs", "is_causal": "mask-sense"}
    for name, says, value in changes:
        before = getattr(definition, name, value) if hasattr(type(definition), name) or name in vars(definition) else value
        if before != value:
            cause = Cause(names.get(name, name.replace("_", "-")), f"{says}: {before} and {value}")
            yield cause, stage._replace(definition=replace(definition, **{name: value}))


def _masks(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    for name in ("key_mask", "mask"):
        if name in stage.options:
            others = {each: array for each, array in stage.options.items() if each != name}
            yield Cause("mask-sense", f"{name} inverted"), stage._replace(options=others | {name: ~stage.options[name]})
            yield Cause("mask-dropped", f"{name} left out"), stage._replace(options=others)


def _scales(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """Scores times a factor, by the map of the query or the scale of its normalization."""
    named = named_arrays(stage.parameters)
    width = _query(named).shape[1] // stage.definition.num_heads
    factors = {
        "1, and not 1/√D": width**0.5,
        "1/D, and not 1/√D": width**-0.5,
        "1/√(H D), and not 1/√D": stage.definition.num_heads**-0.5,
        "1/√D twice": width**-0.5,
    }
    names = [name for name in named if name == "query_norm"]
    names = names or [name for name in named if name.endswith(("query.weight", "query.bias")) and "cross" not in name]
    for says, factor in factors.items():
        yield Cause("scale", says), stage.with_arrays(
            **{name: named[name] * named[name].dtype.type(factor) for name in names}
        )


def _query(named: Mapping[str, NumpyArray]) -> NumpyArray:
    return next(array for name, array in named.items() if name.endswith("query.weight"))


def _heads(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """Channels of heads in another order, of query, key and value, and with the output."""
    named, heads = named_arrays(stage.parameters), stage.definition.num_heads
    groups = getattr(stage.definition, "num_key_value_heads", None) or heads
    at = {name: each for name, each in named.items() if "cross" not in name and "norm" not in name}
    for says, turn in (("(D, H), and not (H, D)", 0), ("(H, D), and not (D, H)", 1)):
        changed: dict[str, Any] = {}
        for part, count in (("query", heads), ("key", groups), ("value", groups)):
            for name in at:
                if name.endswith((f"{part}.weight", f"{part}.bias")):
                    order = _orders(at[name].shape[-1], count)[turn]
                    changed[name] = np.take(at[name], order, axis=-1)
        yield Cause("head-order", f"channels of heads: {says}"), stage.with_arrays(**changed)
        for name in at:
            if name in ("output.weight", "attention.output.weight"):
                order = _orders(at[name].shape[0], heads)[turn]
                both = changed | {name: np.take(at[name], order, axis=0)}
                yield Cause("head-order", f"channels of heads and of their output: {says}"), stage.with_arrays(**both)
                yield Cause("head-order", f"rows of the output: {says}"), stage.with_arrays(**{name: both[name]})
    if 1 < groups < heads:
        yield from _grouped(stage, at, heads, groups)


def _grouped(stage: Stage, at: Mapping[str, NumpyArray], heads: int, groups: int) -> Iterator[tuple[Cause, Stage]]:
    """Query heads that share keys: neighbours, or those that are apart."""
    changed: dict[str, Any] = {}
    for name, array in at.items():
        axis = -1 if name.endswith(("query.weight", "query.bias")) else 0 if name.endswith("output.weight") else None
        if axis is not None:
            blocks = np.arange(array.shape[axis]).reshape(groups, heads // groups, -1)
            changed[name] = np.take(array, blocks.swapaxes(0, 1).reshape(-1), axis=axis)
            blocks = np.arange(array.shape[axis]).reshape(heads // groups, groups, -1)
            changed[name] = np.take(array, blocks.swapaxes(0, 1).reshape(-1), axis=axis)
    yield Cause("head-order", "query heads that share a key: apart, and not neighbours"), stage.with_arrays(**changed)


def _weights(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    named = named_arrays(stage.parameters)
    for name, array in named.items():
        if name.endswith("weight") and array.ndim == 2 and array.shape[0] == array.shape[1]:
            yield Cause("transposed-weight", f"{name} transposed"), stage.with_arrays(**{name: array.T})
        if name.endswith(("bias", "offset")) and array.any():
            yield Cause("missing-bias", f"{name} left out"), stage.with_arrays(**{name: np.zeros_like(array)})
    biases = {name: np.zeros_like(each) for name, each in named.items() if name.endswith("bias") and each.any()}
    for says, part in (("query, key and value", ("query.bias", "key.bias", "value.bias")), ("all maps", ("bias",))):
        some = {name: each for name, each in biases.items() if name.endswith(part)}
        if len(some) > 1:
            yield Cause("missing-bias", f"biases of {says} left out"), stage.with_arrays(**some)
    turned = {name: each.T for name, each in named.items()
              if name.endswith("weight") and each.ndim == 2 and each.shape[0] == each.shape[1]}  # fmt: skip
    if len(turned) > 1:
        yield Cause("transposed-weight", "all square weights transposed"), stage.with_arrays(**turned)
