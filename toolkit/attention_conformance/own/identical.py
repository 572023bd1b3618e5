"""A computation whose results must have the same bits everywhere, in reproducible arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attention_conformance.own.source import Source, Trees
from attention_conformance.problem import rounded
from attention_core.backend import Backend


@dataclass(frozen=True)
class Identical:
    """A computation of which every way of running must give the same bits.

    Attributes
    ----------
    shows : str
        A few words.
    inputs : callable
        From a `Source` to `Trees` of NumPy arrays.
    function : callable
        From `Trees` of a library's arrays to results: an array, or a tuple with ``None`` for what is not returned.
    variables : tuple of str
        What is differentiated by; empty where the results themselves are meant. The results are then multiplied by
        cotangents, drawn as well, and added up.
    batched : tuple of str
        Inputs whose first axis is the batch, if all have the same: its entries can be computed one by one.
    held : callable, optional
        From a backend and a device to further `Trees`, of the library's arrays, that are made once.
    modes : tuple of str, optional
        In which modes alone it is run, unless modes are asked for.
    larger : bool
        Whether its samples are also computed in other places of a larger batch: compilers take seconds for a new shape.
    """

    name: str
    shows: str
    inputs: Callable[[Source], Trees]
    function: Callable[[Trees], Any]
    dtype: str = "float32"
    variables: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()
    held: Callable[[Backend, str], Trees] | None = None
    modes: tuple[str, ...] | None = None
    larger: bool = False

    def trees(self) -> Trees:
        """Make the inputs, with cotangents for the results where there are variables."""
        source = Source(self.name, self.dtype)
        trees = self.inputs(source)
        if self.variables:
            with np.errstate(all="ignore"):
                results = self.function(trees)
            results = results if isinstance(results, tuple) else (results,)
            cotangents = (None if y is None else rounded(source.normal(*y.shape), y.dtype.name) for y in results)
            trees["cotangents"] = tuple(cotangents)
        return trees
