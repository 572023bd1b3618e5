"""What a case is: a name, the sentence it shows, inputs from a seed, and the bound that an error must keep."""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from attention_conformance.problem import DTYPES, NumpyArray, Problem, Rule, rounded

BITWISE = "bits"
"""The measure of cases that compare two kernels to the bit."""

Bound = Callable[[str, float], float]
"""From the name of a dtype and kappa to units in the last place."""


def ordinary(dtype: str, kappa: float) -> float:
    r"""Bound the error where scores are small.

    * Types of 16 bits are computed in float32 and rounded once, which costs half a unit.
    * float32 keeps 6 units.
    * float64 keeps :math:`10^{-15} (1 + \kappa) S`, as a unit in the last place of S is at most :math:`2^{-52} S`.
    """
    return {"float32": 6.0, "float64": 1e-15 * 2**52 * (1 + kappa)}.get(dtype, 0.51)


def merged(dtype: str, kappa: float) -> float:
    r"""Bound the error where parts are merged, each scaled again: 8 units in float32, of which 6.7 were seen."""
    return 8.0 if dtype == "float32" else ordinary(dtype, kappa)


def hard(dtype: str, kappa: float) -> float:
    r"""Bound the error where scores are large, and one rounding of a score costs :math:`u \kappa S`."""
    return max(6.0, 1 + kappa) if dtype == "float32" else ordinary(dtype, kappa)


def long(dtype: str, kappa: float) -> float:
    """Bound the error of 65536 keys, whose sum some libraries form one term after the other."""
    return 128.0 if dtype == "float32" else ordinary(dtype, kappa)


def probability(dtype: str, kappa: float) -> float:
    r"""Bound the error of a single weight: it is as uncertain as its score and the highest one together."""
    return max(6.0, 4 * (1 + kappa)) if dtype == "float32" else ordinary(dtype, kappa)


def exact_scores(dtype: str, kappa: float) -> float:
    """Bound the error where large scores cost nothing: they are exact, equal, or without any weight."""
    return ordinary(dtype, 0.0)


Drawn: TypeAlias = "Callable[[Draw], dict[str, NumpyArray]]"


class Draw:
    """Inputs of one case: drawn from a seed in float64, then rounded to the dtype before anybody computes with them."""

    def __init__(self, dtype: str, seed: int, name: str, *, width: int = 8, value_width: int = 4) -> None:
        self.dtype, self.width, self.value_width = dtype, width, value_width
        self._random = np.random.default_rng([seed, zlib.crc32(name.encode())])

    def array(self, numbers: Any) -> NumpyArray:
        """Round given numbers to the dtype."""
        return rounded(numbers, self.dtype)

    def normal(self, *shape: int, deviation: float = 1.0, mean: float = 0.0) -> NumpyArray:
        """Draw from a normal distribution."""
        return self.array(mean + deviation * self._random.standard_normal(shape))

    def signs(self, *shape: int) -> NumpyArray:
        """Draw from {-1, 1}, in float64."""
        return np.where(self._random.random(shape) < 0.5, -1.0, 1.0)

    def mask(self, *shape: int, share: float = 0.6) -> NumpyArray:
        """Draw a boolean mask in which every query sees the first key."""
        through = self._random.random(shape) < share
        through[..., 0] = True
        return through

    def problem(
        self,
        mask: Rule | None = None,
        arrays: Mapping[str, NumpyArray] | None = None,
        *,
        leading: tuple[int, ...] = (2,),
        heads: int = 3,
        groups: int | None = None,
        rows: int = 5,
        columns: int = 7,
        gradient: bool = False,
        score_mod: Rule | None = None,
        pieces: tuple[tuple[int, int], ...] = (),
        **options: Any,
    ) -> Problem:
        """Make a problem of normally distributed arrays, all sizes different, some of them replaced."""
        groups = heads if groups is None else groups
        drawn = {
            "query": self.normal(*leading, heads, rows, self.width),
            "key": self.normal(*leading, groups, columns, self.width),
            "value": self.normal(*leading, groups, columns, self.value_width),
        }
        cotangent = self.normal(*leading, heads, rows, self.value_width) if gradient else None
        return Problem({**drawn, **(arrays or {})}, mask, options, cotangent, score_mod, pieces)


def drawn(**shapes: tuple[int, ...]) -> Drawn:
    """Arrays by name, one after the other: a mask, or normally distributed numbers."""
    return lambda draw: {
        name: draw.mask(*shape) if name == "mask" else draw.normal(*shape) for name, shape in shapes.items()
    }


def inputs(
    mask: Rule | None = None,
    *arrays: Mapping[str, NumpyArray] | Drawn,
    put: Mapping[str, tuple[tuple[int, ...], float]] | None = None,
    **options: Any,
) -> Callable[[Draw], Problem]:
    """What `Draw.problem` makes of these arguments, with another number at a place of some arrays."""

    def made(draw: Draw) -> Problem:
        inputs: dict[str, NumpyArray] = {}
        for each in arrays:
            inputs |= each(draw) if callable(each) else each
        problem = draw.problem(mask, inputs, **options)
        for name, (index, number) in (put or {}).items():
            problem = problem.put(name, (..., *index), number)
        return problem

    return made


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes
    ----------
    name : str
    line : int
        The line of the contract that it shows; 0 for a numerical hazard.
    shows : str
        One sentence.
    inputs : callable
        From a `Draw` to a `Problem`.
    bound : callable
    dtypes : tuple of str
    measure : str
        One of these:

        * ``ulp``: the error of the results against the oracle.
        * ``gradient``: the error of the gradients.
        * ``exact``: whether the output is that of the problem's ``twin``, bit by bit.
        * ``batch``: the error of the results of several calls, each with samples of the batch.
        * ``batch bits``: the same, and whether equal samples have the same bits in all calls.
        * ``twice``: whether a second call of a kernel gives the same bits.
        * ``overwritten``: whether it reads new numbers in the same memory.
        * ``freed``: whether many calls keep no memory.
        * ``shuffled``, ``hidden``, ``parts``, ``again``: relations of `attention_conformance.cases.shapes`.
    compiled : tuple of str
        The dtypes in which compiled modes run the case unless others are asked for: compilers take seconds for each.
    twin : callable, optional
        From a problem to another that must give the same output, bit by bit.
    before : callable, optional
        From the problem, and a `Draw`, to problems that are called first.
    closed : callable, optional
        From the problem to its output in closed form, where a reference of its size takes too long.
    memory : float
        The memory in GiB that a kernel with all scores takes, for cases that ask for it first.
    """

    name: str
    line: int
    shows: str
    inputs: Callable[[Draw], Problem]
    bound: Bound = ordinary
    dtypes: tuple[str, ...] = DTYPES
    measure: str = "ulp"
    compiled: tuple[str, ...] = ("float32",)
    twin: Callable[[Problem], Problem] | None = None
    before: Callable[[Problem, Draw], Sequence[Problem]] | None = None
    closed: Callable[[Problem], NumpyArray] | None = None
    memory: float = 0.0

    def problem(self, dtype: str, seed: int = 0, **widths: int) -> Problem:
        """Make the inputs in one dtype; ``width`` and ``value_width`` replace those of the catalogue."""
        return self.inputs(Draw(dtype, seed, self.name, **widths))


TEXTS = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))
"""The line and the sentence of each case, by its name."""


def case(name: str, inputs: Callable[[Draw], Problem], bound: Bound = ordinary, **more: Any) -> Case:
    """The case of a name, with the line and the sentence that ``cases.toml`` has for it."""
    line, shows = TEXTS[name]
    return Case(name, line, shows, inputs, bound, **more)
