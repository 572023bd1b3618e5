"""Two models on the same input: weights first, then place by place, head by head, and why they differ."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attention_conformance.port.mistakes import (
    Cause,
    causes_of_weights,
    difference_of,
    distance,
    dtype_cause,
    mistake_of,
    ulps_of,
)
from attention_conformance.port.records import Place, record
from attention_conformance.port.sides import ComparisonError, Side, drawn_inputs, ours, read_inputs, side_of
from attention_conformance.problem import NumpyArray
from attention_core.backend import get_backend

BOUND = 16.0
"""In units in the last place of the largest number of a position, besides what follows."""

ROUNDING = 8.0
"""How often the error of NumPy, in our definition at a place, is within the bound, too."""

UNKNOWN = 4.0
"""How much wider the bound is where no definition tells that error."""

NEAR = 0.02
"""Places without a common name are the same if the norm of their difference is below this share."""


@dataclass(frozen=True)
class WeightRow:
    """A weight that is not the same in both: what is reported of it."""

    name: str
    says: str


@dataclass(frozen=True)
class PlaceRow:
    """A place of the model whose places are known, and the place of the other that it was compared with.

    Attributes
    ----------
    name, other : str
        ``other`` has ``≈`` in front where values showed which it is, and is empty where there is none.
    ulps, bound : float
    is_heads : bool
    heads : tuple of float
        The distance of each head.
    says : str
        The share that differs, and the first elements, as hexadecimal floats.
    """

    name: str
    other: str
    ulps: float
    bound: float
    is_heads: bool = False
    heads: tuple[float, ...] = ()
    says: str = ""

    @property
    def is_within(self) -> bool:
        """Whether the distance is no more than the bound."""
        return self.ulps <= self.bound


@dataclass(frozen=True)
class Comparison:
    """How two models differ.

    Attributes
    ----------
    names : tuple of str
    versions : tuple of dict
    settings : tuple of (str, object, object)
        Those in which two definitions differ.
    weights : tuple of WeightRow
        Those that differ.
    same_weights : int
    places : tuple of PlaceRow
    causes : tuple of Cause
        What was tested and found.
    """

    names: tuple[str, str]
    versions: tuple[Mapping[str, str], Mapping[str, str]]
    settings: tuple[tuple[str, Any, Any], ...] = ()
    weights: tuple[WeightRow, ...] = ()
    same_weights: int = 0
    places: tuple[PlaceRow, ...] = ()
    causes: tuple[Cause, ...] = ()

    @property
    def first(self) -> PlaceRow | None:
        """The first place that leaves the bound."""
        return next((each for each in self.places if not each.is_within), None)

    @property
    def agrees(self) -> bool:
        """Whether all activations are within the bound."""
        return self.first is None

    def json(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        first = self.first
        places = [asdict(each) | ({} if math.isfinite(each.ulps) else {"ulps": None}) for each in self.places]
        return asdict(self) | {"places": places, "agrees": self.agrees, "first": first and first.name}


def compare(
    first: Any,
    second: Any,
    inputs: Mapping[str, NumpyArray] | str | os.PathLike[str] | None = None,
    *,
    bound: float = BOUND,
) -> Comparison:
    """Run two models or layers on the same input, each in its framework, and say where they differ, and why.

    Parameters
    ----------
    first, second : str, path-like or object
        A file of this project, a GGUF file, a folder of transformers, or a model that Keras saved. With a framework in
        front, as in ``jax:FOLDER``, the layers of this project run it there. ``file.py:name`` is a module of PyTorch,
        Keras or flax.nnx, a layer of this project, or what makes one; so is an object.
    inputs : mapping or path-like, optional
        ``token_ids`` or ``x``, and ``key_mask``, ``mask`` (True = may attend) and ``position_ids``, as arrays or as a
        file of them. By default drawn.
    bound : float
        In units in the last place of the largest number of a position. At each activation, 8 times the difference
        between NumPy in float32 and in float64 is added. If no layout knows the model, 4 times the bound is used.

    Returns
    -------
    Comparison

    Raises
    ------
    ValueError
        When a model cannot be loaded, does not take the inputs, or their outputs have other shapes.

    Examples
    --------
    >>> from attention_conformance import compare
    >>> from attention_core.layers import FeedForward
    >>> import numpy as np, tempfile
    >>> from attention_files.safetensors import save_layer
    >>> path = tempfile.mkdtemp() + "/layer.safetensors"
    >>> save_layer(path, FeedForward(4, 8), FeedForward(4, 8).init(0, xp=np))
    >>> compare(path, path).agrees
    True
    """
    for step in steps(first, second, inputs, bound=bound):
        comparison = step
    assert isinstance(comparison, Comparison)
    return comparison


def steps(first: Any, second: Any, inputs: Any = None, *, bound: float = BOUND) -> Iterator[str | Comparison]:
    """What `compare` does, in words before each step, and its result at last."""
    sides = []
    for source in (first, second):
        yield f"loading {source if isinstance(source, str | os.PathLike) else type(source).__name__}"
        sides.append(side_of(source))
    read = inputs if isinstance(inputs, Mapping | None) else read_inputs(Path(inputs))
    arrays = drawn_inputs(sides) if read is None else {name: np.asarray(each) for name, each in read.items()}
    places = []
    for side in sides:
        yield f"running {side.name}"
        places.append(record(side, arrays))
    yield "comparing"
    yield _compared(sides, arrays, places, bound)


def _compared(
    sides: Sequence[Side], inputs: Mapping[str, NumpyArray], places: Sequence[list[Place]], bound: float
) -> Comparison:
    """Compare what two models have computed."""
    outputs = [each[-1].array for each in places]
    if outputs[0].shape != outputs[1].shape:
        shapes = " and ".join(str(each.shape) for each in outputs)
        raise ComparisonError(f"expected models with outputs of one shape; got {shapes}")
    kept = [[each.cleared(inputs) for each in run] for run in places]
    listed = 1 if sides[1].definitions and not sides[0].definitions else 0  # the side whose places are listed
    errors = _errors(sides[listed], inputs)
    most = max(errors.values(), default=(UNKNOWN - 1) * bound / ROUNDING)
    bounds = {each.name: bound + ROUNDING * errors.get(each.name, most) for each in kept[listed]}
    pairs = list(_rows(kept[listed], kept[1 - listed], bounds))
    rows = _paired([row for row, _ in pairs])
    weights, same, causes = causes_of_weights(sides)
    comparison = Comparison(
        (sides[0].name, sides[1].name),
        (sides[0].versions, sides[1].versions),
        _settings(sides),
        tuple(WeightRow(*each) for each in weights),
        same,
        tuple(rows),
    )
    if comparison.first is not None:
        paired, row = {each.name: other for each, other in pairs if other is not None}, comparison.first
        if row.other:
            causes += dtype_cause(
                next(each.array for each in kept[listed] if each.name == row.name), paired[row.name], row.name
            )

        def targets(name: str, array: NumpyArray) -> list[NumpyArray]:
            """The other's results that one of ours may be: of its place, or any of its shape."""
            known = [paired[name]] if name in paired else [each.array for each in kept[1 - listed] if not each.is_heads]
            return [each for each in known if each.shape == array.shape]

        causes += mistake_of(sides[listed], inputs, places[listed], targets, bounds, row.name)
    return replace(comparison, causes=tuple(dict.fromkeys(causes)))


def _errors(side: Side, inputs: Mapping[str, NumpyArray]) -> dict[str, float]:
    """By how many ulp NumPy in float32 misses float64 at each place of a definition: about as many in other types."""
    if not side.definitions:
        return {}

    def places(dtype: str) -> list[Place]:
        arrays, trees = get_backend("numpy").from_numpy((dict(inputs), side.parameters), dtype=dtype)
        return record(ours(side.name, "numpy", side.definitions, trees), arrays)

    pairs = zip(places("float32"), places("float64"), strict=True)
    return {each.name: ulps_of(each.array, wide.array.astype(np.float32)) for each, wide in pairs}


def _settings(sides: Sequence[Side]) -> tuple[tuple[str, Any, Any], ...]:
    """The settings of two definitions that differ, of the first pair of layers in which they do."""
    for pair in zip(sides[0].definitions, sides[1].definitions, strict=False):
        both = [{name: value for name, value in each.settings().items() if name != "dropout"} for each in pair]
        names = [name for name in both[0] if both[0][name] != both[1].get(name)]
        if names:
            return tuple((name, both[0][name], both[1].get(name)) for name in names)
    return ()


def _paired(rows: list[PlaceRow]) -> list[PlaceRow]:
    """The rows without those that values could not pair, as long as they pair a later place, or that agrees."""
    last = max((at for at, each in enumerate(rows) if each.is_within or "≈" in each.other), default=-1)
    return [each for at, each in enumerate(rows) if each.other or (at > last and not each.is_heads)]


def _as_heads(ours: Place) -> Callable[[Place], Place]:
    """What splits channels (B, L, C) into heads, as those of a place are; other places stay."""
    count = ours.array.shape[-3] if ours.is_heads else 0

    def split(other: Place) -> Place:
        array = other.array
        if other.is_heads or array.ndim != 3 or not count or array.shape[-1] % count:
            return other if other.is_heads == ours.is_heads else other._replace(array=array[:0])
        return other._replace(array=array.reshape(*array.shape[:2], count, -1).swapaxes(1, 2))

    return split


def _rows(
    places: Sequence[Place], others: Sequence[Place], bounds: Mapping[str, float]
) -> Iterator[tuple[PlaceRow, NumpyArray | None]]:
    """Each place that the other model may have, and what it has there.

    A place is compared with that of its name, or with the nearest numbers of those that have no name in common.
    """
    named, known = {each.name: each for each in others}, {each.name for each in places}
    unnamed = [each for each in others if each.name not in known]
    for first in places:
        candidates = [named[first.name]] if first.name in named else unnamed
        alike = [each for each in map(_as_heads(first), candidates) if each.array.shape == first.array.shape]
        if alike:
            yield _row(first, min(alike, key=lambda each: distance(first.array, each.array)), bounds[first.name])


def _row(ours: Place, other: Place, bound: float) -> tuple[PlaceRow, NumpyArray | None]:
    """How a place differs from another, which is the same if it has its name, or if its numbers are near."""
    is_near = distance(ours.array, other.array) <= NEAR * distance(ours.array, np.zeros_like(ours.array))
    name = ours.name if other.name == ours.name else f"≈ {other.name}" if is_near else ""
    row = PlaceRow(ours.name, name, 0.0, bound, ours.is_heads)
    if not name:
        says = f"no activation of the other has the numbers of {ours.name}"
        return replace(row, ulps=math.inf, says=says), None
    first, second = ours.array, other.array
    unlike = difference_of(first, second)
    heads = range(first.shape[-3]) if ours.is_heads else ()
    distances = tuple(ulps_of(first[..., at, :, :], second[..., at, :, :]) for at in heads)
    row = row if unlike is None else replace(row, ulps=unlike.ulps, heads=distances, says=unlike.text(ours.name))
    return row, second
