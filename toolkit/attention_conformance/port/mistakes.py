"""Mistakes of porting: our definition with one of them, and whether it computes what the other model does."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import attention_models as models
from attention_conformance.oracle.ulps import Difference, difference
from attention_conformance.port.records import Place, record
from attention_conformance.port.sides import Side, place_of
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
    ("embedding-scale", "embedding_scale", (None, lambda each: math.sqrt(each.channels))),
    ("window", "window", (None,)),
    ("softcap", "softcap", (None,)),
)
"""Mistakes by the name of a setting, and what it may be instead; functions are of the definition."""

SCALES = {"1": 0.5, "1/D": -0.5, "1/√D, twice": -0.5}
"""Wrong scales, and the power of D that they are away from 1/√D."""

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.dtype(np.float16)}
EXPLAINED = 0.99
"""The share of the squared difference from which on a mistake is reported that leaves more than the bound."""

MOST_NUMBERS = 2**16
"""Inputs times channels up to which a whole model is computed with each mistake."""

Inputs = Mapping[str, NumpyArray]


class Cause(NamedTuple):
    """Why two models differ, as a name and in words."""

    name: str
    says: str


# --- weights ---


def causes_of_weights(sides: Sequence[Side]) -> tuple[list[tuple[str, str]], int, list[Cause]]:
    """What is reported of weights that differ, the number of those with the same bits, and the causes.

    They are compared by name where both sides have the names of this project. Of others, a weight is looked for among
    all of the other side: as it is, transposed, or as a third of a larger one.
    """
    first, second = (each.weights() for each in sides)
    if not all(each.definitions for each in sides):
        held = {_bits(each) for array in second.values() for each in _readings(array)}
        lost = [name for name, array in first.items() if _bits(array) not in held]
        return [(name, "the second has no array of these numbers") for name in lost], len(first) - len(lost), []
    compared = {name: _unlike(name, first.get(name), second.get(name), sides[0]) for name in {**first, **second}}
    unlike = {name: each for name, each in compared.items() if each is not None}
    for name in [each for each in unlike if "query" in each.split(".")]:
        other = name.replace("query", "key")
        if name in first and other in second and _bits(first[name]) == _bits(second[other]):
            unlike |= dict.fromkeys((name, other), Cause("query-key-swapped", f"one is the other's {other}"))
    causes = [Cause(each.name, f"{name}: {each.says}") for name, each in unlike.items() if each.name]
    return [(name, each.says) for name, each in unlike.items()], len(compared) - len(unlike), causes


def _bits(array: NumpyArray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _readings(array: NumpyArray) -> Iterator[NumpyArray]:
    thirds = [
        part for axis in range(array.ndim) if array.shape[axis] % 3 == 0 for part in np.split(array, 3, axis=axis)
    ]
    for part in (array, *thirds):
        yield from (part, part.reshape(len(part), -1).T, part.reshape(-1, part.shape[-1]).T) if part.ndim else (part,)


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
    for by in (1, 2) if name.split(".")[-1] == "position" else ():
        if any(np.array_equal(wide[at][by:], wide[1 - at][:-by]) for at in (0, 1)):
            return Cause("positions", f"one is the other from position {by} on")
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
    orders: list[NumpyArray] = [whole.reshape(-1, heads).T, whole.reshape(heads, -1).T]
    if width // heads % 2 == 0:
        orders += [whole.reshape(heads, *dims).swapaxes(1, 2) for dims in ((2, -1), (-1, 2))]
    return [each.reshape(-1) for each in orders]


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
    """Layers one behind the other, as they are called: all of a model, or the one of a name.

    ``twist`` stands for attention.
    """

    definitions: tuple[Any, ...]
    parameters: tuple[Any, ...]
    inputs: Inputs
    name: str = ""
    twist: Callable[[Any, Any, NumpyArray], NumpyArray] | None = None

    def places(self) -> list[Place]:
        """What NumPy computes on the way."""
        modules = tuple(map(self._module, self.definitions, self.parameters))
        with np.errstate(all="ignore"):
            return record(Side("", "numpy", modules, True, self.definitions, self.parameters), self.inputs)

    def _module(self, definition: Any, tree: Any) -> Callable[..., Any]:
        def run(x: Any, hook: Any = None, **options: Any) -> Any:
            def call(name: str, function: Any, h: Any) -> Any:
                *at, last = name.split(".")
                if self.twist is None or last != "attention":
                    return hook(name, function, h)
                layer = tree.layers[int(at[1])] if at else tree
                return hook(name, lambda h: self.twist(layer, function, h), h)

            return definition(tree, x, **(options if hook is None else options | {"hook": call}))

        return run

    @property
    def named(self) -> dict[str, NumpyArray]:
        """The parameters by name, without those of cross-attention."""
        return {name: each for name, each in named_arrays(self.parameters).items() if "cross" not in name}

    def full_name(self, name: str) -> str:
        """A parameter by its name in the model."""
        index, _, rest = name.partition(".")
        return f"{place_of(int(index)) if len(self.definitions) > 1 else self.name}.{rest}".removeprefix(".")

    def with_arrays(self, changed: Inputs) -> Stage:
        """The stage with other parameters of the same shapes."""
        arrays = named_arrays(self.parameters) | dict(changed)
        return self._replace(parameters=tree_from_names(self.parameters, arrays))


def mistake_of(
    side: Side,
    inputs: Inputs,
    places: Sequence[Place],
    targets: Callable[[str, NumpyArray], list[NumpyArray]],
    bounds: Mapping[str, float],
    name: str,
) -> list[Cause]:
    """The mistake with which a definition computes the results of another model, in one layer or in all of them.

    A mistake has to explain the first place that left its bound, which has this ``name``. Of several, in the layer and
    in all, it is the one that explains the end, or is nearest at the end of the layer. The side has the
    definition, and ``places`` what it computed. ``targets`` are the results of the other model that one of ours may be.
    """
    best, end = list[tuple[bool, float, Cause]](), ""
    for stage, names in _stages(side, inputs, places, name) if side.definitions else ():
        before, end = {each.name: each.cleared(inputs).array for each in stage.places()}, end or names("output")

        def nearest(numbers: Inputs, here: str, names: Callable[[str], str] = names) -> tuple[float, float]:
            """How far a place is from the other model's, as a norm and in ulp."""
            others = targets(names(here), numbers[here])
            pairs = [(distance(other, numbers[here]), ulps_of(other, numbers[here])) for other in others]
            return min(pairs, default=(math.inf, math.inf))

        first, of_layer = ([here for here in before if names(here) == each] or ["output"] for each in (name, end))
        parted, off = nearest(before, first[0])
        if off <= bounds[name] or not math.isfinite(parted):  # they do not part here
            continue
        causes = list[tuple[bool, float, Cause]]()
        for cause, changed in _mistakes(stage):
            after = {each.name: each.cleared(inputs).array for each in changed.places()}
            here = first[0] if first[0] in after else "output"
            (away, off), (_, off_last), (_, at_end) = (nearest(after, each) for each in (here, "output", of_layer[0]))
            share = 1 - (away / parted) ** 2
            if off > bounds[names(here)] and share < EXPLAINED:
                continue
            effect, is_all = f"this explains {share:.1%}", off_last <= bounds[names("output")]
            if off <= bounds[names(here)]:
                effect = "then all numbers are" if is_all else f"then {names(here)} is, and {names('output')} is not"
                effect = f"{effect} within the bound"
            causes.append((not is_all, at_end, cause._replace(says=f"{cause.says}: {effect}")))
        best += sorted(causes, key=lambda each: each[:2])[:1]
        if causes and not best[-1][0]:
            break
    return [cause for _, _, cause in sorted(best, key=lambda each: each[:2])[:1]]


def distance(first: NumpyArray, second: NumpyArray) -> float:
    """The norm of a difference."""
    with np.errstate(all="ignore"):
        norm = float(np.linalg.norm(first.astype(np.float64) - second.astype(np.float64)))
    return norm if math.isfinite(norm) else math.inf


def difference_of(first: NumpyArray, second: NumpyArray) -> Difference | None:
    """How two results differ in the wider of their types, in units of the largest number of each position."""
    wide = max((first.dtype, second.dtype), key=lambda each: ml_dtypes.finfo(each.name).nmant)
    scale = np.broadcast_to(np.abs(first.astype(np.float64)).max(axis=-1, keepdims=True), first.shape)
    return difference(first.astype(wide), second.astype(wide), scale)


def ulps_of(first: NumpyArray, second: NumpyArray) -> float:
    """How far two results lie apart at most, in these units."""
    unlike = difference_of(first, second)
    return 0.0 if unlike is None else unlike.ulps


def _stages(
    side: Side, inputs: Inputs, places: Sequence[Place], name: str
) -> Iterator[tuple[Stage, Callable[[str], str]]]:
    """The layer in which a place is, as it was called, and what names its places in the model; and the whole."""
    arrays, names = {each.name: each.array for each in places}, [each.name for each in places]
    whole = side.definitions[0]
    ends = [each for each in names if re.fullmatch(r"embeddings|layers\.\d+", each)]
    end = next((each for each in ends if names.index(each) >= names.index(name)), None)
    if end is not None and end != ends[0]:
        index, before = int(end.split(".")[1]), ends[ends.index(end) - 1]
        layer, tree = (
            (side.definitions[index + 1], side.parameters[index + 1])
            if len(side.definitions) > 1
            else (replace(whole.layer, window=whole.windows[index]), side.parameters[0].layers[index])
        )
        others = {each: array for each, array in inputs.items() if each in ("key_mask", "mask", "position_ids")}
        stage = Stage((layer,), (tree,), {"x": arrays[before], **others}, end)
        calls = sum(bool(re.fullmatch(r"attention \d+: output", each.name)) for each in stage.places())

        def in_model(local: str) -> str:
            call = re.fullmatch(r"attention (\d+): (.*)", local)
            inside = f"attention {index * calls + int(call[1])}: {call[2]}" if call else f"{end}.{local}"
            return str(end) if local == "output" else inside

        yield stage, in_model
    x = next(inputs[each] for each in ("token_ids", "x", "query") if each in inputs)
    if x.size * getattr(whole, "channels", 1) <= MOST_NUMBERS:
        yield Stage(side.definitions, side.parameters, inputs), str


def _mistakes(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """Every stage with one mistake, in all of its layers; or in one of its weights."""
    for (cause, name, values), kind in itertools.product(
        SETTINGS, dict.fromkeys([*map(type, stage.definitions), layers.Layer])
    ):
        at = [i for i, each in enumerate(stage.definitions) if isinstance(each, kind) and hasattr(each, name)]
        for value in values if at else ():
            changed, before = [*stage.definitions], getattr(stage.definitions[at[-1]], name)
            value = value(changed[at[-1]]) if callable(value) else value
            for i in at:
                changed[i] = replace(changed[i], **{name: value})
            if changed != [*stage.definitions]:
                yield Cause(cause, f"{name} {before} and {value}"), stage._replace(definitions=tuple(changed))
    for name in ("key_mask", "mask"):
        if name in stage.inputs:
            others = {each: array for each, array in stage.inputs.items() if each != name}
            yield Cause("mask-sense", f"{name} inverted"), stage._replace(inputs=others | {name: ~stage.inputs[name]})
            yield Cause("mask-dropped", f"{name} left out"), stage._replace(inputs=others)
    with_heads = [each for each in stage.definitions if hasattr(each, "num_heads")]
    if with_heads:
        yield from _heads(stage, with_heads[-1])
    if with_heads and isinstance(with_heads[-1], layers.EncoderLayer | layers.DecoderLayer | models.Decoder):
        yield from _calls(stage, with_heads[-1])
    yield from _weights(stage)


def _heads(stage: Stage, definition: Any) -> Iterator[tuple[Cause, Stage]]:
    """Scales of the scores, queries for keys, and other orders of the channels of heads."""
    named, heads = stage.named, definition.num_heads
    maps = {name: each for name, each in named.items() if name.endswith((".weight", ".bias")) and "norm" not in name}
    queries = {name: each for name, each in maps.items() if "query" in name.split(".")}
    normal = {name: each for name, each in named.items() if name.split(".")[-1] == "query_norm"}
    width = next(iter(queries.values())).shape[-1] // heads
    for says, power in SCALES.items():
        factor = {name: each * each.dtype.type(width**power) for name, each in (normal or queries).items()}
        yield Cause("scale", f"the scale {says}, and not 1/√D"), stage.with_arrays(factor)
    keys = {name: name.replace("query", "key") for name in queries}
    if all(other in maps and maps[other].shape == maps[name].shape for name, other in keys.items()):
        swapped = {name: maps[other] for name, other in (*keys.items(), *((b, a) for a, b in keys.items()))}
        yield Cause("query-key-swapped", "the map of queries is that of keys, and back"), stage.with_arrays(swapped)
    inside = {name: each for name, each in maps.items() if {"query", "key", "value"} & {*name.split(".")}}
    output = {name: each for name, each in maps.items() if name.endswith("output.weight")}
    for turn, says in enumerate(("(D, H), and not (H, D)", "(H, D), and not (D, H)")):
        turned = {
            name: np.take(each, _orders(each.shape[-1], _heads_of(definition, name))[turn], -1)
            for name, each in inside.items()
        }
        back = {name: np.take(each, _orders(len(each), heads)[turn], 0) for name, each in output.items()}
        for part, changed in (("query, key and value", turned), ("output", back), ("all maps", turned | back)):
            if changed:
                yield Cause("head-order", f"channels of heads as {says}, of {part}"), stage.with_arrays(changed)
    groups = _heads_of(definition, "key")
    if 1 < groups < heads:
        order = np.arange(heads * width).reshape(-1, groups, width).swapaxes(0, 1).reshape(-1)
        apart = {name: np.take(each, order, 0 if name in output else -1) for name, each in (queries | output).items()}
        yield Cause("head-order", "heads that share a key are apart, and not neighbours"), stage.with_arrays(apart)


def _calls(stage: Stage, definition: Any) -> Iterator[tuple[Cause, Stage]]:
    """Attention that is computed or joined in another way."""

    def with_heads(output: Callable[[Any], NumpyArray], axes: tuple[int, int]) -> Stage:
        def twist(tree: Any, function: Callable[[NumpyArray], Any], h: NumpyArray) -> NumpyArray:
            with record_attention() as calls:
                function(h)
            swapped = np.swapaxes(output(calls[0]), *axes)
            heads = np.ascontiguousarray(swapped).reshape(*h.shape[:-1], -1)
            return np.asarray(linear(tree.attention.output, heads))

        return stage._replace(twist=twist)

    def all_keys(call: Any) -> NumpyArray:
        scale = getattr(definition, "scale", None)
        return np.asarray(scaled_dot_product_attention(call.query, call.key, call.value, scale=scale))

    if not isinstance(definition, layers.EncoderLayer):
        yield Cause("mask-sense", "no causal mask"), with_heads(all_keys, (-2, -3))
    yield (
        Cause("head-order", "heads joined before the positions, and not behind"),
        with_heads(lambda call: call.output(), (0, 0)),
    )


def _weights(stage: Stage) -> Iterator[tuple[Cause, Stage]]:
    """Positions off by some; weights transposed, biases left out: one, those of a kind, or all."""
    named = stage.named
    for by in (-2, -1, 1, 2):
        tables = {name: np.roll(each, -by, 0) for name, each in named.items() if name.split(".")[-1] == "position"}
        if tables:
            yield Cause("positions", f"positions off by {by}"), stage.with_arrays(tables)
    square = {name: each.T for name, each in named.items() if each.ndim == 2 and len(each) == each.shape[1]}
    zeros = {
        name: np.zeros_like(each) for name, each in named.items() if name.endswith(("bias", "offset")) and each.any()
    }
    for cause, says, changed in (("transposed-weight", "transposed", square), ("missing-bias", "left out", zeros)):
        groups: dict[str, dict[str, NumpyArray]] = {}
        for name, array in changed.items():
            kind = ".".join(part for part in name.split(".") if not part.isdigit() and part != "layers")
            inside = ("query, key and value",) * bool({"query", "key", "value"} & {*name.split(".")})
            for group in (stage.full_name(name), f"{kind}, of all layers", *inside, "all maps"):
                groups.setdefault(group, {})[name] = array
        tried = list[set[str]]()
        for group, some in groups.items():
            if {*some} not in tried:
                tried.append({*some})
                yield Cause(cause, f"{group} {says}"), stage.with_arrays(some)
