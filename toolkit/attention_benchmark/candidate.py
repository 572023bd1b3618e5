"""The candidates: implementations of the core, and their peers in the frameworks."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from attention_benchmark.problem import MASKS, NumpyArray, Problem


@dataclass(frozen=True)
class Call:
    """A function of a framework's arrays, and its arguments.

    Attributes
    ----------
    function : callable
        Maps the variables, followed by the constants, to the output.
    variables : tuple of arrays
        NumPy arrays to differentiate by, in the layout of the candidate. Those of the problem come first.
    constants : tuple of arrays
        NumPy arrays that are not differentiated by.
    layout : str
        Of the output and the variables: ``"BHLD"``, ``"BLHD"``, or ``"BLC"``.
    """

    function: Callable[..., Any]
    variables: tuple[NumpyArray, ...]
    constants: tuple[NumpyArray, ...] = ()
    layout: str = "BHLD"


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention.

    Attributes
    ----------
    name : str
        The implementation, or the function under the name that its library gives it.
    framework : str
        The framework that runs it, in a process of its own.
    mode : str
        The mode of the framework: eager, compiled, and so on.
    preparation : str
        The function from a `Problem` to a `Call`, as ``module:name``.
    is_peer : bool
        Whether the implementations of the core are compared with it.
    scores : str
        The changes of scores that a peer knows, words among the masks; the core knows all.
    """

    name: str
    framework: str
    mode: str
    preparation: str
    is_peer: bool = True
    scores: str = ""

    @property
    def key(self) -> str:
        """A unique name."""
        return ":".join((self.framework, self.mode, self.name))

    def takes(self, problem: Problem) -> bool:
        """Whether the candidate can compute a problem."""
        differentiates = self.framework in _DIFFERENTIATING
        knows = MASKS[problem.mask].scores is None or not self.is_peer or problem.mask in self.scores.split()
        return knows and (differentiates or problem.direction == "forward")

    def prepare(self, problem: Problem) -> Call:
        """Lay out the arrays of a problem, and make the call."""
        return cast(Call, pkgutil.resolve_name(f"attention_benchmark.{self.preparation}")(problem))


FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")
_DIFFERENTIATING = ("torch", "jax", "tensorflow")
_IMPLEMENTATIONS = ("dense", "blockwise", "fused", "auto", "reproducible")  # the last is an arithmetic


def _core(framework: str, mode: str) -> list[Candidate]:
    return [Candidate(name, framework, mode, f"core:{name}", is_peer=False) for name in _IMPLEMENTATIONS]


CANDIDATES = (
    *_core("numpy", "eager"),
    Candidate("naive", "numpy", "eager", "frameworks.numpy:naive", scores="sinks"),
    *_core("torch", "eager"),
    *_core("torch", "compiled"),
    Candidate("auto, assume_finite", "torch", "eager", "core:assume_finite", is_peer=False),
    Candidate("F.scaled_dot_product_attention", "torch", "eager", "frameworks.torch:fused", scores="bias sinks"),
    Candidate("flex_attention", "torch", "compiled", "frameworks.torch:flex", scores="softcap alibi bias"),
    Candidate("keras.ops.dot_product_attention", "torch", "eager", "frameworks.keras:attention", scores="sinks"),
    *_core("jax", "jit"),
    Candidate("jax.nn.dot_product_attention", "jax", "jit", "frameworks.jax:xla", scores="bias sinks"),
    Candidate("jax.nn.dot_product_attention (cudnn)", "jax", "jit", "frameworks.jax:cudnn", scores="bias sinks"),
    Candidate("nnx.dot_product_attention", "jax", "jit", "frameworks.flax:attention"),
    Candidate("keras.ops.dot_product_attention", "jax", "jit", "frameworks.keras:attention", scores="sinks"),
    *_core("tensorflow", "graph"),
    *_core("tensorflow", "xla"),
    Candidate("keras.ops.dot_product_attention", "tensorflow", "graph", "frameworks.keras:attention", scores="sinks"),
    Candidate("keras.ops.dot_product_attention", "tensorflow", "xla", "frameworks.keras:attention", scores="sinks"),
)
