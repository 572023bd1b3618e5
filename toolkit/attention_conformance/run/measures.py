"""How the outcome of a trial is measured: error, bound, and where the error is."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from attention_conformance.call import AttentionFunction, gradient_function, output_function
from attention_conformance.cases.batch import in_calls, other_bits
from attention_conformance.cases.case import Case, probability
from attention_conformance.oracle.attention import Exact, Truth, attention
from attention_conformance.oracle.gradients import gradients
from attention_conformance.oracle.ulps import worst_error
from attention_conformance.problem import NumpyArray, Problem
from attention_conformance.result import one_line
from attention_conformance.run.implementations import bound_of
from attention_core import scaled_dot_product_attention
from attention_core.backend import Backend, get_backend

__all__ = ["MEASURES", "Outcome", "Trial"]

Outcome: TypeAlias = tuple[float, float, str]


@dataclass(frozen=True)
class Trial:
    """One case to be run in one way.

    ``reason`` says why it is not to be run, where that is so; without an implementation, none is named in the call.
    """

    case: Case
    backend: Backend
    device: str
    dtype: str
    mode: str
    implementation: str | None = None
    reason: str = ""


def _outputs(trial: Trial, problem: Problem, function: AttentionFunction) -> dict[str, NumpyArray]:
    if problem.calls:
        return _joined(trial, problem, function)
    called = trial.backend.compile(output_function(function, problem), mode=trial.mode)
    arrays = trial.backend.from_numpy(dict(problem.arrays), device=trial.device)
    return dict(trial.backend.to_numpy(called(arrays)))


def _joined(trial: Trial, problem: Problem, function: AttentionFunction) -> dict[str, NumpyArray]:
    """The results of several calls, of which those of the same shapes are one program."""
    programs: dict[int, Callable[..., Any]] = {}
    parts = []
    for count, part in zip(problem.calls, in_calls(problem), strict=True):
        if count not in programs:
            programs[count] = trial.backend.compile(output_function(function, part), mode=trial.mode)
        arrays = trial.backend.from_numpy(dict(part.arrays), device=trial.device)
        parts.append(trial.backend.to_numpy(programs[count](arrays)))
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def _ulps(trial: Trial, problem: Problem, function: AttentionFunction) -> Outcome:
    truth = _truth(trial.case, trial.dtype)
    got = _outputs(trial, problem, function)
    expected = {name: getattr(truth, name) for name in got}
    missing = [name for name in ("weights", "logsumexp") if problem.options.get(f"return_{name}") and name not in got]
    if missing:
        return math.inf, math.nan, f"expected {', '.join(missing)} to be returned; got {', '.join(got)}"
    return _worst(trial, got, expected, truth)


def _autocast(trial: Trial, problem: Problem, function: AttentionFunction) -> Outcome:
    """The error of a call under autocast to the dtype of the problem, whose numbers are given in float32."""
    called = trial.backend.compile(output_function(function, problem), mode=trial.mode)
    wide = {
        name: array.astype(np.float32) if array.dtype.name == trial.dtype else array
        for name, array in problem.arrays.items()
    }
    arrays = trial.backend.from_numpy(wide, device=trial.device)
    autocast: Any = trial.backend.autocast  # no backend without it is tried
    with autocast.on(arrays["query"], trial.dtype):
        got = dict(trial.backend.to_numpy(called(arrays)))
    truth = _truth(trial.case, trial.dtype)
    return _worst(trial, got, {name: getattr(truth, name) for name in got}, truth)


def _gradients(trial: Trial, problem: Problem, function: AttentionFunction) -> Outcome:
    names = problem.variables
    variables = {name: problem.arrays[name] for name in names}
    others = {name: array for name, array in problem.arrays.items() if name not in names}
    placed = trial.backend.from_numpy([variables, {**others, "cotangent": problem.cotangent}], device=trial.device)
    called = trial.backend.compile(gradient_function(function, problem, trial.backend), mode=trial.mode)
    got = trial.backend.to_numpy(called(*placed))
    return _worst(trial, got, _true_gradients(trial.case, trial.dtype), _truth(trial.case, trial.dtype))


def _worst(trial: Trial, got: dict[str, NumpyArray], expected: dict[str, Exact], truth: Truth) -> Outcome:
    """The error of the array that comes nearest to its bound.

    A weight by itself is as uncertain as its score, so that its bound grows with kappa; logsumexp comes in the type of
    the computation.
    """
    wide = "float64" if trial.dtype == "float64" else "float32"
    outcomes = []
    for name, exact in expected.items():
        dtype = wide if name == "logsumexp" else trial.dtype
        stated = probability if name == "weights" else trial.case.bound
        bound = bound_of(trial.implementation, stated, dtype, truth.kappa)
        error, where = worst_error(got[name], exact, dtype)
        outcomes.append((error, bound, f"{name} {where}"))
    return max(outcomes, key=lambda outcome: outcome[0] / outcome[1])


def _exactness(trial: Trial, problem: Problem, function: AttentionFunction) -> Outcome:
    if trial.case.twin is None:
        raise ValueError(f"expected case {trial.case.name} to have a twin; got none")
    ours = _outputs(trial, problem, function)["output"]
    twins = _outputs(trial, trial.case.twin(problem), function)["output"]
    differing = int(np.sum(ours.view(np.uint8) != twins.view(np.uint8)))
    return float(differing), 0.0, f"{differing} of {ours.nbytes} bytes differ"


def _batch_bits(trial: Trial, problem: Problem, function: AttentionFunction) -> Outcome:
    got = _outputs(trial, problem, function)
    if unlike := other_bits(problem, got):
        return math.inf, 0.0, unlike
    truth = _truth(trial.case, trial.dtype)
    return _worst(trial, got, {name: getattr(truth, name) for name in got}, truth)


def _message(trial: Trial, problem: Problem, function: AttentionFunction) -> Outcome:
    expected = _raised(get_backend("numpy"), "cpu", problem, scaled_dot_product_attention)
    got = _raised(trial.backend, trial.device, problem, function)
    told = type(expected) is trial.case.raises and re.match(r"expected .*; got ", str(expected))
    same = type(got) is type(expected) and str(got) == str(expected)
    wanted = trial.case.raises.__name__ if trial.case.raises else ""
    detail = one_line(got) if same else f"expected {wanted}, as {one_line(expected)!r}; got {one_line(got)!r}"
    return float(not (told and same)), 0.0, detail


def _raised(backend: Backend, device: str, problem: Problem, function: AttentionFunction) -> Exception:
    arrays = backend.from_numpy(dict(problem.arrays), device=device)
    try:
        output_function(function, problem)(arrays)
    except Exception as error:
        return error
    return AssertionError("no error")


@functools.cache
def _truth(case: Case, dtype: str) -> Truth:
    return attention(case.problem(dtype))


@functools.cache
def _true_gradients(case: Case, dtype: str) -> dict[str, Exact]:
    return gradients(case.problem(dtype))


MEASURES: dict[str, Callable[[Trial, Problem, AttentionFunction], Outcome]] = {
    "ulp": _ulps,
    "autocast": _autocast,
    "gradient": _gradients,
    "exact": _exactness,
    "batch": _ulps,
    "batch bits": _batch_bits,
    "message": _message,
}
